"""Workers come and go: they are spread, refused with a reason, and hand over when they leave."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_swarm.launcher import WorkerDied
from lightning_swarm.swarm.calls import WorkerRecord
from lightning_swarm.trainer.roster import StartupTimeout
from tests.harness import difference, fit_swarm, times, wait
from tests.models import CASES, GPT

CASE = CASES["gpt"]


@pytest.mark.parametrize("attempt", times(20))
def test_four_workers_at_once_are_one_swarm_spread_over_the_stages(attempt: int) -> None:
    run = fit_swarm(GPT, CASE.loader(1), 4, swarm={"microbatches": 4})
    assert sorted(row["stage"] for row in run.trainer.strategy.report()["workers"]) == [0, 1, 2, 3]


class _At(pl.Callback):
    """Does something at a step."""

    def __init__(self, step: int, do: Callable[[Any], None]) -> None:
        self.step, self.do = step, do

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.do(trainer.strategy)


def test_a_worker_that_drains_hands_over_and_another_takes_its_place() -> None:
    def make() -> pl.LightningModule:
        return GPT(dropout=0.1, optimizer="adamw")

    def leave(strategy: Any) -> None:
        wait(strategy, lambda: sum(w.ready for w in strategy._session.roster.workers.values()) == 4)
        strategy._local.strategies[0].drain()

    def replace(strategy: Any) -> None:
        wait(strategy, lambda: len(strategy._session.roster.workers) == 3)
        strategy._local.start(4)
        wait(strategy, lambda: sum(w.ready for w in strategy._session.roster.workers.values()) == 4)

    options = {"microbatches": 4, "reproducible": True}
    swarm = fit_swarm(
        make, CASE.loader(8), 2, swarm={**options, "workers": 4}, callbacks=[_At(2, leave), _At(5, replace)]
    )
    undisturbed = fit_swarm(make, CASE.loader(8), 2, swarm=options)
    assert difference(swarm.weights, undisturbed.weights) == 0.0
    counters = swarm.trainer.strategy.report()["counters"]
    assert counters["joins"] == 5 and counters["leaves"] == 1 and "bans" not in counters


def test_a_worker_with_another_model_is_refused_with_what_differs() -> None:
    def add(strategy: Any) -> None:
        strategy._local.start(9, make_module=lambda: GPT(width=16))
        wait(strategy, lambda: bool(strategy._local._errors))
        strategy._local.check()

    with pytest.raises(
        WorkerDied, match=r"its parameter 'positions' is \(16, 16\) float32, the trainer's is \(16, 32\)"
    ):
        fit_swarm(GPT, CASE.loader(3), 2, callbacks=[_At(1, add)])


def test_a_worker_with_too_little_memory_is_refused_or_gets_a_stage_that_fits() -> None:
    # The middle stage (one block) is the smallest one by far.
    cuts = ["blocks.1", "blocks.2"]
    seen: list[int] = []

    def add(strategy: Any) -> None:
        needs = [4 * stage.parameter_bytes for stage in strategy._session.plan.stages]
        strategy._local.start(8, memory=min(needs))
        wait(strategy, lambda: len(strategy._session.roster.workers) == 4)
        seen.extend(w.stage for w in strategy._session.roster.workers.values())
        strategy._local.start(9, memory=min(needs) - 1)
        wait(strategy, lambda: bool(strategy._local._errors))
        strategy._local.check()

    with pytest.raises(WorkerDied, match="bytes of memory, and the smallest stage, 1, needs"):
        fit_swarm(GPT, CASE.loader(3), cuts, callbacks=[_At(1, add)])
    assert sorted(seen) == [0, 1, 1, 2]


def test_a_stage_without_workers_is_named_with_the_peers_seen() -> None:

    with pytest.raises(
        StartupTimeout, match=r"No worker serves stage 0, 1 after 2 s \(startup_timeout\). Workers seen: none"
    ):
        fit_swarm(GPT, CASE.loader(1), 2, swarm={"startup_timeout": 2.2, "workers": 0})


def test_impossible_announcements_are_refused_and_counted() -> None:
    with pytest.raises(Exception, match="impossible announcement"):
        WorkerRecord(0, 0, 0, "cpu", float("inf"), 0, (), {})
    seen: dict[str, int] = {}

    def announce(strategy: Any) -> None:
        record = WorkerRecord(0, 7, 0, "cpu", 1.0, 0, (), {})
        strategy._session.announced({"QmStranger": record}, malformed=1)
        seen.update(strategy.report()["counters"])
        assert "QmStranger" not in strategy._session.in_directory

    fit_swarm(GPT, CASE.loader(2), 2, callbacks=[_At(1, announce)])
    assert seen["announcements ignored"] == 2
