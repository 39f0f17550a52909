"""Workers vanish in the middle of a step, and the weights are those of an undisturbed run, bit for bit."""

import asyncio
import gc
import logging
import math
import threading
import time
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor, nn

from lightning_swarm.faults import Moment
from lightning_swarm.swarm.errors import SwarmError
from lightning_swarm.testing import Fault, Faults
from lightning_swarm.trainer import roster, session
from lightning_swarm.trainer.roster import Roster
from lightning_swarm.trainer.session import Session
from tests.harness import AllAtWork, Meddling, Outcome, difference, fit_swarm, logged, long_run, ready, wait
from tests.models import CASES, GPT, Regressor

CASE = CASES["gpt"]
STEPS = 8


def make() -> pl.LightningModule:
    """With everything random, so that a repeated microbatch shows whether its masks were the same."""
    return GPT(dropout=0.1, noise=0.1, tied=True, optimizer="adamw")


def fit(callbacks: list[pl.Callback], workers: int, **swarm: Any) -> Outcome:
    """Three stages; gradients in float64."""
    options = {"workers": workers, "microbatches": 6, "reproducible": True, "snapshot_every_n_steps": 3, **swarm}
    return fit_swarm(make, CASE.loader(STEPS), 3, swarm=options, callbacks=callbacks)


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    """The same run without failures, with one worker a stage."""
    return fit([], workers=3)


class Kill(pl.Callback):
    """Closes the nodes of workers in the middle of a step, as soon as they have accumulated a microbatch of it.

    Args:
        kills: The stages whose first worker is to vanish, by step.
        replace: Whether to start another worker each time, as the launcher does.
    """

    def __init__(self, kills: dict[int, list[int]], replace: bool) -> None:
        self.kills, self.replace = kills, replace
        self.killed = 0
        self._threads: list[threading.Thread] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        if index == 1:
            wait(strategy, lambda: ready(strategy) >= strategy.thread_workers)
        for stage in self.kills.get(index, ()):
            victim = strategy._session.roster.at_stage(stage)[0].peer
            thread = threading.Thread(target=self._kill, args=(strategy, victim), daemon=True)
            self._threads.append(thread)
            thread.start()

    def on_train_batch_end(self, *args: Any) -> None:
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _kill(self, strategy: Any, victim: str) -> None:
        ours, local = strategy._session, strategy._local
        step = ours.step
        while not ours.pipeline.ledger.held_by(victim) and ours.step == step:
            threading.Event().wait(0.001)
        local.kill(victim)
        self.killed += 1
        if self.replace:
            local.start(100 + self.killed)


def _same(run: Outcome, undisturbed: Outcome) -> None:
    assert difference(run.weights, undisturbed.weights) == 0.0
    assert difference(run.optimizer, undisturbed.optimizer) == 0.0


@pytest.mark.parametrize("stage", [1, *long_run(0, 2)])
def test_one_of_two_workers_of_a_stage_vanishes(stage: int, undisturbed: Outcome) -> None:
    kill = Kill({3: [stage]}, replace=False)
    run = fit([kill], workers=6)
    _same(run, undisturbed)
    counters = run.trainer.strategy.report()["counters"]
    assert kill.killed == 1 and counters["leaves"] >= 1 and "stages lost" not in counters


def test_workers_of_two_stages_vanish_in_one_step_and_others_come(undisturbed: Outcome) -> None:
    kill = Kill({2: [0, 2], 5: [1]}, replace=True)
    run = fit([kill], workers=6)
    _same(run, undisturbed)
    assert kill.killed == 3


@pytest.mark.parametrize("stage", [0, 2, *long_run(1)])
def test_the_last_worker_of_a_stage_vanishes(stage: int, undisturbed: Outcome) -> None:
    kill = Kill({4: [stage]}, replace=True)
    run = fit([kill], workers=3)
    _same(run, undisturbed)
    counters = run.trainer.strategy.report()["counters"]
    assert kill.killed == 1 and counters["stages lost"] >= 1 and counters["steps repeated"] >= 0


def test_all_workers_of_the_swarm_vanish(undisturbed: Outcome) -> None:
    kill = Kill({5: [0, 1, 2]}, replace=True)
    _same(fit([kill], workers=3), undisturbed)
    assert kill.killed == 3


def test_a_run_that_is_over_keeps_no_module_alive(caplog: pytest.LogCaptureFixture) -> None:
    """Neither that of a worker that vanished, nor the trainer's."""
    # What pytest keeps of the log holds errors, and these the frames that they passed through.
    caplog.set_level(logging.CRITICAL, "lightning_swarm")
    modules: list[weakref.ref[pl.LightningModule]] = []

    def make_known() -> pl.LightningModule:
        module = make()
        modules.append(weakref.ref(module))
        return module

    fit_swarm(make_known, CASE.loader(STEPS), 3, swarm={"workers": 4}, callbacks=[Kill({3: [0]}, replace=True)])
    gc.collect()
    alive = [i for i, module in enumerate(modules) if module() is not None]
    assert (len(modules), alive) == (6, [])


class KillAlways(Meddling):
    """Whoever serves stage 1 vanishes in the third step, and another worker comes."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: set[str] = set()
        self.local: Any = None

    async def before(self, worker: Any, call: str, header: dict[str, Any]) -> None:
        server = worker.service.server if worker.service is not None else None
        if call == "process" and server is not None and (server.index, server.version) == (1, 2):
            peer = worker.node.peer_id
            if peer not in self.killed:
                self.killed.add(peer)
                threading.Thread(target=self._replace, args=(peer, 100 + len(self.killed)), daemon=True).start()
            await asyncio.Event().wait()

    def _replace(self, peer: str, another: int) -> None:
        self.local.kill(peer)
        self.local.start(another)


def test_a_stage_that_is_lost_again_and_again_ends_the_run_with_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MOST_LOSSES", 3)
    faults = KillAlways()

    class Watch(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            faults.local = trainer.strategy._local  # type: ignore[attr-defined]

    with pytest.raises(SwarmError, match="Stage 1 has lost .* That is the 4th time .* since step 2 began"):
        fit([Watch()], workers=3, faults=faults)
    assert len(faults.killed) == 4


class KillAtEnd(pl.Callback):
    """The only worker of a stage vanishes after the last step, before its weights have come home."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        logged(strategy)
        strategy._local.kill(strategy._session.roster.at_stage(self.stage)[0].peer)
        strategy._local.start(100)


@pytest.mark.parametrize(("stage", "log_gradients"), [(0, False), (1, False), (1, True)])
def test_the_last_worker_vanishes_before_its_weights_have_come_home(
    stage: int, log_gradients: bool, undisturbed: Outcome
) -> None:
    run = fit([KillAtEnd(stage)], workers=3, log_gradients=log_gradients)
    _same(run, undisturbed)
    counters = run.trainer.strategy.report()["counters"]  # type: ignore[attr-defined]
    assert counters["leaves"] >= 1 and ("stages lost" in counters) != log_gradients


def test_a_worker_that_vanishes_before_it_serves_a_stage_without_workers_is_followed_by_another(
    undisturbed: Outcome,
) -> None:
    """Its state is on its way to it; no call of a step would find out that it has gone."""
    held = threading.Event()
    asked: list[str] = []
    give = Session.state

    async def state(session: Session, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Any:
        if held.is_set() and not asked:
            asked.append(caller)
            await asyncio.Event().wait()
        return await give(session, caller, header, tensors)

    class Script(pl.Callback):
        """The only worker of stage 1 vanishes; the next one does when it waits for the state; then one comes."""

        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
            strategy: Any = trainer.strategy
            if index == 5:
                held.set()
                strategy._local.kill(strategy._session.roster.at_stage(1)[0].peer)
                threading.Thread(target=self._continue, args=(strategy,), daemon=True).start()
                strategy._local.start(100)

        def _continue(self, strategy: Any) -> None:
            while not asked:
                threading.Event().wait(0.01)
            strategy._local.kill(asked[0])
            while asked[0] in strategy._session.roster.workers:
                threading.Event().wait(0.01)
            strategy._local.start(101)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "state", state)
        run = fit([Script()], workers=3, log_gradients=True)
    _same(run, undisturbed)
    assert asked


def test_a_stage_that_nobody_comes_to_gets_a_worker_of_another_one(
    monkeypatch: pytest.MonkeyPatch, undisturbed: Outcome
) -> None:
    """Its gradients are logged, so it could be waited for; but others can be spared."""
    monkeypatch.setattr(roster, "_NEWCOMER_S", 1.0)
    run = fit([Kill({4: [2]}, replace=False)], workers=5, log_gradients=True)
    _same(run, undisturbed)
    assert run.trainer.strategy.report()["counters"]["stages lost"] == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("moment", ["forward", "reduce"])
def test_a_stages_only_worker_that_becomes_slow_is_waited_for(moment: Moment, undisturbed: Outcome) -> None:
    """Hundreds of times slower than it was, and without any timeout set by hand."""
    faults = Faults([Fault("slow", moment, stage=1, step=3, seconds=5.0)])
    run = fit([], workers=3, faults=faults)
    _same(run, undisturbed)
    report = run.trainer.strategy.report()  # type: ignore[attr-defined]
    assert len(faults.fired) == 1 and report["bans"] == []
    assert "leaves" not in report["counters"] and "stages lost" not in report["counters"]


class Disagree(Meddling):
    """At the end of a step a worker of the middle stage has not accumulated what the ledger says.

    Args:
        instead: What it has instead of one of its microbatches, if anything.
    """

    def __init__(self, instead: set[str]) -> None:
        super().__init__()
        self.instead = instead
        self.peer = ""
        self._first = threading.Lock()

    async def before(self, worker: Any, call: str, header: dict[str, Any]) -> None:
        """When it is told to reduce."""
        chosen = call == "reduce" and header["step"] == 3 and worker.service.server.index == 1 and header["expected"]
        if chosen and self._first.acquire(blocking=False):
            accumulated = worker.service.server.accumulator._accumulated
            accumulated.remove(min(accumulated))
            accumulated.update(self.instead)
            self.peer = worker.node.peer_id


@pytest.mark.parametrize("instead", [set(), {"3:99"}], ids=["forgotten", "renamed"])
def test_a_worker_that_disagrees_with_the_ledger_is_dropped_from_the_step(
    instead: set[str], undisturbed: Outcome
) -> None:
    disagree = Disagree(instead)
    run = fit([AllAtWork()], workers=6, faults=disagree)
    _same(run, undisturbed)
    report = run.trainer.strategy.report()  # type: ignore[attr-defined]
    assert report["by_worker"][disagree.peer]["lost"] >= 1, "others have done what it had"
    assert report["counters"]["leaves"] >= 1 and "stages lost" not in report["counters"]


class Raises(Meddling):
    """A worker of stage 1 raises in a call of step 2 as one without memory, always, and as often as it joins.

    Args:
        call: In which.
        workers: On how many workers.
    """

    def __init__(self, call: str, workers: int = 1) -> None:
        super().__init__()
        self.call, self.workers = call, workers
        self.broken: set[str] = set()

    async def before(self, worker: Any, call: str, header: dict[str, Any]) -> None:
        server = worker.service.server if worker.service is not None else None
        if server is None or server.index != 1 or call != self.call or server.version != 2:
            return
        if len(self.broken) < self.workers:
            self.broken.add(worker.node.peer_id)
        if worker.node.peer_id in self.broken:
            raise MemoryError("no more")


@pytest.mark.parametrize("call", ["process", "reduce", "commit"])
def test_a_worker_on_which_the_step_raises_is_left_alone_where_another_can_do_it(
    call: str, undisturbed: Outcome
) -> None:
    faults = Raises(call)
    run = fit([AllAtWork()], workers=6, faults=faults)
    _same(run, undisturbed)
    bans = run.trainer.strategy.report()["bans"]  # type: ignore[attr-defined]
    assert {(ban["peer"], ban["stage"], ban["cause"]) for ban in bans} == {(*faults.broken, 1, "failed")}


@pytest.mark.parametrize("call", ["process", "commit"])
def test_what_raises_on_two_workers_ends_the_run(call: str) -> None:
    with pytest.raises(MemoryError, match="no more"):
        fit([AllAtWork()], workers=6, faults=Raises(call, workers=2))


class Malformed(Meddling):
    """A worker of stage 1 answers what cannot be read, once, in step 2."""

    def __init__(self, call: str, change: dict[str, Any]) -> None:
        super().__init__()
        self.call, self.change = call, change
        self.liars: set[str] = set()

    async def after(self, worker: Any, call: str, caller: str, header: dict[str, Any], reply: Any) -> Any:
        server = worker.service.server
        if self.liars or call != self.call or server is None or (server.index, server.version) != (1, 2):
            return reply
        self.liars.add(worker.node.peer_id)
        return {**reply[0], **self.change}, reply[1]


@pytest.mark.parametrize(
    ("call", "change"),
    [
        ("process", {"effects": {"__tensor__": 99}}),
        ("process", {"transfers": [1.0]}),
        ("process", {"compute_s": math.nan}),
        ("reduce", {"squared_norms": {}}),
    ],
)
def test_a_reply_that_cannot_be_read_is_its_senders_fault(
    call: str, change: dict[str, Any], undisturbed: Outcome
) -> None:
    faults = Malformed(call, change)
    run = fit([AllAtWork()], workers=6, faults=faults)
    _same(run, undisturbed)
    bans = run.trainer.strategy.report()["bans"]  # type: ignore[attr-defined]
    assert [(ban["peer"], ban["stage"], ban["cause"]) for ban in bans] == [(*faults.liars, 1, "protocol")]


class Pause(nn.Module):
    """Takes its time."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


class SlowDown(pl.Callback):
    """The pause becomes fifty times as long in the middle of training."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        Pause.seconds = 0.1 if index < 4 else 5.0


def test_a_stages_only_worker_that_has_become_fifty_times_slower_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its microbatches takes longer than the deadline that what it did before has given it."""

    def fit(*callbacks: pl.Callback) -> Outcome:
        def make() -> pl.LightningModule:
            return Regressor(nn.Sequential(nn.Linear(12, 8), Pause(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))

        options = {"microbatches": 2, "reproducible": True}
        return fit_swarm(make, CASES["mlp"].loader(5), ["net.1", "net.4"], swarm=options, callbacks=callbacks)

    monkeypatch.setattr(Pause, "seconds", 0.0)
    undisturbed = fit()
    waited, waits_for = [], Roster.waits_for

    def count(*args: Any) -> bool:
        waited.append(args)
        return waits_for(*args)

    monkeypatch.setattr(Roster, "waits_for", count)
    run = fit(SlowDown())
    _same(run, undisturbed)
    report = run.trainer.strategy.report()  # type: ignore[attr-defined]
    assert waited, "the deadline has passed"
    assert report["bans"] == [] and not {"leaves", "stages lost"} & report["counters"].keys()
    assert [stage["processed"] for stage in report["by_stage"]] == [10, 10, 10]
