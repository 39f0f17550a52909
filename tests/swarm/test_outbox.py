"""What is fetched before it exists comes when it exists, from whatever thread."""

import asyncio
import gc
import threading

import pytest
import torch

from lightning_swarm.swarm.errors import CallerError, DeadlineExceeded, Dropped, Evicted, ProtocolError
from lightning_swarm.swarm.outbox import Outbox


def test_what_is_there_is_given_at_once() -> None:
    outbox = Outbox()
    outbox.put("key", [torch.ones(2)], {"weight": 3})
    entry = asyncio.run(outbox.get("key", 0))
    assert entry.header == {"weight": 3} and torch.equal(entry.tensors[0], torch.ones(2))


def test_all_who_wait_are_woken_by_another_thread() -> None:
    outbox = Outbox()

    async def main() -> list[int]:
        waiting = [asyncio.create_task(outbox.get((1, 2), 10)) for _ in range(3)]
        await asyncio.sleep(0)
        threading.Thread(target=outbox.put, args=((1, 2), [torch.zeros(5)])).start()
        return [len(entry.tensors[0]) for entry in await asyncio.gather(*waiting)]

    assert asyncio.run(main()) == [5, 5, 5]


def test_waiting_ends_with_the_deadline_and_leaves_nothing_behind() -> None:
    outbox = Outbox()
    with pytest.raises(DeadlineExceeded, match="'key' did not come within 0.001 s"):
        asyncio.run(outbox.get("key", 0.001))
    assert not outbox._waiters


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    outbox = Outbox()

    async def main() -> None:
        task = asyncio.create_task(outbox.get("key"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert not outbox._waiters


def test_dropping_frees_entries_and_fails_those_who_wait() -> None:
    outbox = Outbox()

    async def main() -> None:
        outbox.put((0, "a"), [torch.zeros(4)])
        outbox.put((1, "a"), [torch.zeros(2)])
        lost = asyncio.create_task(outbox.get((0, "b"), 10))
        kept = asyncio.create_task(outbox.get((1, "b"), 10))
        await asyncio.sleep(0)
        assert outbox.drop(lambda key: key in {(0, "a"), (0, "b")}) == 16
        with pytest.raises(Dropped):
            await lost
        outbox.put((1, "b"))
        await kept

    asyncio.run(main())
    assert outbox.keys() == [(1, "a"), (1, "b")] and outbox.bytes == 8


def test_bytes_are_known_when_entries_are_replaced() -> None:
    outbox = Outbox()
    outbox.put("a", [torch.zeros(4)])
    outbox.put("a", [torch.zeros(1), torch.zeros(1)])
    assert outbox.bytes == 8 and outbox.peak_bytes == 16 and len(outbox) == 1 and "a" in outbox


def test_a_failed_wait_that_nobody_looks_at_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    outbox = Outbox()

    async def main() -> None:
        task = asyncio.create_task(outbox.get("a"))
        await asyncio.sleep(0)
        task.cancel()
        outbox.drop(lambda key: True)
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    gc.collect()
    assert not caplog.records


def test_fetch_gives_the_leaves_that_are_asked_for() -> None:
    outbox = Outbox()
    outbox.put((3, ("x", 1)), [torch.zeros(1), torch.ones(1)], {"n": 1})

    async def ask(header: dict) -> tuple:
        return await outbox.answer_fetch("peer", header, [])

    header, tensors = asyncio.run(ask({"key": (3, ("x", 1)), "leaves": (1,)}))
    assert header.pop("waited_s") < 1.0 and header == {"n": 1} and [tensor.item() for tensor in tensors] == [1.0]
    assert len(asyncio.run(ask({"key": (3, ("x", 1))}))[1]) == 2
    with pytest.raises(CallerError, match="has 2 tensors"):
        asyncio.run(ask({"key": (3, ("x", 1)), "leaves": (2,)}))
    for key in (None, 1.5, {"a": 1}):
        with pytest.raises(ProtocolError):
            asyncio.run(ask({"key": key}))


def test_over_the_bound_the_oldest_of_what_was_fetched_goes() -> None:
    outbox = Outbox(limit_bytes=8)
    for key in ("a", "b", "c"):
        outbox.put(key, [torch.zeros(1)], evictable=True)
    assert outbox.keys() == ["a", "b", "c"], "all are awaited"
    asyncio.run(outbox.answer_fetch("peer", {"key": "b"}, []))
    assert outbox.keys() == ["a", "c"] and outbox.evictions == 1
    outbox.release("c")
    outbox.release("a")
    assert outbox.keys() == ["a", "c"] and outbox.evictable_bytes == 8, "the bound holds"
    outbox.put("d", [torch.zeros(1)], evictable=True)
    assert outbox.keys() == ["c", "d"] and outbox.evictable_peak_bytes == 12


def test_a_fetch_for_what_was_evicted_fails_at_once_until_it_is_there_again() -> None:
    outbox = Outbox(limit_bytes=0)
    outbox.put("a", [torch.ones(1)], evictable=True)
    outbox.release("a")
    with pytest.raises(Evicted, match="'a' was fetched before"):
        asyncio.run(outbox.get("a", 10))
    outbox.put("a", [torch.ones(1)], evictable=True)
    assert len(asyncio.run(outbox.get("a", 0)).tensors) == 1
    outbox.release("a")
    outbox.drop(lambda key: True)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(outbox.get("a", 0.001))


def test_what_cannot_be_made_again_stays() -> None:
    outbox = Outbox(limit_bytes=0)
    outbox.put("sum", [torch.ones(1)])
    asyncio.run(outbox.answer_fetch("peer", {"key": "sum"}, []))
    assert "sum" in outbox and outbox.evictions == 0
