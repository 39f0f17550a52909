"""Workers move to where they are needed, and the weights are those of a run without moves, bit for bit."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_swarm import Rebalancing, SwarmMonitor
from lightning_swarm.policies.rebalancing import Move, PaperRebalancer, Rebalancer
from lightning_swarm.policies.utilization import SwarmLoad
from lightning_swarm.swarm.calls import LoadRecord
from lightning_swarm.trainer.roster import Roster
from tests.harness import Outcome, difference, digests, fit_swarm, logged, wait
from tests.models import CASES, GPT, Regressor

CASE = CASES["gpt"]
STEPS = 8
CUTS = ["blocks.2"]


def make() -> pl.LightningModule:
    """With everything random, so that a repeated microbatch shows whether its masks were the same; the embedding and
    the head, at different stages, are tied.
    """
    return GPT(dropout=0.1, noise=0.1, tied=True, optimizer="adamw")


def fit(
    callbacks: list[pl.Callback], workers: int, steps: int = STEPS, log_gradients: bool = False, **more: Any
) -> Outcome:
    """Two stages; gradients in float64, and clipped."""
    swarm = {
        "workers": workers,
        "log_gradients": log_gradients,
        "microbatches": 6,
        "reproducible": True,
        "snapshot_every_n_steps": 100 if log_gradients else 3,
        "startup_timeout": 60,
    }
    return fit_swarm(make, CASE.loader(steps), CUTS, swarm=swarm, callbacks=callbacks, gradient_clip_val=0.1, **more)


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    """The same run with one worker a stage."""
    return fit([], workers=2)


def same(run: Outcome, undisturbed: Outcome) -> bool:
    return (
        difference(run.weights, undisturbed.weights) == 0.0 and difference(run.optimizer, undisturbed.optimizer) == 0.0
    )


def counts(strategy: Any) -> list[int]:
    """Workers that serve each stage."""
    roster = strategy._session.roster
    return [len(roster.at_stage(stage)) for stage in range(roster.stages)]


def counters(run: Outcome) -> Counter[str]:
    return Counter(run.trainer.strategy.report()["counters"])


class Script(pl.Callback):
    """Waits for all workers before step 1, then does something before some of the steps, while nothing is under way."""

    def __init__(self, before: dict[int, Callable[[Any], Any]]) -> None:
        self.before = before
        self.counts: list[list[int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        if index == 1:
            wait(strategy, lambda: sum(counts(strategy)) == strategy.thread_workers)
        if index in self.before:
            self.before[index](strategy)
        if index:
            self.counts.append(counts(strategy))


def order(strategy: Any, source: int, target: int) -> str:
    """Order the first worker of a stage to another one, as a policy would; its peer id."""
    session = strategy._session
    peer = session.roster.at_stage(source)[0].peer
    assert strategy._peer.run(session.moves.order(Move(peer, source, target)))
    return peer


def arrival(strategy: Any) -> None:
    """Wait until those who move hold the state of their new stage, or have arrived there."""
    workers = strategy._session.roster.workers
    wait(strategy, lambda: all(w.prepared if w.moving_to is not None else w.ready for w in workers.values()))


# Moves


def test_a_move_leaves_the_weights_as_they_are(undisturbed: Outcome) -> None:
    seen: list[set[str]] = []

    def compare(strategy: Any) -> None:
        arrival(strategy)
        seen.extend(digests(strategy, stage) for stage in (0, 1))

    script = Script({2: lambda strategy: order(strategy, 0, 1), 4: arrival, 6: compare})
    run = fit([script], workers=4)
    assert same(run, undisturbed)
    assert script.counts[0] == [2, 2] and script.counts[-1] == [1, 3]
    assert [len(of_stage) for of_stage in seen] == [1, 1]
    assert counters(run)["moves"] == 1 and counters(run)["leaves"] == 0


@pytest.mark.parametrize("reproducible", [True, False])
def test_running_buffers_move_along(reproducible: bool) -> None:
    """Batch normalisation's statistics are averaged over a stage's workers, those that are on their way included."""

    def make_normed() -> pl.LightningModule:
        normed = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
        return Regressor(nn.Sequential(*normed, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4)))

    seen: list[set[str]] = []

    def compare(strategy: Any) -> None:
        arrival(strategy)
        seen.extend(digests(strategy, stage) for stage in (0, 1, 2))

    def there_and_back(strategy: Any) -> None:
        arrival(strategy)
        assert strategy._session.counters["moves"] == 1
        order(strategy, 1, 2)

    script = Script({2: lambda s: order(s, 0, 1), 4: arrival, 6: there_and_back, 8: arrival, 10: compare})
    run = fit_swarm(
        make_normed,
        CASES["cnn"].loader(12),
        ["net.3", "net.5"],
        swarm={"workers": 6, "microbatches": 4, "reproducible": reproducible},
        callbacks=[script],
    )
    assert [len(of_stage) for of_stage in seen] == [1, 1, 1]
    assert counters(run)["moves"] == 2 and counters(run)["leaves"] == 0


def test_it_serves_its_old_stage_until_it_switches() -> None:
    served: list[int] = []

    def look(strategy: Any) -> None:
        served.append(len(strategy._session.roster.at_stage(0)))

    moved: list[str] = []
    # By the fourth step both have caught up with what the first, slow microbatches were charged.
    script = Script({4: lambda s: moved.append(order(s, 0, 1)), 5: look})

    class Watch(pl.Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, *args: Any) -> None:
            """Between the microbatches of a step and its end."""
            session = trainer.strategy._session  # type: ignore[attr-defined]
            if moved and session.step == 4:
                served.append(len(session.pipeline.ledger.held_by(moved[0])))

    swarm = {"workers": 4, "microbatches": 32}
    fit_swarm(make, CASE.loader(24, batch=32), CUTS, swarm=swarm, callbacks=[script, Watch()])
    assert len(served) == 2 and all(served)


def test_the_last_worker_of_a_stage_stays() -> None:
    refused: list[bool] = []

    def drain_stage(strategy: Any) -> None:
        session = strategy._session
        first, second = (worker.peer for worker in session.roster.at_stage(0))
        refused.append(not strategy._peer.run(session.moves.order(Move(first, 0, 1))))
        refused.append(not strategy._peer.run(session.moves.order(Move(second, 0, 1))))

    fit([Script({1: drain_stage, 3: arrival})], workers=4, steps=5)
    assert refused == [False, True]


@pytest.mark.parametrize("victim", ["mover", "donor", "last donor", "stayer"])
def test_whoever_dies_in_the_middle_of_a_move_loses_nothing(victim: str, undisturbed: Outcome) -> None:
    """The donor is dead already when the mover asks it; the stayer's death makes the mover its stage's last worker."""

    def disturb(strategy: Any) -> None:
        session, local = strategy._session, strategy._local
        first, *others = (worker.peer for worker in session.roster.at_stage(0))
        donors = [worker.peer for worker in session.roster.at_stage(1)]
        killed = {"mover": [first], "donor": donors[:1], "last donor": donors, "stayer": others}[victim]
        if victim in ("donor", "last donor"):
            for peer in killed:
                local.kill(peer)
        assert order(strategy, 0, 1) == first
        if victim in ("mover", "stayer"):
            for peer in killed:
                local.kill(peer)
        if victim == "last donor":
            local.start(100)

    run = fit([Script({4: disturb})], workers=4)
    assert same(run, undisturbed)
    if victim == "last donor":
        assert counters(run)["stages lost"] == 1
    if victim == "stayer":
        assert counters(run)["moves called off"] == 1 and counters(run)["moves"] == 0
    if victim == "mover":
        assert counters(run)["moves"] == 0 and counters(run)["leaves"] == 1


def test_a_worker_with_too_little_memory_for_the_stage_does_not_move_there() -> None:
    answers: list[bool] = []

    def attempt(strategy: Any) -> None:
        session = strategy._session
        strategy._local.start(9, memory=session._state_bytes(0) + session._state_bytes(1) - 1)
        wait(strategy, lambda: any(w.memory_bytes and w.ready for w in session.roster.workers.values()))
        worker = next(w for w in session.roster.workers.values() if w.memory_bytes)
        assert worker.stage == 0
        answers.append(strategy._peer.run(session.moves.order(Move(worker.peer, 0, 1))))
        strategy._local.start(10, memory=session._state_bytes(0) + session._state_bytes(1))
        wait(strategy, lambda: counts(strategy) == [2, 2])
        answers.append(strategy._peer.run(session.moves.order(Move(roomy(session), 1, 0))))

    def roomy(session: Any) -> str:
        return max(session.roster.workers.values(), key=lambda w: w.memory_bytes).peer

    fit([Script({1: attempt, 3: arrival})], workers=2, steps=5)
    assert answers == [False, True]


# Decisions


def test_a_stage_that_others_have_left_is_rebuilt_from_its_logged_gradients(undisturbed: Outcome) -> None:
    """The one who moved away kept, as one of the old stage, what it was committed with at the new one, too."""

    def lose(strategy: Any) -> None:
        arrival(strategy)
        assert counts(strategy) == [1, 3]
        logged(strategy)
        strategy._local.kill(strategy._session.roster.at_stage(0)[0].peer)
        strategy._local.start(100)

    script = Script({2: lambda strategy: order(strategy, 0, 1), 4: arrival, 6: lose})
    run = fit([script], workers=4, log_gradients=True)
    assert same(run, undisturbed)
    assert counters(run)["stages rebuilt"] == 1 and counters(run)["stages lost"] == 0


class Recording(Rebalancer):
    """Ours, from the moment when all workers are there; threads share one core, so none of them is ever busy."""

    def __init__(self, period_s: float, distort: Callable[[int, SwarmLoad], SwarmLoad] | None = None) -> None:
        super().__init__(period_s, saturated=0.0)
        self._distort = distort or (lambda number, load: load)
        self.readings: list[tuple[SwarmLoad, tuple[Move, ...]]] = []
        self.begun = False

    def begin(self, strategy: Any) -> None:
        self.begun = True

    def decide(self, now: float, load: SwarmLoad) -> tuple[Move, ...]:
        if not self.begun:
            return ()
        load = self._distort(len(self.readings), load)
        moves = super().decide(now, load)
        self.readings.append((load, moves))
        return moves

    @property
    def moves(self) -> list[Move]:
        return [move for _, moves in self.readings for move in moves]


def crowd(monkeypatch: pytest.MonkeyPatch, second_stage: int) -> None:
    """Let so many workers join stage 1 and all others stage 0."""

    def neediest(roster: Roster, possible: Any) -> int:
        return 1 if len(roster.at_stage(1, ready=False)) < second_stage else 0

    monkeypatch.setattr(Roster, "neediest_stage", neediest)


def equal_speeds(number: int, load: SwarmLoad) -> SwarmLoad:
    """As if the machine were otherwise idle: all take one second, so only the numbers of workers count."""
    return replace(load, workers=tuple(replace(w, service_s=1.0) for w in load.workers))


def test_five_and_one_end_as_three_and_three(
    monkeypatch: pytest.MonkeyPatch, undisturbed: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    crowd(monkeypatch, 1)
    caplog.set_level("INFO", logger="lightning_swarm")
    policy = Recording(0.2, equal_speeds)

    def balanced(strategy: Any) -> None:
        wait(strategy, lambda: len(policy.moves) >= 2)
        arrival(strategy)

    script = Script({2: policy.begin, 3: balanced, 5: arrival})
    run = fit([script, Rebalancing(policy=policy)], workers=6)
    assert same(run, undisturbed)
    assert script.counts[0] == [5, 1] and script.counts[-1] == [3, 3]
    assert counters(run)["moves"] == 2
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Rebalancing:")]
    assert len(said) == 2 and "planned microbatches/s [5, 1] -> [3, 3]" in said[0] and "stage 1: 1 workers" in said[0]


@pytest.mark.parametrize("ordered", [False, True])
def test_an_empty_stage_gets_a_worker_at_once(ordered: bool, undisturbed: Outcome) -> None:
    """The trainer's copy is of this step, so it could wait for a new worker; but others can spare one."""
    policy = Recording(0.5, equal_speeds)

    def empty(strategy: Any) -> None:
        wait(strategy, lambda: strategy._session.origin.version == 3)
        if ordered:
            order(strategy, 0, 1)
        for worker in strategy._session.roster.at_stage(1):
            strategy._local.kill(worker.peer)

    run = fit([Script({1: policy.begin, 3: empty}), Rebalancing(policy=policy)], workers=5)
    assert same(run, undisturbed)
    assert counters(run)["stages lost"] == 1 and counters(run)["steps repeated"] == 0


def test_another_worker_takes_the_place_of_one_that_will_leave(
    monkeypatch: pytest.MonkeyPatch, undisturbed: Outcome, tmp_path: Path
) -> None:
    """It serves until the other one is there."""
    crowd(monkeypatch, 2)
    policy = Recording(0.5, equal_speeds)
    leaver: list[Any] = []

    def notify(strategy: Any) -> None:
        policy.begin(strategy)
        (tmp_path / "notice").touch()
        peer = strategy._session.roster.at_stage(1)[0].peer
        leaver.extend(s._peer for s in strategy._local.strategies.values() if s._peer.node.peer_id == peer)
        leaver[0]._notice = tmp_path / "notice"
        wait(strategy, lambda: strategy._session.roster.workers[peer].leaving)

    def replaced(strategy: Any) -> None:
        wait(strategy, lambda: len(policy.moves) == 1)
        arrival(strategy)

    def drain(strategy: Any) -> None:
        arrival(strategy)
        assert counts(strategy) == [2, 3]
        leaver[0].drain()
        wait(strategy, lambda: counts(strategy) == [2, 2])

    run = fit([Script({2: notify, 3: replaced, 5: drain}), Rebalancing(policy=policy)], workers=5)
    assert same(run, undisturbed)
    assert policy.moves[0].before == (3.0, 1.0) and policy.moves[0].after == (2.0, 2.0)
    happened = counters(run)
    assert happened["departures announced"] == happened["moves"] == 1 and happened["lost microbatches"] == 0


def test_noise_and_a_false_reading_move_nobody_in_fifty_periods() -> None:
    generator = random.Random(1)

    def distort(number: int, load: SwarmLoad) -> SwarmLoad:
        workers = tuple(
            replace(w, service_s=generator.gauss(1.0, 0.1)) for w in load.workers if number != 20 or w.stage != 1
        )
        return replace(load, workers=workers)

    policy = Recording(0.04, distort)
    script = Script({1: policy.begin, 3: lambda s: wait(s, lambda: len(policy.readings) >= 4 * 50)})
    run = fit([script, Rebalancing(policy=policy)], workers=4, steps=5)
    assert script.counts == [[2, 2]] * 4
    assert counters(run)["moves"] == 0 and not policy.moves


def test_a_loss_is_healed_within_two_periods(monkeypatch: pytest.MonkeyPatch, undisturbed: Outcome) -> None:
    crowd(monkeypatch, 3)
    policy = Recording(1.0, equal_speeds)
    killed: list[str] = []

    def kill(strategy: Any) -> None:
        killed.append(strategy._session.roster.at_stage(1)[0].peer)
        strategy._local.kill(killed[0])

    script = Script({1: policy.begin, 3: kill, 5: lambda s: wait(s, lambda: len(policy.moves) == 1), 6: arrival})
    run = fit([script, Rebalancing(policy=policy)], workers=7)
    assert same(run, undisturbed)
    assert script.counts[0] == [4, 3] and script.counts[-1] == [3, 3]
    there = [killed[0] in {worker.peer for worker in load.workers} for load, _ in policy.readings]
    decided = [bool(moves) for _, moves in policy.readings]
    assert decided.index(True) - there.index(False) <= 2 * 4, "there are four readings a period"


def test_the_papers_rule_moves_one_worker_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd(monkeypatch, 1)

    class Watched(PaperRebalancer):
        decisions: list[tuple[Move, ...]] = []

        def decide(self, now: float, load: SwarmLoad) -> tuple[Move, ...]:
            moves = super().decide(now, replace(load, workers=tuple(replace(w, busy_share=None) for w in load.workers)))
            self.decisions.append(moves)
            return moves

    script = Script({2: lambda strategy: wait(strategy, lambda: any(Watched.decisions)), 3: arrival})
    run = fit([script, Rebalancing(policy=Watched(0.5))], workers=4, steps=5)
    assert max(map(len, Watched.decisions)) == 1
    assert counters(run)["moves"] >= 1


class Still:
    """A policy that reads and moves nobody."""

    period_s = 1.0

    def decide(self, now: float, load: SwarmLoad) -> tuple[Move, ...]:
        return ()


def test_loads_are_in_the_dht_and_moves_in_the_logger(tmp_path: Path) -> None:
    found: list[LoadRecord] = []

    def read(strategy: Any) -> None:
        def there() -> bool:
            records = strategy._peer.run(strategy._peer.node.directory.read("load", LoadRecord))
            found.extend(records.values())
            return any(stage.microbatches_per_s for record in records.values() for stage in record.stages)

        wait(strategy, there)
        order(strategy, 0, 1)

    logger = CSVLogger(tmp_path)
    callbacks = [Rebalancing(policy=Still()), SwarmMonitor(every_n_steps=1), Script({2: read, 3: arrival})]
    run = fit(callbacks, workers=4, steps=6, logger=logger)
    assert [stage.workers for stage in found[-1].stages] == [2, 2]
    assert all(0.0 <= stage.busy_share <= 1.0 and stage.queue_s >= 0.0 for stage in found[-1].stages)
    assert counters(run)["moves"] == 1
    logger.save()
    assert "swarm/moves" in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]


# The policies by name


@pytest.mark.parametrize(
    ("arguments", "rule", "period_s"),
    [
        ({}, Rebalancer, 60.0),
        ({"policy": "swarm", "period": 5}, Rebalancer, 5.0),
        ({"policy": "paper"}, PaperRebalancer, 60.0),
        ({"policy": "paper", "period": 0.5}, PaperRebalancer, 0.5),
    ],
)
def test_a_rule_is_chosen_by_name_and_gets_the_period(arguments: Any, rule: type, period_s: float) -> None:
    chosen: list[Any] = []
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(rebalance=chosen.append))
    callback = Rebalancing(**arguments)
    for _ in range(2):
        callback.on_train_start(trainer, make())
    assert [(type(policy), policy.period_s) for policy in chosen] == 2 * [(rule, period_s)]
    assert chosen[0] is not chosen[1], "every fit begins with nothing measured"


# Mistakes


@pytest.mark.parametrize("period", [0, -1.0, float("inf"), float("nan"), "60", True])
def test_a_period_that_makes_no_sense_is_refused(period: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"Rebalancing\(period=.*must be a number of seconds above 0"):
        Rebalancing(period=period)


@pytest.mark.parametrize("policy", ["fastest", None, 3, object()])
def test_a_policy_that_makes_no_sense_is_refused(policy: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"Rebalancing\(policy=.*must be 'swarm', 'paper', or an obj"):
        Rebalancing(policy=policy)


def test_another_strategy_is_refused() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[Rebalancing()], enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match="Rebalancing needs Trainer"):
        trainer.fit(make(), CASE.loader(1))
