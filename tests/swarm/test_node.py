"""Calls between real peers: what is sent arrives, and what fails says whose fault it is."""

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm._compat_hivemind import P2P, P2PDaemonError, PeerID, attach
from lightning_swarm.swarm.errors import (
    CallerError,
    DeadlineExceeded,
    NodeClosed,
    PeerBusy,
    PeerUnreachable,
    ProtocolError,
    RemoteError,
    SourceFailed,
)
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import Outbox, fetch
from tests.swarm.peers import end_daemon


class Pair:
    """Two peers of one run; the second answers."""

    def __init__(self, shortcuts: bool) -> None:
        self.caller = Node(run_id="pair", shortcuts=shortcuts)
        self.callee = Node(run_id="pair", initial_peers=self.caller.maddrs)
        self.outbox = Outbox()
        self.cancelled = threading.Event()
        self.raising: BaseException = ValueError("nothing")
        calls = {"echo": self.echo, "wait": self.wait, "fail": self.fail, "fetch": self.outbox.answer_fetch}
        self.callee.serve(calls)
        self.caller.serve(calls)

    async def echo(self, caller: str, header: dict, tensors: list[Tensor]) -> tuple[dict, list[Tensor]]:
        return {**header, "caller": caller}, tensors

    async def wait(self, caller: str, header: dict, tensors: list[Tensor]) -> tuple[dict, list[Tensor]]:
        try:
            await asyncio.sleep(1000)
        finally:
            self.cancelled.set()
        return {}, []

    async def fail(self, caller: str, header: dict, tensors: list[Tensor]) -> tuple[dict, list[Tensor]]:
        raise self.raising

    def call(
        self, method: str, header: dict | None = None, tensors: Any = (), **options: Any
    ) -> tuple[dict, list[Tensor]]:
        options = {"deadline_s": 10.0, **options}
        return self.caller.run(self.caller.call(self.callee.peer_id, method, header or {}, tensors, **options))


@pytest.fixture(scope="module", params=[True, False], ids=["shortcut", "libp2p"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.callee.close()
    pair.caller.close()


def test_tensors_arrive_as_they_were_sent_and_belong_to_the_receiver(pair: Pair) -> None:
    sent = [torch.randn(300, 1000), torch.zeros(0, 3), torch.tensor(7), torch.randn(5).bfloat16(), torch.ones(4).t()]
    header, received = pair.call("echo", {"key": ("a", 1, (2, None)), 5: b"\x00"}, sent)
    assert header == {"key": ("a", 1, (2, None)), 5: b"\x00", "caller": pair.caller.peer_id}
    assert all(
        torch.equal(*tensors) and tensors[0].dtype == tensors[1].dtype for tensors in zip(sent, received, strict=True)
    )
    received[0].zero_()
    assert sent[0].any()


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_a_codec_applies_in_both_directions_and_shrinks_the_traffic(pair: Pair, codec: str) -> None:
    tensor = torch.randn(600_000)
    before = sum(count for traffic in pair.caller.traffic for count in traffic.values())
    _, (received,) = pair.call("echo", {}, [tensor], codec=codec)
    traffic = sum(count for traffic in pair.caller.traffic for count in traffic.values()) - before
    assert (received - tensor).norm() < 0.03 * tensor.norm()
    assert traffic < 2 * tensor.numel() * (1.02 if codec == "int8" else 2) + 1000


def test_both_sides_count_the_same_bytes(pair: Pair) -> None:
    def echoed() -> list[int]:
        return [counts.get("echo", 0) for node in (pair.caller, pair.callee) for counts in node.traffic]

    before = echoed()
    pair.call("echo", {}, [torch.zeros(100)])
    sent, received, their_sent, their_received = (now - then for now, then in zip(echoed(), before, strict=True))
    assert sent == their_received > 400 and received == their_sent > 400


def test_the_counts_of_bytes_do_not_become_more_with_the_peers(pair: Pair) -> None:
    def call_from_another_peer() -> int:
        with Node(run_id="pair", initial_peers=pair.callee.maddrs) as other:
            other.run(other.call(pair.callee.peer_id, "echo", {}, deadline_s=10))
        return sum(map(len, pair.callee.traffic))

    assert call_from_another_peer() == call_from_another_peer()


def test_many_calls_at_once_do_not_mix(pair: Pair) -> None:
    async def all_at_once() -> list[tuple[dict, list[Tensor]]]:
        calls = [
            pair.caller.call(pair.callee.peer_id, "echo", {"n": n}, [torch.full((n * 997,), n)], deadline_s=20)
            for n in range(60)
        ]
        return await asyncio.gather(*calls)

    for n, (header, (tensor,)) in enumerate(pair.caller.run(all_at_once())):
        assert header["n"] == n and tensor.numel() == n * 997 and bool((tensor == n).all())


def test_a_peer_calls_itself_as_it_calls_others(pair: Pair) -> None:
    tensor = torch.ones(2)
    call = pair.caller.call(pair.caller.peer_id, "echo", {"key": [1, 2]}, [tensor], deadline_s=1)
    header, (received,) = pair.caller.run(call)
    received.zero_()
    assert header["key"] == (1, 2) and tensor.all()
    pair.raising = KeyError("mine")
    with pytest.raises(RemoteError, match="KeyError: 'mine'"):
        pair.caller.run(pair.caller.call(pair.caller.peer_id, "fail", {}, deadline_s=1))
    with pytest.raises(DeadlineExceeded):
        pair.caller.run(pair.caller.call(pair.caller.peer_id, "wait", {}, deadline_s=0.01))


def test_what_the_users_code_raises_arrives_with_its_traceback(pair: Pair) -> None:
    pair.raising = ZeroDivisionError("by zero")
    with pytest.raises(RemoteError, match="builtins.ZeroDivisionError: by zero") as caught:
        pair.call("fail")
    assert caught.value.peer == pair.callee.peer_id and "raise self.raising" in caught.value.traceback


def test_whose_fault_it_was_arrives(pair: Pair) -> None:
    pair.raising = PeerBusy("later")
    with pytest.raises(PeerBusy, match="later"):
        pair.call("fail")
    pair.raising = PeerUnreachable("gone", "QmThird")
    with pytest.raises(SourceFailed) as caught:
        pair.call("fail")
    assert caught.value.peer == "QmThird" and caught.value.cause == "PeerUnreachable"
    pair.raising = ProtocolError("Task: field")
    with pytest.raises(CallerError, match="Task: field"):
        pair.call("fail")


def test_a_handler_that_is_cancelled_by_its_own_side_is_answered(pair: Pair) -> None:
    pair.raising = asyncio.CancelledError()
    with pytest.raises(PeerBusy, match="gave up 'fail'"):
        pair.call("fail")
    pair.call("echo")


@pytest.mark.parametrize(
    ("method", "header", "options", "message"),
    [
        ("none", {}, {}, "does not answer 'none'; it answers: echo, fail, fetch, wait"),
        ("echo", {"x": object()}, {}, "may hold only"),
        ("echo", {}, {"codec": "zip"}, "Unknown codec 'zip'"),
        ("echo", {}, {"deadline_s": float("inf")}, "needs a deadline of at most 3600 s; got inf"),
        ("echo", {}, {"deadline_s": 0}, "needs a deadline"),
        ("echo", {}, {"tensors": [torch.zeros(1, device="meta")]}, "no plain memory"),
    ],
    ids=["method", "header", "codec", "deadline", "no time", "tensor"],
)
def test_the_callers_mistakes_are_named(pair: Pair, method: str, header: dict, options: dict, message: str) -> None:
    with pytest.raises(CallerError) as caught:
        pair.call(method, header, **options)
    assert message in str(caught.value)
    pair.call("echo")


def test_a_call_ends_with_its_deadline_and_so_does_its_handler(pair: Pair) -> None:
    pair.cancelled.clear()
    with pytest.raises(DeadlineExceeded, match="did not answer 'wait' within 0.05 s"):
        pair.call("wait", deadline_s=0.05)
    assert pair.cancelled.wait(5)


def test_a_cancelled_call_cancels_its_handler(pair: Pair) -> None:
    pair.cancelled.clear()

    async def give_up() -> None:
        task = asyncio.create_task(pair.caller.call(pair.callee.peer_id, "wait", {}, deadline_s=100))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    pair.caller.run(give_up())
    assert pair.cancelled.wait(5)


def test_ctrl_c_interrupts_a_wait_and_cancels_the_call(pair: Pair) -> None:
    pair.cancelled.clear()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pair.call("wait", deadline_s=100)
    assert pair.cancelled.wait(5)


def test_a_fetch_waits_for_what_does_not_exist_yet(pair: Pair) -> None:
    future = pair.caller.spawn(fetch(pair.caller, pair.callee.peer_id, (7, "a"), deadline_s=10), "fetching")
    time.sleep(0.05)
    assert not future.done()
    pair.outbox.put((7, "a"), [torch.ones(3)], {"n": 1})
    entry = future.result(5)
    assert torch.equal(entry.tensors[0], torch.ones(3)) and entry.header == {"n": 1}


@pytest.mark.parametrize("peer", ["", "no peer id!", "abc"])
def test_what_is_no_peer_id_is_the_callers_mistake(pair: Pair, peer: str) -> None:
    with pytest.raises(CallerError, match="is not a peer id"):
        pair.caller.run(pair.caller.call(peer, "echo", {}, deadline_s=5))


def test_an_unknown_peer_is_unreachable(pair: Pair) -> None:
    unknown = "12D3KooWEiXZcTZLnBNGsDwoStTQUmQ3cbnU3h3TDSMpfvwX8dGF"
    with pytest.raises(PeerUnreachable, match=unknown):
        pair.caller.run(pair.caller.call(unknown, "echo", {}, deadline_s=10))


def test_a_call_is_served_once(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"served already: \['echo'\]"):
        pair.callee.serve({"echo": pair.echo, "new": pair.echo})


def test_a_peer_of_another_run_is_refused(pair: Pair) -> None:
    with (
        Node(run_id="another", initial_peers=pair.caller.maddrs) as other,
        pytest.raises(ProtocolError, match="of another run or version") as caught,
    ):
        other.run(other.call(pair.callee.peer_id, "echo", {}, deadline_s=10))
    assert caught.value.peer == pair.callee.peer_id


def test_threads_wait_for_the_loop_and_never_the_loop_for_itself(pair: Pair) -> None:
    async def inside() -> None:
        pair.caller.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="await the coroutine"):
        pair.caller.run(inside())
    with pytest.raises(DeadlineExceeded, match=r"Not done within 0\.01 s"):
        pair.caller.run(asyncio.sleep(100), timeout_s=0.01)


def test_a_failing_background_task_is_logged(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        pair.caller.spawn(fail(), "a name").result(5)
    assert "The background task 'a name' failed" in caplog.text and "broken" in caplog.text


def test_calls_take_the_way_that_they_should(pair: Pair, request: pytest.FixtureRequest) -> None:
    pair.call("echo")
    kinds = {type(stream).__name__ for stream in pair.callee._answerer.streams}
    assert kinds == {"_AnsweringNeighbour" if pair.caller._shortcuts else "_Answering"}


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_peer_relays_for_nobody(pair: Pair) -> None:
    """To be a relay is the daemon's default, and costs time and memory at its start."""

    async def ask(protocol: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            p2p = await attach(f"/unix{pair.caller._context.control_path}", directory)
            try:
                *_, writer = await p2p._client.stream_open(PeerID.from_base58(pair.callee.peer_id), [protocol])
                writer.close()
            finally:
                await p2p.shutdown()

    pair.caller.run(ask("/ipfs/id/1.0.0"))
    with pytest.raises(P2PDaemonError, match="protocols not supported"):
        pair.caller.run(ask("/libp2p/circuit/relay/0.2.0/hop"))


def test_starting_and_closing_again_and_again_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="test-", dir="/tmp") as name:
        start_and_close_again_and_again(Path(name))


def start_and_close_again_and_again(directory: Path) -> None:
    for round in range(5):
        with Node(run_id="again", runtime_dir=directory) as first:
            with Node(run_id="again", runtime_dir=directory, initial_peers=first.maddrs) as second:
                waiting = second.spawn(asyncio.sleep(100), "sleeping")
                assert len(list(directory.iterdir())) == 2
        assert not list(directory.iterdir()) and waiting.cancelled()
        if round == 0:
            files, threads = open_files(), threading.active_count()
    assert open_files() <= files and threading.active_count() <= threads
    second.close()
    for use in (lambda: second.run(asyncio.sleep(0)), lambda: second.spawn(asyncio.sleep(0), "late")):
        with pytest.raises(NodeClosed):
            use()


def test_a_daemon_that_ends_by_itself_while_its_node_is_being_closed_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutdown = P2P.shutdown

    async def slowly(p2p: P2P) -> None:
        await shutdown(p2p)
        await asyncio.sleep(1.0)

    monkeypatch.setattr(P2P, "shutdown", slowly)
    node = Node(run_id="slow")
    node.close()
    assert not caplog.messages


def test_closing_fails_those_who_wait() -> None:
    node = Node(run_id="waiting")
    threading.Timer(0.2, node.close).start()
    with pytest.raises(NodeClosed):
        node.run(asyncio.sleep(100))


def test_a_node_whose_daemon_has_ended_keeps_nobody_waiting() -> None:
    with Node(run_id="ended") as node:
        cancelled = threading.Event()

        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        assert node.run(node.while_alive(asyncio.sleep(0, "done"))) == "done"
        waiting = node.spawn(node.while_alive(wait()), "waiting")
        end_daemon(node)
        with pytest.raises(NodeClosed, match="p2pd ended unexpectedly"):
            waiting.result(30)
        assert cancelled.wait(30)
        with pytest.raises(NodeClosed, match="p2pd ended unexpectedly"):
            node.run(node.while_alive(wait()), timeout_s=30)


def test_a_peer_keeps_its_name_with_an_identity(tmp_path: Path) -> None:
    with Node(run_id="name", identity_path=tmp_path / "key") as node:
        name = node.peer_id
    with Node(run_id="name", identity_path=tmp_path / "key") as node:
        assert node.peer_id == name
