"""A swarm trains as one process does: weights, optimizer state and learning rates, whatever the model and the cuts."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.harness import assert_same_training, difference, fit_plain, fit_swarm, long_run
from tests.models import CASES, GPT, Regressor

MICROBATCHES = 4


@pytest.mark.parametrize(
    ("cuts", "optimizer"),
    # The optimizer knows nothing of the cuts.
    [("automatic", "adamw"), ("named", "sgd"), *long_run(("automatic", "sgd"), ("named", "adamw"))],
)
@pytest.mark.parametrize("name", CASES)
def test_every_model_with_every_cut(name: str, cuts: str, optimizer: str) -> None:
    case = CASES[name]
    stages: int | Sequence[str] = case.named if cuts == "named" else 4 if name != "lstm" else 3

    def make() -> pl.LightningModule:
        return case.make(optimizer)

    # The same microbatches on both sides: Adam magnifies the rounding of gradients that are zero but for it.
    data = case.loader(batch=case.batch // MICROBATCHES)
    plain = fit_plain(make, data, accumulate_grad_batches=MICROBATCHES)
    swarm = fit_swarm(make, case.loader(), stages, swarm={"microbatches": MICROBATCHES})
    swarm.rates = [rates for rates in swarm.rates for _ in range(MICROBATCHES)]
    assert_same_training(swarm, plain, 1e-6)


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied gpt"])
def test_double_precision(name: str) -> None:
    case = CASES[name]

    def make() -> pl.LightningModule:
        return case.make("adamw")

    data = case.loader(batch=case.batch // MICROBATCHES)
    plain = fit_plain(make, data, precision="64-true", accumulate_grad_batches=MICROBATCHES)
    swarm = fit_swarm(make, case.loader(), 3, swarm={"microbatches": MICROBATCHES}, precision="64-true")
    assert difference(swarm.weights, plain.weights) <= 1e-12
    assert difference(swarm.optimizer, plain.optimizer) <= 1e-12


class _Warm(Regressor):
    """With a warm-up by steps, or a schedule by what validation says."""

    def __init__(self, schedule: str) -> None:
        super().__init__(CASES["mlp"].make("sgd").net)  # type: ignore[arg-type]
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.schedule == "warm-up":
            scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@pytest.mark.parametrize("schedule", ["warm-up", "plateau"])
def test_schedules_live_on_the_trainer(schedule: str) -> None:
    case = CASES["mlp"]
    runs = [
        fit(lambda: _Warm(schedule), case.loader(4), max_epochs=4, val_dataloaders=case.loader(2), **more)
        for fit, more in ((fit_swarm, {}), (fit_plain, {}))
    ]
    assert_same_training(*runs, 1e-6)
    assert len({tuple(rates) for rates in runs[0].rates}) > 2
    assert float(runs[0].trainer.callback_metrics["val_loss"]) == pytest.approx(
        float(runs[1].trainer.callback_metrics["val_loss"]), abs=1e-6
    )


@pytest.mark.parametrize(
    "more",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ],
    ids=["accumulate", "clip norm", "clip value", "both"],
)
@pytest.mark.parametrize("name", ["mlp", "tied gpt"])
def test_accumulation_and_clipping(name: str, more: dict[str, Any]) -> None:
    case = CASES[name]

    def make() -> pl.LightningModule:
        return case.make("sgd")

    # An odd number of batches: the last step accumulates one batch only, and still divides by two.
    plain = fit_plain(make, case.loader(5), **more)
    swarm = fit_swarm(make, case.loader(5), 3, swarm={"microbatches": MICROBATCHES}, **more)
    assert_same_training(swarm, plain, 1e-6)
    assert difference(swarm.weights, fit_plain(make, case.loader(5)).weights) > 1e-4, "the option had no effect"


def test_one_layer_in_two_stages() -> None:
    def make() -> pl.LightningModule:
        return Regressor(torch.nn.Linear(12, 4))

    case = CASES["mlp"]
    assert_same_training(fit_swarm(make, case.loader(4), 2), fit_plain(make, case.loader(4)), 1e-6)


def test_a_last_batch_of_another_size() -> None:
    case = CASES["gpt"]

    def make() -> pl.LightningModule:
        return case.make("sgd")

    data = case.loader(3, batch=7)  # 24 samples: 7, 7, 7 and 3
    assert_same_training(fit_swarm(make, data, 3), fit_plain(make, data), 1e-6)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_reproducible_runs_are_the_same_bit_for_bit(in_flight: int) -> None:
    case = CASES["gpt"]

    def make() -> pl.LightningModule:
        return GPT(dropout=0.1, noise=0.1, optimizer="adamw")

    runs = [
        fit_swarm(make, case.loader(4), 4, swarm={"reproducible": True, "in_flight": limit, "microbatches": 8})
        for limit in (8, in_flight)
    ]
    assert difference(runs[0].weights, runs[1].weights) == 0.0
    assert difference(runs[0].optimizer, runs[1].optimizer) == 0.0


def test_runs_of_one_seed_agree_without_that_option_too() -> None:
    case = CASES["gpt"]

    def make() -> pl.LightningModule:
        return GPT(dropout=0.1, noise=0.1)

    first = fit_swarm(make, case.loader(4), 4, swarm={"in_flight": 8})
    second = fit_swarm(make, case.loader(4), 4, swarm={"in_flight": 2})
    other_seed = fit_swarm(make, case.loader(4), 4, seed=8)
    assert difference(first.weights, second.weights) <= 1e-6
    assert difference(first.weights, other_seed.weights) > 1e-3
