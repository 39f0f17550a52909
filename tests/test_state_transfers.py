"""Workers that join get the stage's state although donors fail or the transfer takes long, and the weights are those of
an undisturbed run, bit for bit.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_swarm.faults import Kind, Reply
from lightning_swarm.swarm import node, parts
from lightning_swarm.swarm.frames import Limits
from lightning_swarm.swarm.parts import is_part
from lightning_swarm.testing import Fault, Faults
from lightning_swarm.worker.state import StageState
from tests.harness import AllAtWork, Meddling, Outcome, difference, digests, fit_swarm, wait
from tests.models import CASES, GPT

STEPS, JOIN_AT = 8, 2


def make() -> pl.LightningModule:
    return GPT(layers=2, width=16, dropout=0.1, noise=0.1, tied=True, optimizer="adamw")


class Join(pl.Callback):
    """Starts a worker of stage 0 before a step, lets some steps pass, and waits until it is at work.

    Args:
        begun: Whether the worker has got as far as it shall before the steps pass.
        steps: How many.
        arrive: Called when they have passed.
    """

    def __init__(self, begun: Callable[[], bool], steps: int = 0, arrive: Callable[[], Any] = lambda: None) -> None:
        self.begun, self.steps, self.arrive = begun, steps, arrive
        self.others: set[str] = set()
        self.digests: set[str] = set()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        workers = strategy._session.roster.workers if index else {}
        if index == JOIN_AT:
            self.others = set(workers)
            strategy._local.start(99)
            wait(strategy, self.begun)
        if index == JOIN_AT + self.steps:
            assert strategy._session.step == index
            assert not self.steps or not self._there(workers)
            self.arrive()
            wait(strategy, lambda: self._arrives(strategy._session))
        if index == STEPS - 1:
            self.digests = digests(strategy, 0)

    def _arrives(self, session: Any) -> bool:
        assert session.counters["joins"] < 20, "it does not ask again and again"
        return self._there(session.roster.workers)

    def _there(self, workers: dict[str, Any]) -> bool:
        return any(worker.ready for peer, worker in workers.items() if peer not in self.others)


class StateFaults(Meddling):
    """Something happens to the first state that one worker sends to another when all are at work."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.stream: Any = None
        """By which it is sent."""

    async def after(self, worker: Any, call: str, caller: str, header: dict[str, Any], reply: Reply) -> Reply:
        """When the worker has answered."""
        awaited = is_part(header.get("key"), "state") and caller != worker.trainer
        if awaited and worker.service.server.version == JOIN_AT and not self.asked.is_set():
            self.asked.set()
            me = asyncio.current_task()
            self.stream = next(stream for stream in worker.node._answerer.streams if stream._task is me)
            return await asyncio.to_thread(self.happen, *reply)
        return reply

    def happen(self, header: dict[str, Any], tensors: Sequence[Tensor]) -> Reply:
        """The state that is sent instead."""
        raise NotImplementedError


class Held(StateFaults):
    """It is held back."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def happen(self, header: dict[str, Any], tensors: Sequence[Tensor]) -> Reply:
        """As it is, but later."""
        self.release.wait()
        return header, tensors


class Halved(StateFaults):
    """Half of its bytes are sent, then the donor vanishes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.withheld = 0

    def happen(self, header: dict[str, Any], tensors: Sequence[Tensor]) -> Reply:
        """As it is."""
        self.stream.send = self._send_half
        return header, tensors

    def _send_half(self, frame: Sequence[Any]) -> None:
        whole = b"".join(bytes(part) for part in frame)
        self.sent = len(whole) // 2
        self.withheld = len(whole) - self.sent
        self.stream.transport.write(whole[: self.sent])
        self._vanish()

    def _vanish(self) -> None:
        if self.stream.transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(0.01, self._vanish)
        else:
            donor = self.stream._answerer.context.peer_id
            threading.Thread(target=self._kill, args=(donor,), daemon=True).start()


class GoneAfter(Meddling):
    """The first worker that gives its state to another one vanishes when it has given some parts.

    Args:
        parts: How many.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.donor: str | None = None
        self.gone = threading.Event()

    async def after(self, worker: Any, call: str, caller: str, header: dict[str, Any], reply: Reply) -> Reply:
        """When the worker has answered."""
        awaited = is_part(header.get("key"), "state") and caller != worker.trainer
        if not awaited or worker.service.server.version != JOIN_AT:
            return reply
        me = worker.node.peer_id
        self.donor = self.donor or me
        if self.donor == me and header["key"].endswith(f"/{self.parts}"):
            self.gone.set()
            threading.Thread(target=self._kill, args=(me,), daemon=True).start()
            await asyncio.Event().wait()
        return reply


class Early(Meddling):
    """The first stage's answers wait until a worker has joined the last one, which has reduced its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    async def after(self, worker: Any, call: str, caller: str, header: dict[str, Any], reply: Reply) -> Reply:
        """When the worker has answered."""
        if call == "process" and (header["step"], header["stage"]) == (JOIN_AT, 0):
            await asyncio.to_thread(self.release.wait)
        return reply


class JoinEarly(pl.Callback):
    """Starts a worker of the last stage when that has reduced, and waits until it is at work.

    Args:
        early: Waits for it.
    """

    def __init__(self, early: Early) -> None:
        self.early = early
        self.digests: set[str] = set()
        self.joined_at: int | None = None
        """In which step, between its reduction and its commit."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        if index == JOIN_AT:
            strategy._peer.node.spawn(self._join(strategy), "a worker that joins early")
        if index == JOIN_AT + 1:
            wait(strategy, lambda: len(strategy._session.roster.at_stage(1)) == 2)
        if index == STEPS - 1:
            self.digests = digests(strategy, 1)

    async def _join(self, strategy: Any) -> None:
        session = strategy._session
        try:
            await self._until(lambda: session.step == JOIN_AT and "stage1" in session._step_end._step.reduced)
            strategy._local.start(99)
            await self._until(lambda: len(session.roster.at_stage(1, ready=False)) == 2)
            if "stage1" in session._step_end._step.reduced:
                self.joined_at = session.step
        finally:
            self.early.release.set()

    async def _until(self, happens: Callable[[], bool]) -> None:
        for _ in range(6000):
            if happens():
                return
            await asyncio.sleep(0.01)


class Ruined(StateFaults):
    """Its parameters are NaN, and its checksums say nothing against that."""

    def happen(self, header: dict[str, Any], tensors: Sequence[Tensor]) -> Reply:
        """As of a worker whose training has gone wrong."""
        state = StageState.from_wire(header["header"], [t.view(s) for t, s in zip(tensors, header["shapes"])])
        for parameter in state.parameters.values():
            parameter.fill_(torch.nan)
        described, ruined = state.to_wire()
        return {**header, "header": described}, [tensor.view(-1) for tensor in ruined]


def fit(faults: Faults, *callbacks: pl.Callback, workers: int = 4) -> Outcome:
    """Two stages. The trainer's copy of the model is that of the beginning, so workers give the state."""
    swarm = {"workers": workers, "microbatches": 4, "reproducible": True, "faults": faults}
    return fit_swarm(make, CASES["gpt"].loader(STEPS), 2, swarm=swarm, callbacks=[AllAtWork(), *callbacks])


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    return fit(Faults([]), workers=2)


def _same(run: Outcome, undisturbed: Outcome) -> None:
    assert difference(run.weights, undisturbed.weights) == 0.0
    assert difference(run.optimizer, undisturbed.optimizer) == 0.0


def _joined_whole(run: Outcome, join: Join) -> None:
    assert len(join.digests) == 1, "all replicas are the same"
    counters = run.trainer.strategy.report()["counters"]  # type: ignore[attr-defined]
    assert counters["joins"] >= 5 and "stages lost" not in counters


@pytest.mark.parametrize("kind", ["kill", "nan", "corrupt", "refuse", "hang"])
def test_a_donor_that_vanishes_refuses_or_sends_what_is_damaged_is_followed_by_another(
    kind: Kind, undisturbed: Outcome
) -> None:
    faults = Faults([Fault(kind, "state", stage=0, step=JOIN_AT)])
    join = Join(begun=lambda: bool(faults.fired))
    run = fit(faults, join)
    _same(run, undisturbed)
    _joined_whole(run, join)


def test_a_donor_that_vanishes_at_half_of_the_state_is_followed_by_another(undisturbed: Outcome) -> None:
    halved = Halved()
    join = Join(begun=halved.asked.is_set)
    run = fit(halved, join)
    _same(run, undisturbed)
    assert halved.sent > 1000 and halved.withheld > 1000
    _joined_whole(run, join)
    assert run.trainer.strategy.report()["counters"]["leaves"] >= 1, "the donor's"  # type: ignore[attr-defined]


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state of a stage goes into one message; the sums of its gradients do."""
    parameters = sum(parameter.numel() for parameter in make().parameters()) // 2
    monkeypatch.setattr(node, "Limits", partial(Limits, body_bytes=8 * parameters))
    monkeypatch.setattr(parts, "_PART_BYTES", 2 * parameters)


def test_states_larger_than_a_message_go_to_newcomers_and_to_the_trainer(
    small_messages: None, undisturbed: Outcome
) -> None:
    held = Held()
    held.release.set()
    join = Join(begun=held.asked.is_set)
    run = fit(held, join)
    _same(run, undisturbed)
    _joined_whole(run, join)
    assert "leaves" not in run.trainer.strategy.report()["counters"]  # type: ignore[attr-defined]


def test_a_donor_that_vanishes_after_some_parts_of_the_state_is_followed_by_another(
    small_messages: None, undisturbed: Outcome
) -> None:
    going = GoneAfter(parts=3)
    join = Join(begun=going.gone.is_set)
    run = fit(going, join)
    _same(run, undisturbed)
    _joined_whole(run, join)
    assert run.trainer.strategy.report()["counters"]["leaves"] == 1, "the donor's"  # type: ignore[attr-defined]


def test_a_donor_whose_parameters_are_nan_is_followed_by_another(undisturbed: Outcome) -> None:
    ruined = Ruined()
    join = Join(begun=ruined.asked.is_set)
    run = fit(ruined, join)
    _same(run, undisturbed)
    _joined_whole(run, join)
    report = run.trainer.strategy.report()  # type: ignore[attr-defined]
    # With NaN it would be found out at work, too, and come back.
    assert report["bans"] == [] and "leaves" not in report["counters"]


def test_a_download_that_lasts_three_steps_is_made_up_for(undisturbed: Outcome) -> None:
    held = Held()
    join = Join(begun=held.asked.is_set, steps=3, arrive=held.release.set)
    run = fit(held, join)
    _same(run, undisturbed)
    assert held.release.is_set() and len(join.digests) == 1, "all replicas are the same"
    assert "leaves" not in run.trainer.strategy.report()["counters"]  # type: ignore[attr-defined]


def test_a_worker_that_joins_between_a_stages_reduction_and_its_commit_is_at_the_next_step_with_it(
    undisturbed: Outcome,
) -> None:
    early = Early()
    join = JoinEarly(early)
    run = fit(early, join, workers=3)
    _same(run, undisturbed)
    assert join.joined_at == JOIN_AT and len(join.digests) == 1, "all replicas are the same"
    report = run.trainer.strategy.report()  # type: ignore[attr-defined]
    assert report["counters"]["joins"] == 4 and "leaves" not in report["counters"] and report["bans"] == []
