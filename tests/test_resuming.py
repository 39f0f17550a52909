"""A trainer that was killed and started again with ``ckpt_path="swarm"`` ends with the weights of one that was not."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.harness import Outcome, difference, fit_swarm
from tests.models import CASES, GPT

CASE = CASES["gpt"]
BATCHES = 7
EPOCHS = 2
STEPS = 8  # the last step of an epoch is one batch


class Scheduled(GPT):
    """With dropout, so that seeds count, and with schedulers for steps and epochs."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=16, dropout=0.1, noise=0.1, tied=True, optimizer="adamw")

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        of_steps = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        of_epochs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return [optimizer], [
            {"scheduler": of_steps, "interval": "step"},
            {"scheduler": of_epochs, "monitor": "val_loss"},
        ]


class Killed(Exception):
    """The trainer's process would be gone."""


class Counting(pl.Callback):
    """Has a state that changes with every batch and validation."""

    def __init__(self) -> None:
        self.seen = {"batches": 0, "validations": 0, "epochs": 0}

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen["batches"] += 1

    def on_validation_end(self, *args: Any) -> None:
        self.seen["validations"] += 1

    def on_train_epoch_start(self, *args: Any) -> None:
        self.seen["epochs"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = dict(state_dict)


class Die(pl.Callback):
    """The trainer vanishes without a word at a batch, and its local workers with it.

    Args:
        batch: Of the whole run, from 0.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            strategy: Any = trainer.strategy
            for worker in list(getattr(strategy._local, "strategies", {}).values()):
                strategy._local.kill(worker._peer.node.peer_id)
            strategy._peer.node.close()
            raise Killed


def data() -> DataLoader[Any]:
    """Shuffled by torch's generator."""
    return DataLoader(CASE.loader(BATCHES).dataset, batch_size=CASE.batch, shuffle=True)


def fit(*callbacks: pl.Callback, **more: Any) -> tuple[Outcome, Counting]:
    """Two epochs with validation in their middle and at their end, two batches a step."""
    swarm = {"microbatches": 3, "reproducible": True, "snapshot_every_n_steps": 1, **more.pop("swarm", {})}
    counting = Counting()
    outcome = fit_swarm(
        Scheduled, data(), 2, swarm=swarm, callbacks=[counting, *callbacks], ckpt_path="swarm", max_epochs=EPOCHS,
        accumulate_grad_batches=2, val_dataloaders=CASE.loader(1), val_check_interval=4, **more,
    )  # fmt: skip
    return outcome, counting


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Outcome, Counting]:
    return fit()


def assert_same(run: tuple[Outcome, Counting], undisturbed: tuple[Outcome, Counting]) -> None:
    (ours, counting), (theirs, counted) = run, undisturbed
    assert difference(ours.weights, theirs.weights) == 0.0
    assert difference(ours.optimizer, theirs.optimizer) == 0.0
    assert ours.rates == theirs.rates[len(theirs.rates) - len(ours.rates) :]
    assert counting.seen == counted.seen
    assert ours.trainer.global_step == theirs.trainer.global_step == STEPS
    assert ours.trainer.fit_loop.epoch_loop._batches_that_stepped == STEPS


@pytest.mark.parametrize("batch", [3, 6, 7, 11], ids=["in a step", "last", "first of an epoch", "in an epoch"])
def test_from_the_disk(batch: int, tmp_path: Path, undisturbed: tuple[Outcome, Counting]) -> None:
    with pytest.raises(Killed):
        fit(Die(batch), swarm={"snapshot_dir": tmp_path})
    names = {path.name for path in tmp_path.iterdir()}
    assert 1 <= len(names) <= 2 and all(name.endswith(".ckpt") for name in names), names
    assert_same(fit(swarm={"snapshot_dir": tmp_path}), undisturbed)
