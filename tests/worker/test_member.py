"""A worker goes on when its trainer is slow or away, and ends when nothing can become of it."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.swarm.calls import JoinReply, JoinRequest
from lightning_swarm.swarm.errors import DeadlineExceeded, PeerBusy, PeerUnreachable
from lightning_swarm.swarm.switchboard import Switchboard
from lightning_swarm.trainer.peer import TrainerPeer
from lightning_swarm.trainer.session import Session
from lightning_swarm.worker import member
from lightning_swarm.worker.member import Hosted, Member, TrainerGone
from tests.harness import AllAtWork, difference, fit_plain, fit_swarm, wait
from tests.models import CASES, GPT
from tests.swarm.peers import end_daemon

CASE = CASES["gpt"]


def make() -> pl.LightningModule:
    """Small."""
    return GPT(layers=2, width=16)


class At(pl.Callback):
    """Does something after a step."""

    def __init__(self, step: int, do: Callable[[Any], None]) -> None:
        self.step, self.do = step, do

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.do(trainer.strategy)


def test_a_worker_whose_own_daemon_has_ended_ends_at_once_and_no_other_does() -> None:
    def end_one(strategy: Any) -> None:
        victim = strategy._local.strategies[0]._peer
        end_daemon(victim.node)
        wait(strategy, lambda: bool(strategy._local._errors))
        (why,) = strategy._local._errors
        assert "NodeClosed: This node's libp2p daemon p2pd ended unexpectedly" in why
        strategy._local._errors.clear()
        strategy._local.start(3)

    run = fit_swarm(make, CASE.loader(5), 2, swarm={"workers": 3}, callbacks=[AllAtWork(), At(3, end_one)])
    assert difference(run.weights, fit_plain(make, CASE.loader(5)).weights) < 1e-6
    assert run.trainer.strategy.report()["counters"]["leaves"] == 1  # type: ignore[attr-defined]


class Trainer:
    """A node whose calls to a trainer are answered as a test says.

    Args:
        joins: What the trainer answers to ``join``, call by call; what is an error is raised.
        lives: Whether it answers a ``ping``.
    """

    peer_id = "worker"
    """Of the worker that asks."""

    def __init__(self, joins: Iterator[JoinReply | Exception], lives: bool = True) -> None:
        self._joins = joins
        self._lives = lives
        self.asked: Counter[str] = Counter()

    def serve(self, handlers: Any) -> None:
        """As a node."""

    async def call(self, peer: str, method: str, header: dict[str, Any], *, deadline_s: float) -> Any:
        """As a node's."""
        self.asked[method] += 1
        await asyncio.sleep(0)
        if method == "ping":
            if not self._lives:
                raise PeerUnreachable("it is gone", peer)
            return {"member": False, "session": 0}, []
        answer = next(self._joins)
        if isinstance(answer, Exception):
            raise answer
        return answer.to_dict(), []


def member_of(trainer: Trainer, timeout_s: float) -> Member:
    """One that waits so long for a trainer that is away."""

    async def nobody(trainer: str) -> None:
        return None

    request = JoinRequest(0, "fit", "cpu", 0, {}, {}, -1)
    hosted = Hosted(nn.Linear(1, 1), torch.device("cpu"), None, lambda context: None, None, request)  # type: ignore
    node: Any = trainer
    return Member(node, Switchboard(node, []), hosted, "trainer", nobody, timeout_s)


@pytest.mark.parametrize("error", [DeadlineExceeded("late", "trainer"), PeerBusy("later", "trainer")])
def test_a_trainer_that_lives_is_asked_as_long_as_it_takes(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_AGAIN_AFTER_S", 0.0)
    trainer = Trainer(iter([error] * 5 + [JoinReply("skip")]))
    assert asyncio.run(member_of(trainer, timeout_s=0.0)._ask()).action == "skip"
    away = Trainer(iter([error] * 5), lives=False)
    with pytest.raises(TrainerGone):
        asyncio.run(member_of(away, timeout_s=0.0)._ask())


def test_a_trainer_that_has_nothing_yet_is_asked_again_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_AGAIN_AFTER_S", 3600.0)
    trainer = Trainer(itertools.repeat(JoinReply("wait")))

    async def live() -> None:
        living = asyncio.create_task(member_of(trainer, timeout_s=600.0)._live())
        for _ in range(1000):
            await asyncio.sleep(0)
        living.cancel()

    asyncio.run(live())
    assert trainer.asked["join"] == 1


def test_a_worker_that_is_told_to_leave_does_not_wait_for_a_trainer_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member, "_AGAIN_AFTER_S", 0.0)
    gone = PeerUnreachable("it is gone", "trainer")

    def joins() -> Iterator[Exception]:
        yield gone
        worker._leaving = True
        yield gone

    worker = member_of(Trainer(joins(), lives=False), timeout_s=600.0)
    assert not asyncio.run(worker._live()).reassign


def test_a_newcomer_whose_readiness_is_heard_late_keeps_the_state_that_it_has_got(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer is at the end of a step for longer than the deadline of the newcomer's call."""
    heard: Counter[str] = Counter()
    downloads: list[int] = []
    ready = Session.ready

    async def late(session: Session, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Any:
        heard[caller] += 1
        if heard[caller] == 1:
            raise DeadlineExceeded("the step has not ended")
        if heard[caller] == 2:
            raise PeerBusy("the step has not ended")
        return await ready(session, caller, header, tensors)

    def count(strategy: Any) -> None:
        downloads.extend(row["downloads"] for row in strategy.report()["workers"])

    monkeypatch.setattr(Session, "ready", late)
    run = fit_swarm(make, CASE.loader(2), 2, callbacks=[At(2, count)])
    assert downloads == [1, 1] and sorted(heard.values()) == [3, 3]
    assert run.trainer.strategy.report()["counters"]["joins"] == 2  # type: ignore[attr-defined]


def test_a_worker_that_has_not_heard_of_the_sessions_end_learns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pings: Counter[str] = Counter()
    alive = TrainerPeer._alive

    async def count(trainer: TrainerPeer, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Any:
        pings[caller] += 1
        return await alive(trainer, caller, header, tensors)

    async def tell_nobody(*args: Any) -> None:
        pass

    def learn(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        workers = [worker._peer for worker in strategy._local.strategies.values()]
        wait(strategy, lambda: all(w._waiting is not None or pings[w.node.peer_id] > 9 for w in workers))
        assert len(pings) == 2 and all(w._waiting is not None for w in workers)

    monkeypatch.setattr(member, "_PING_EVERY_S", 0.5)
    monkeypatch.setattr(TrainerPeer, "_alive", count)
    monkeypatch.setattr(Session, "_tell", tell_nobody)
    fit_swarm(make, CASE.loader(2), 2, after=learn)
