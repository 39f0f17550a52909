"""The numbers of a report after faults that are known."""

from typing import Any

import lightning.pytorch as pl

from lightning_swarm import SwarmMonitor, SwarmStrategy
from lightning_swarm.testing import Fault, Faults
from tests.harness import AllAtWork, fit_swarm
from tests.models import CASES, GPT

STEPS, MICROBATCHES = 4, 4


class Before(pl.Callback):
    """Notes what each worker has processed before a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.processed: dict[str, int] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == self.step:
            tally = trainer.strategy._session.tally  # type: ignore[attr-defined]
            self.processed = {peer: counts["processed"] for peer, counts in tally.by_worker().items()}


class OfHolders(Faults):
    """In a reduction only a worker that has accumulated something is hit: a busy machine's other worker may have got
    nothing of a step.
    """

    async def around(
        self, worker: Any, call: str, caller: str, header: dict[str, Any], tensors: Any, handler: Any
    ) -> Any:
        if call == "reduce" and not header["expected"]:
            return await handler(caller, header, tensors)
        return await super().around(worker, call, caller, header, tensors, handler)


def test_one_repeated_task_and_one_worker_that_vanishes_are_in_the_numbers() -> None:
    faults = OfHolders([Fault("duplicate", "accumulated", stage=1, step=1), Fault("kill", "reduce", stage=0, step=2)])
    before = Before(2)
    swarm = {"workers": 3, "microbatches": MICROBATCHES, "faults": faults}
    callbacks = [AllAtWork(), before]
    run = fit_swarm(lambda: GPT(layers=2, width=16), CASES["gpt"].loader(STEPS), 2, swarm=swarm, callbacks=callbacks)
    assert len(faults.fired) == 2
    report = run.trainer.strategy.report()  # type: ignore[attr-defined]
    first, last = report["by_stage"]
    (killed,) = (peer for peer, counts in report["by_worker"].items() if counts["leaves"])
    of_killed = report["by_worker"][killed]
    # It vanished after the step's last microbatch: what it had processed of that step is lost, and processed again.
    lost = of_killed["processed"] - before.processed[killed]
    assert lost >= 1 and of_killed["lost"] == first["lost"] == report["counters"]["lost microbatches"] == lost
    assert (first["processed"], last["processed"]) == (STEPS * MICROBATCHES + lost, STEPS * MICROBATCHES)
    assert (last["duplicate"], first["duplicate"]) == (1, 0)
    assert first["replayed"] == last["replayed"] == first["retried"] == last["retried"] == 0
    assert (first["joins"], first["leaves"], last["joins"], last["leaves"]) == (2, 1, 1, 0)
    assert len(report["recoveries_s"]) == 1 and report["recoveries_s"][0] > 0.0
    # That it cannot be reached bans it for a moment.
    (ban,) = report["bans"]
    assert (ban["peer"], ban["stage"], ban["cause"], ban["seconds"]) == (killed, 0, "reset", 2.0)

    described = SwarmStrategy.report.__doc__ or ""
    for names in (report, *report["workers"]):
        assert [name for name in names if f"``{name}``" not in described] == []

    metrics = SwarmMonitor.metrics(report, {}, workers=True)
    assert metrics["swarm/stage0/lost"] == metrics[f"swarm/worker/{killed[-6:]}/lost"] == lost
    assert metrics["swarm/stage1/duplicate"] == metrics["swarm/bans/reset"] == metrics["swarm/recoveries"] == 1
    assert metrics["swarm/recovery_s"] == report["recoveries_s"][0]
    assert metrics["swarm/lost_microbatches"] == lost


def test_a_task_whose_worker_vanishes_is_retried_and_nothing_of_it_is_lost() -> None:
    """One microbatch at a time, so that exactly one is at the worker, and nothing was accumulated yet."""
    faults = Faults([Fault("kill", "forward", stage=0, step=1, microbatch=0)])
    swarm = {"workers": 3, "microbatches": MICROBATCHES, "in_flight": 1, "faults": faults}
    make, data = (lambda: GPT(layers=2, width=16)), CASES["gpt"].loader(2)
    run = fit_swarm(make, data, 2, swarm=swarm, callbacks=[AllAtWork()])
    first, last = run.trainer.strategy.report()["by_stage"]  # type: ignore[attr-defined]
    assert (first["processed"], last["processed"]) == (2 * MICROBATCHES, 2 * MICROBATCHES)
    assert first["lost"] == last["lost"] == 0 and last["retried"] >= 1
