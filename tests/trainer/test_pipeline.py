"""The pipeline's repairs, with the answers of the workers let go one by one."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_swarm.swarm.calls import Context, ProbeReply, Wait
from lightning_swarm.swarm.errors import CallerError, PeerBusy, PeerUnreachable, SourceFailed, SwarmError
from lightning_swarm.swarm.tree import encode_tree
from lightning_swarm.trainer import pipeline
from lightning_swarm.trainer.flight import Flight, Job
from lightning_swarm.trainer.microbatches import Microbatch
from lightning_swarm.trainer.pipeline import Pipeline, check_links
from lightning_swarm.trainer.roster import Roster
from lightning_swarm.trainer.tally import Tally

ANSWER = ({"effects": encode_tree({})[0], "compute_s": 0.01, "held_bytes": 0, "transfers": {}, "duplicate": False}, [])


class Wire:
    """Stands for the trainer's node: every ``process`` waits until the test answers it."""

    def __init__(self) -> None:
        self.pending: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self.sent: Counter[tuple[str, str]] = Counter()
        self.allow_nan: dict[str, bool] = {}
        """Of the last task, by worker."""
        self.sources: dict[str, set[str | None]] = {}
        """From whom the last task was to fetch, by worker."""
        self.remakes: list[tuple[str, str]] = []
        """Who was asked to make which output again."""
        self.offered_s: dict[str, float | None] = {}
        """Since when those who answer a probe have what they are asked for."""

    async def call(self, peer: str, name: str, header: dict[str, Any], *rest: Any, **options: Any) -> Any:
        if name == "probe":
            if peer not in self.offered_s:
                raise PeerUnreachable("gone", peer)
            return {"computing_s": 0.0, "offered_s": self.offered_s[peer]}, []
        key = peer, header["microbatch"]
        self.sent[key] += 1
        self.allow_nan[peer] = header.get("allow_nan", False)
        self.sources[peer] = {header.get("input_peer"), header.get("gradient_peer")}
        if "remake" in header:
            self.remakes.append((peer, header["remake"]))
        self.pending[key] = asyncio.get_running_loop().create_future()
        return await self.pending[key]

    async def asked(self, *keys: tuple[str, str]) -> None:
        """Until all of these wait for their answers."""
        for key in keys:
            while key not in self.pending or self.pending[key].done():
                await self._moment()

    async def until(self, happens: Callable[[], bool]) -> None:
        """Not one turn of the event loop later."""
        while not happens():
            await self._moment()

    async def _moment(self) -> None:
        await asyncio.sleep(0)

    def answer(self, peer: str, microbatch: str = "0:0") -> None:
        self.pending[peer, microbatch].set_result(ANSWER)


class Swarm:
    """Two stages with the given workers, and one microbatch on its way."""

    def __init__(self, *workers: tuple[str, int]) -> None:
        self.wire = Wire()
        self.roster = Roster(2, Tally(), 10.0, check=lambda: None, replaceable=lambda _: False, state_bytes=lambda _: 0)
        for peer, stage in workers:
            self.join(peer, stage)
        self.pipeline = Pipeline(self.wire, self.roster, in_flight=4)  # type: ignore[arg-type]

    def join(self, peer: str, stage: int) -> None:
        self.roster.join(peer, "cpu", -1, stage)
        self.roster.admit(peer)

    def flights(self, count: int) -> list[Flight]:
        job = Job(
            session=0,
            plan_version=1,
            step=0,
            kind="training_step",
            signature=SimpleNamespace(batch_leaves=((0,), ())),  # type: ignore[arg-type]
            signature_is_planned=True,
            step_args=(0,),
            context=Context(0, 0, "train", (), {}),
        )
        return [
            Flight(job, f"0:{order}", order, 0, Microbatch(torch.ones(1), 1, 1.0), seed=order, scale=1.0)
            for order in range(count)
        ]

    async def one_under_way(self) -> tuple[asyncio.Task[None], str, str]:
        """A microbatch that b and one of a1 and a2 were asked for: its run, that one, and the other one."""
        running = asyncio.create_task(self.pipeline.run(self.flights(1)))
        await self.wire.asked(("b", "0:0"))
        first = next(peer for peer, _ in self.wire.pending if peer.startswith("a"))
        return running, first, {"a1": "a2", "a2": "a1"}[first]


def drive(scenario: Callable[[Swarm], Awaitable[None]], workers: Sequence[tuple[str, int]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(scenario(Swarm(*workers)), 20)

    asyncio.run(run())


def test_the_answer_of_a_worker_that_was_given_up_meanwhile_does_not_count() -> None:
    async def scenario(swarm: Swarm) -> None:
        running, first, other = await swarm.one_under_way()
        swarm.wire.answer("b")
        # The answer is there, but whoever waits for it has not run yet.
        swarm.wire.answer(first)
        await asyncio.sleep(0)
        swarm.pipeline.lose(first)
        await swarm.wire.asked((other, "0:0"))
        assert not swarm.pipeline.complete
        swarm.wire.answer(other)
        await running
        assert swarm.pipeline.complete
        assert swarm.pipeline.ledger.holders() == {other, "b"}

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


def test_a_worker_that_comes_back_under_its_name_does_its_microbatches_again() -> None:
    async def scenario(swarm: Swarm) -> None:
        running = asyncio.create_task(swarm.pipeline.run(swarm.flights(1)))
        await swarm.wire.asked(("a", "0:0"), ("b", "0:0"))
        swarm.wire.answer("b")
        swarm.wire.answer("a")
        await asyncio.sleep(0)
        swarm.pipeline.lose("a")
        swarm.join("a", 0)
        await swarm.wire.asked(("a", "0:0"))
        assert swarm.wire.sent["a", "0:0"] == 2
        swarm.wire.answer("a")
        await running

    drive(scenario, [("a", 0), ("b", 1)])


def test_what_a_worker_computes_is_asked_of_another_as_soon_as_it_is_given_up() -> None:
    """For whatever reason, and without waiting for its own failure to be noticed."""

    async def scenario(swarm: Swarm) -> None:
        running = asyncio.create_task(swarm.pipeline.run(swarm.flights(4)))
        await swarm.wire.asked(*(("b", f"0:{order}") for order in range(4)))
        of_first = [microbatch for peer, microbatch in swarm.wire.pending if peer == "a1"]
        assert len(of_first) == 2
        swarm.wire.pending["a1", of_first[0]].set_exception(PeerUnreachable("gone", "a1"))
        await swarm.wire.asked(*(("a2", microbatch) for microbatch in of_first))
        for _, future in swarm.wire.pending.items():
            if not future.done():
                future.set_result(ANSWER)
        while not running.done():
            await asyncio.sleep(0)
            for key, future in swarm.wire.pending.items():
                if not future.done() and key[0] != "a1":
                    future.set_result(ANSWER)
        await running
        assert swarm.pipeline.complete and swarm.pipeline.ledger.holders() == {"a2", "b"}

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


def test_what_a_worker_leaves_during_the_commit_is_not_repeated() -> None:
    async def scenario(swarm: Swarm) -> None:
        running, first, other = await swarm.one_under_way()
        swarm.wire.answer("b")
        swarm.wire.answer(first)
        await running
        # It leaves while the others commit: its part is in the sum, and must not be asked of anybody again.
        with swarm.pipeline.sealed():
            swarm.pipeline.lose(first)
            for _ in range(10):
                await asyncio.sleep(0)
        swarm.pipeline.forget()
        assert swarm.wire.sent[other, "0:0"] == 0
        assert swarm.roster.workers.keys() == {other, "b"}

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


async def _until_nan(swarm: Swarm) -> tuple[asyncio.Task[None], str, str]:
    """The microbatch's worker at stage 0 is said to have sent NaN; another one is asked."""
    running = asyncio.create_task(swarm.pipeline.run(swarm.flights(1)))
    await swarm.wire.asked(("b", "0:0"))
    first = next(peer for peer, _ in swarm.wire.pending if peer.startswith("a"))
    swarm.wire.answer(first)
    swarm.wire.pending["b", "0:0"].set_exception(SourceFailed("NaN", first, "NotFinite"))
    other = {"a1": "a2", "a2": "a1"}[first]
    await swarm.wire.asked((other, "0:0"), ("b", "0:0"))
    return running, first, other


def test_a_worker_that_alone_sent_nan_is_banned() -> None:
    async def scenario(swarm: Swarm) -> None:
        running, _, other = await _until_nan(swarm)
        assert "bans" not in swarm.roster.counters
        swarm.wire.answer(other)
        swarm.wire.answer("b")
        await running
        assert swarm.pipeline.ledger.holders() == {other, "b"}
        assert swarm.roster.counters["failed: wrong_result"] == swarm.roster.counters["bans"] == 1
        assert not swarm.wire.allow_nan["b"]

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


def test_nan_that_two_workers_find_is_the_models_own() -> None:
    async def scenario(swarm: Swarm) -> None:
        running, _, other = await _until_nan(swarm)
        swarm.wire.answer(other)
        swarm.wire.pending["b", "0:0"].set_exception(SourceFailed("NaN", other, "NotFinite"))
        await asyncio.sleep(0)
        await swarm.wire.asked(("b", "0:0"))
        assert swarm.wire.allow_nan["b"]
        swarm.wire.answer("b")
        await running
        assert "bans" not in swarm.roster.counters and other in swarm.roster.workers

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


def test_nan_of_a_stages_only_worker_is_taken_as_it_is() -> None:
    async def scenario(swarm: Swarm) -> None:
        running = asyncio.create_task(swarm.pipeline.run(swarm.flights(1)))
        await swarm.wire.asked(("a", "0:0"), ("b", "0:0"))
        swarm.wire.pending["b", "0:0"].set_exception(SourceFailed("NaN", "a", "NotFinite"))
        await asyncio.sleep(0)
        await swarm.wire.asked(("b", "0:0"))
        assert swarm.wire.allow_nan["b"] and "a" in swarm.roster.workers
        swarm.wire.answer("a")
        swarm.wire.answer("b")
        await running

    drive(scenario, [("a", 0), ("b", 1)])


def test_a_worker_that_sends_wrong_shapes_is_banned_and_a_busy_one_is_asked_again() -> None:
    async def scenario(swarm: Swarm) -> None:
        running = asyncio.create_task(swarm.pipeline.run(swarm.flights(1)))
        await swarm.wire.asked(("b", "0:0"))
        first = next(peer for peer, _ in swarm.wire.pending if peer.startswith("a"))
        swarm.wire.pending["b", "0:0"].set_exception(SourceFailed("busy", first, "PeerBusy"))
        await asyncio.sleep(0)
        await swarm.wire.asked(("b", "0:0"))
        assert first in swarm.roster.workers and "bans" not in swarm.roster.counters
        swarm.wire.pending["b", "0:0"].set_exception(SourceFailed("3 dimensions", first, "ProtocolError"))
        other = {"a1": "a2", "a2": "a1"}[first]
        await swarm.wire.asked((other, "0:0"), ("b", "0:0"))
        assert first not in swarm.roster.workers and swarm.roster.counters["failed: protocol"] == 1
        swarm.wire.answer(other)
        swarm.wire.answer("b")
        await running

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


async def _until_evicted(swarm: Swarm) -> tuple[asyncio.Task[None], str, str]:
    """The microbatch's worker at stage 0 is done, and asked to make its activation again, which b could not get."""
    running, first, other = await swarm.one_under_way()
    swarm.wire.answer(first)
    await swarm.wire.until(lambda: swarm.pipeline.ledger.count(0) == 1)
    swarm.wire.pending["b", "0:0"].set_exception(SourceFailed("evicted", first, "Evicted"))
    await swarm.wire.asked((first, "0:0"))
    assert swarm.wire.remakes == [(first, "activation")]
    return running, first, other


def test_an_evicted_source_is_made_again_and_counts_once() -> None:
    async def scenario(swarm: Swarm) -> None:
        running, first, _ = await _until_evicted(swarm)
        assert swarm.wire.sent["b", "0:0"] == 1, "it is asked again when its source is there"
        swarm.wire.answer(first)
        await swarm.wire.asked(("b", "0:0"))
        swarm.wire.answer("b")
        await running
        assert swarm.pipeline.complete and swarm.pipeline.ledger.holders() == {first, "b"}
        of_first, of_b = (swarm.roster.tally.by_worker()[peer] for peer in (first, "b"))
        assert (of_first["processed"], of_first["replayed"]) == (1, 1)
        assert (of_b["processed"], of_b["replayed"], of_b["retried"]) == (1, 0, 0)

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


def test_a_worker_that_dies_while_it_makes_something_again_is_replaced_and_counts_once() -> None:
    async def scenario(swarm: Swarm) -> None:
        running, first, other = await _until_evicted(swarm)
        swarm.wire.pending[first, "0:0"].set_exception(PeerUnreachable("gone", first))
        await swarm.wire.until(lambda: other in swarm.wire.sources["b"])
        await swarm.wire.asked((other, "0:0"), ("b", "0:0"))
        swarm.wire.answer(other)
        swarm.wire.answer("b")
        await running
        assert swarm.pipeline.complete and swarm.pipeline.ledger.holders() == {other, "b"}
        assert swarm.roster.counters["lost microbatches"] == 1
        assert len(swarm.roster.tally.recoveries_s) == 1

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


def test_one_that_cannot_reach_its_own_source_any_more_leaves_its_part_to_another() -> None:
    """What it has accumulated must not be accumulated by another one besides."""

    async def scenario(swarm: Swarm) -> None:
        running, first, _ = await swarm.one_under_way()
        swarm.wire.answer("b")
        await swarm.wire.until(lambda: swarm.pipeline.ledger.count(1) == 1)
        swarm.wire.pending[first, "0:0"].set_exception(SourceFailed("evicted", "b", "Evicted"))
        await swarm.wire.asked(("b", "0:0"))
        assert swarm.wire.remakes == [("b", "gradient")]
        swarm.wire.offered_s[first] = None  # It answers the trainer.
        swarm.join("b2", 1)
        swarm.wire.pending["b", "0:0"].set_exception(SourceFailed("no way", first, "PeerUnreachable"))
        await swarm.wire.until(lambda: "b2" in swarm.wire.sources[first])
        await swarm.wire.asked(("b2", "0:0"), (first, "0:0"))
        swarm.wire.answer("b2")
        swarm.wire.answer(first)
        await running
        assert swarm.pipeline.complete and swarm.pipeline.ledger.holders() == {first, "b2"}
        assert "b" not in swarm.roster.workers and swarm.roster.counters["links banned"] == 1
        assert [(ban["peer"], ban["stage"], ban["cause"]) for ban in swarm.roster.tally.bans] == [
            (f"{first}>b", 1, "link")
        ]

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


def test_where_a_stages_only_worker_cannot_reach_its_source_the_source_is_replaced() -> None:
    async def scenario(swarm: Swarm) -> None:
        running, first, other = await swarm.one_under_way()
        swarm.wire.answer(first)
        await asyncio.sleep(0)
        swarm.wire.offered_s[first] = None  # It answers the trainer.
        swarm.wire.pending["b", "0:0"].set_exception(SourceFailed("no way", first, "PeerUnreachable"))
        await swarm.wire.asked((other, "0:0"), ("b", "0:0"))
        assert swarm.roster.counters["links banned"] == 1 and "bans" not in swarm.roster.counters
        swarm.wire.answer(other)
        swarm.wire.answer("b")
        await running
        assert swarm.pipeline.ledger.holders() == {other, "b"}

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


def test_a_mistake_of_our_own_ends_the_run_and_bans_nobody() -> None:
    async def scenario(swarm: Swarm) -> None:
        running, _, _ = await swarm.one_under_way()
        swarm.wire.pending["b", "0:0"].set_exception(CallerError("a malformed request"))
        with pytest.raises(CallerError, match="a malformed request"):
            await running
        assert "bans" not in swarm.roster.counters and swarm.roster.workers.keys() == {"a1", "a2", "b"}

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


def _blamed(offered_s: dict[str, float | None], *waits: Wait, patience_s: float = 2.0) -> tuple[str | None, str] | None:
    """The peer and the cause that follow from what a silent worker waits for."""
    swarm = Swarm(("a", 0), ("b", 1))
    swarm.wire.offered_s = offered_s
    swarm.roster.transferred("a", "b", 1.0)
    try:
        asyncio.run(check_links(swarm.wire, swarm.roster, "b", ProbeReply(0.0, 0, waits), patience_s))  # type: ignore[arg-type]
    except SwarmError as error:
        assert isinstance(error, SourceFailed)
        return error.peer, error.cause
    return None


def test_a_link_is_dead_when_what_one_worker_waits_for_has_been_offered_by_the_other_for_long() -> None:
    long, short = Wait("a", "0:0/a1", 9.0), Wait("a", "0:0/a1", 3.0)
    assert _blamed({"a": 8.0}, long) == ("a", "DeadlineExceeded")
    assert _blamed({"a": None}, long) is None, "it is not there yet"
    assert _blamed({"a": 1.0}, long) is None, "it may be on its way"
    assert _blamed({"a": 8.0}, short) is None, "four usual transfers have not passed"
    assert _blamed({"a": 8.0}, long, patience_s=10.0) is None
    assert _blamed({}, long) == ("a", "PeerUnreachable")
    assert _blamed({"a": 8.0}) is None


def test_a_worker_given_up_when_all_has_landed_leaves_its_part_to_be_repeated() -> None:
    """Between the last answer and the moment when whoever waits for all of them goes on."""

    async def scenario(swarm: Swarm) -> None:
        running, first, other = await swarm.one_under_way()
        swarm.wire.answer(first)
        swarm.wire.answer("b")
        await swarm.wire.until(lambda: not any(t.get_name() == "microbatch 0:0" for t in asyncio.all_tasks()))
        assert swarm.pipeline.complete and not running.done()
        swarm.pipeline.lose(first)
        await swarm.wire.asked((other, "0:0"))
        swarm.wire.answer(other)
        await running
        await swarm.pipeline.repair()
        assert swarm.pipeline.complete and swarm.pipeline.ledger.holders() == {other, "b"}

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])


@pytest.mark.parametrize("error", [PeerBusy("full", "b"), SourceFailed("full", "a", "PeerBusy")])
def test_a_microbatch_that_fails_again_and_again_ends_the_run_and_is_named(
    error: SwarmError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_MOST_ATTEMPTS", 4)
    monkeypatch.setattr(pipeline, "_BUSY_S", 0.0)

    async def scenario(swarm: Swarm) -> None:
        running = asyncio.create_task(swarm.pipeline.run(swarm.flights(1)))
        await swarm.wire.asked(("a", "0:0"))
        swarm.wire.answer("a")
        for _ in range(4):
            await swarm.wire.asked(("b", "0:0"))
            swarm.wire.pending["b", "0:0"].set_exception(error)
        with pytest.raises(
            SwarmError, match=r"^Microbatch 0:0 failed 4 times at stage 1; the last time: .*full$"
        ) as caught:
            await running
        assert type(caught.value) is SwarmError and swarm.wire.sent["b", "0:0"] == 4
        assert not swarm.pipeline._flying

    drive(scenario, [("a", 0), ("b", 1)])


def test_an_output_that_cannot_be_made_again_ends_the_run_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_MOST_ATTEMPTS", 3)
    monkeypatch.setattr(pipeline, "_BUSY_S", 0.0)

    async def scenario(swarm: Swarm) -> None:
        running, first, _ = await _until_evicted(swarm)
        for _ in range(3):
            await swarm.wire.asked((first, "0:0"))
            swarm.wire.pending[first, "0:0"].set_exception(PeerBusy("full", first))
        message = r"^The activation of microbatch 0:0 at stage 0 could not be made again\.$"
        with pytest.raises(SwarmError, match=message):
            await running

    drive(scenario, [("a1", 0), ("a2", 0), ("b", 1)])
