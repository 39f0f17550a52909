"""Outboxes hold what is awaited and little more; what a dead worker's successor needs besides is made again, and the
weights are those of an undisturbed run, bit for bit.
"""

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_swarm.faults import Moment
from lightning_swarm.testing import Fault, Faults
from tests.harness import AllAtWork, Outcome, difference, fit_swarm
from tests.models import CASES, GPT

STEPS, MICROBATCHES, IN_FLIGHT = 3, 4, 2
LENGTH, WIDTH, BATCH = 16, 16, 8
# What one microbatch puts into an outbox: an activation, and a gradient with the flag that says that it is there.
MICROBATCH_BYTES = 2 * (BATCH // MICROBATCHES) * LENGTH * WIDTH * 4 + 1


def make() -> pl.LightningModule:
    """With everything random, so that a repeated microbatch shows whether its masks were the same."""
    return GPT(layers=3, width=WIDTH, length=LENGTH, dropout=0.1, noise=0.1, tied=True, optimizer="adamw")


class Watch(pl.Callback):
    """Notes the ledger's count of every stage at each step's end, and the losses that were logged."""

    def __init__(self) -> None:
        self.counts: set[tuple[int, ...]] = set()
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        ledger = trainer.strategy._session.pipeline.ledger  # type: ignore[attr-defined]
        self.counts.add(tuple(ledger.count(stage) for stage in range(ledger.stages)))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].item())


class OfThoseWithWork(Faults):
    """At the end of a step it strikes one who has accumulated something: of two workers one may have got nothing."""

    async def around(self, worker: Any, call: str, *args: Any) -> Any:
        """As any fault."""
        *known, handler = args
        if call == "reduce" and not worker.service.server.accumulator.accumulated:
            return await handler(*known)
        return await super().around(worker, call, *args)


def fit(*faults: Fault, workers: int = 4, **swarm: Any) -> tuple[Outcome, dict[str, Any], Watch]:
    """The run in three stages, its report, and what was watched."""
    watch, schedule = Watch(), OfThoseWithWork(faults)
    options = {"workers": workers, "microbatches": MICROBATCHES, "in_flight": IN_FLIGHT, "reproducible": True, **swarm}
    callbacks = [AllAtWork(), watch]
    run = fit_swarm(make, CASES["gpt"].loader(STEPS), 3, swarm={**options, "faults": schedule}, callbacks=callbacks)
    assert schedule.fired == list(faults)
    return run, run.trainer.strategy.report(), watch  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Outcome, Watch]:
    """The same run without faults and without a bound."""
    run, report, watch = fit(workers=3)
    assert "replayed microbatches" not in report["counters"]
    assert max(row["outbox_peak_bytes"] for row in report["workers"]) > IN_FLIGHT * MICROBATCH_BYTES
    return run, watch


def _same(run: Outcome, watch: Watch, undisturbed: tuple[Outcome, Watch]) -> None:
    assert difference(run.weights, undisturbed[0].weights) == 0.0
    assert difference(run.optimizer, undisturbed[0].optimizer) == 0.0
    assert watch.losses == undisturbed[1].losses
    assert watch.counts == {(MICROBATCHES,) * 3}


def test_what_was_evicted_is_made_again_for_the_successor_of_a_dead_worker(
    undisturbed: tuple[Outcome, Watch],
) -> None:
    """At the end of the step its neighbours have nothing any more: gradients and activations are made again, from stage
    to stage, down to the batch.
    """
    run, report, watch = fit(Fault("kill", "reduce", stage=0, step=1), outbox_bytes=0)
    _same(run, watch, undisturbed)
    lost = report["counters"]["lost microbatches"]
    replayed = [of_stage["replayed"] for of_stage in report["by_stage"]]
    # For each of them stages 1 and 2 make their gradients again, which takes stage 0's and stage 1's activation.
    assert lost >= 1 and replayed[1] >= 2 * lost and replayed[2] >= lost
    assert "stages lost" not in report["counters"]
    assert max(row["outbox_peak_bytes"] for row in report["workers"]) <= IN_FLIGHT * MICROBATCH_BYTES


class Limits(pl.Callback):
    """Notes what the outboxes may hold, by stage, and what the stages' states take."""

    def __init__(self) -> None:
        self.limits: dict[int, int | None] = {}
        self.state_bytes: dict[int, int] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        for worker in strategy._local.strategies.values():
            service = worker._peer.service
            self.limits[service.server.index] = service.outbox.limit_bytes
        self.state_bytes = {s.index: 4 * s.parameter_bytes for s in strategy._session.plan.stages}


def test_a_declared_memory_bounds_the_outbox() -> None:
    limits, memory = Limits(), 1_000_000
    swarm = {"worker_options": {"memory": memory}}
    fit_swarm(make, CASES["gpt"].loader(2), 2, swarm=swarm, callbacks=[limits])
    assert limits.limits == {stage: (memory - need) // 4 for stage, need in limits.state_bytes.items()}
    assert len(limits.limits) == 2


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["forward", "forwarded", "accumulated", "reduce", "reduced"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_is_made_again_at_whatever_moment_a_worker_dies(
    stage: int, moment: Moment, undisturbed: tuple[Outcome, Watch]
) -> None:
    run, report, watch = fit(Fault("kill", moment, stage=stage, step=1), workers=6, outbox_bytes=0)
    _same(run, watch, undisturbed)
    assert "stages lost" not in report["counters"]
