"""Several workers a stage train as one process does, and are the same bit for bit."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_swarm.worker.state import fetch_state
from tests.harness import Outcome, assert_same_training, difference, fit_plain, fit_swarm, long_run, ready, wait
from tests.models import CASES, GPT, Regressor


class _Replicas(pl.Callback):
    """Asks every worker for its state after every step, and compares those of one stage."""

    def __init__(self) -> None:
        self.compared = 0
        self.workers: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        # The first batch made the plan; from the second on all workers take part.
        strategy: Any = trainer.strategy
        if index == 1:
            wait(strategy, lambda: ready(strategy) >= strategy.thread_workers)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        digests = strategy._peer.run(_digests(strategy._session))
        self.workers.append(sum(map(len, digests.values())))
        for of_stage in digests.values():
            self.compared += len(of_stage) - 1
            assert len(set(of_stage)) == 1, of_stage


async def _digests(session: Any) -> dict[int, list[str]]:
    from lightning_swarm.swarm.calls import StateRequest

    found: dict[int, list[str]] = {}
    for stage in range(session.roster.stages):
        for worker in session.roster.at_stage(stage):
            request = StateRequest(session._identity.session, session._plan_version, stage)
            state = await fetch_state(session._node, worker.peer, request)
            assert state.version == session.step
            found.setdefault(stage, []).append(state.digest())
    return found


def _fit(make: Any, workers: int, stages: int, replicas: _Replicas | None = None, **more: Any) -> Outcome:
    swarm = {"workers": workers, "microbatches": 8, **more.pop("swarm", {})}
    callbacks = [replicas] if replicas is not None else []
    return fit_swarm(make, CASES["gpt"].loader(8), stages, swarm=swarm, callbacks=callbacks, **more)


@pytest.mark.parametrize(
    ("stages", "workers", "clip"),
    [(2, 4, None), (3, 6, 0.1), (4, 8, None), *long_run((2, 4, 0.1), (3, 6, None), (4, 8, 0.1))],
)
def test_weights_are_those_of_one_process(stages: int, workers: int, clip: float | None) -> None:
    def make() -> pl.LightningModule:
        return GPT(tied=True)

    replicas = _Replicas()
    swarm = _fit(make, workers, stages, replicas, gradient_clip_val=clip)
    assert_same_training(swarm, fit_plain(make, CASES["gpt"].loader(8), gradient_clip_val=clip), 1e-6)
    assert replicas.workers[-1] == workers and replicas.compared > 0


def test_the_number_of_workers_does_not_change_a_bit() -> None:
    def make() -> pl.LightningModule:
        return GPT(tied=True, dropout=0.1, noise=0.1, optimizer="adamw")

    runs = [_fit(make, workers, 2, swarm={"reproducible": True}) for workers in (2, 3, 5)]
    for other in runs[1:]:
        assert difference(runs[0].weights, other.weights) == 0.0
        assert difference(runs[0].optimizer, other.optimizer) == 0.0


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_compressed_gradients_leave_replicas_identical(codec: str) -> None:
    replicas = _Replicas()
    swarm = _fit(GPT, 4, 2, replicas, swarm={"reduce_codec": codec})
    assert replicas.compared > 0
    plain = fit_plain(GPT, CASES["gpt"].loader(8))
    assert 0.0 < difference(swarm.weights, plain.weights) < 0.02


def _normalised() -> pl.LightningModule:
    net = nn.Sequential(
        nn.Linear(12, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )
    return Regressor(net)


def test_batch_norm_buffers_are_averaged_by_samples_and_identical() -> None:
    case = CASES["mlp"]
    replicas = _Replicas()
    swarm = fit_swarm(
        _normalised,
        case.loader(),
        2,
        swarm={"workers": 4, "microbatches": 2},
        callbacks=[replicas],
        val_dataloaders=case.loader(1),
    )
    assert replicas.compared > 0
    assert swarm.weights["net.1.num_batches_tracked"] == 20
    one_worker = fit_swarm(_normalised, case.loader(), 2, swarm={"microbatches": 2, "in_flight": 1})
    plain = fit_plain(_normalised, case.loader(batch=4), accumulate_grad_batches=2)
    assert difference(one_worker.weights, plain.weights) <= 1e-6
    trained = {name: value for name, value in swarm.weights.items() if "running" not in name}
    assert difference(trained, {name: plain.weights[name] for name in trained}) <= 1e-6


class _JoinAt(pl.Callback):
    """Starts one more worker at a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.seen: list[int] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == self.step:
            strategy._local.start(99)
            # Training goes on while it joins; here it waits, so that the test knows the step at which it is there.
            wait(strategy, lambda: len(strategy._session.roster.workers) > strategy.thread_workers)
        if trainer.global_step == self.step + 4:  # It has had four steps for its download; a busy machine gets more.
            wait(strategy, lambda: ready(strategy) > strategy.thread_workers)
        self.seen.append(len(strategy.report()["workers"]))


def test_a_worker_that_joins_late_has_the_same_state() -> None:
    case = CASES["gpt"]

    def make() -> pl.LightningModule:
        return GPT(dropout=0.1, optimizer="adamw")

    replicas, joiner = _Replicas(), _JoinAt(20)
    options = {"microbatches": 4, "reproducible": True}
    late = fit_swarm(make, case.loader(26), 2, swarm=options, callbacks=[joiner, replicas])
    alone = fit_swarm(make, case.loader(26), 2, swarm=options)
    assert joiner.seen[0] == 2 and joiner.seen[-1] == 3
    assert replicas.workers[25] == 3 and replicas.compared >= 1
    assert difference(late.weights, alone.weights) == 0.0


def test_one_microbatch_in_flight_validation_in_the_middle_and_a_short_last_batch() -> None:
    case = CASES["gpt"]
    data = case.loader(3, batch=7)  # 7, 7, 7, 3
    options: dict[str, Any] = {"val_dataloaders": case.loader(2), "val_check_interval": 2}
    swarm = fit_swarm(GPT, data, 2, swarm={"workers": 4, "in_flight": 1}, **options)
    assert_same_training(swarm, fit_plain(GPT, data, **options), 1e-6)
    assert torch.isfinite(swarm.trainer.callback_metrics["val_loss"])
