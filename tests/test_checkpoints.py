"""A checkpoint is a plain Lightning checkpoint, whoever wrote it; a resumed run goes on as if it had never stopped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_swarm.testing import ThreadSwarmStrategy
from tests.harness import Outcome, difference, fit_plain, fit_swarm, options
from tests.models import CASES, GPT, Regressor

CASE = CASES["mlp"]
BATCHES = 5
EPOCHS = 3


class Warm(Regressor):
    """AdamW in two groups, so that its order is not the module's, and a warm-up that outlasts the checkpoint."""

    def __init__(self, width: int = 16) -> None:
        layers: list[nn.Module] = [nn.Linear(12, width), nn.Tanh()]
        for _ in range(3):
            layers += [nn.Linear(width, width), nn.Tanh()]
        super().__init__(nn.Sequential(*layers, nn.Linear(width, 4)), "adamw")
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 11))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Resumable(DataLoader[Any]):
    """Knows how far it is, which Lightning asks for to resume in the middle of an epoch."""

    def __init__(self) -> None:
        super().__init__(CASE.loader(BATCHES).dataset, batch_size=CASE.batch)
        self.position = self.skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip, self.skip = self.skip, 0
        self.position = skip
        for index, batch in enumerate(super().__iter__()):
            if index >= skip:
                self.position = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["position"]


def fit(stages: int | None, make: Any = Warm, **more: Any) -> Outcome:
    """In a swarm of so many stages, or in one plain process."""
    more = {"max_epochs": EPOCHS, "val_dataloaders": CASE.loader(1), **more}
    if stages is None:
        return fit_plain(make, Resumable(), **more)
    return fit_swarm(make, Resumable(), stages, swarm={"microbatches": 4, **more.pop("swarm", {})}, **more)


def write(folder: Path, stages: int | None, step: int, **more: Any) -> Path:
    """Train for a little longer than to the checkpoint of this step, and give that checkpoint."""
    when: dict[str, Any] = {"every_n_train_steps": step} if step % BATCHES else {"save_on_train_epoch_end": True}
    saving = ModelCheckpoint(folder, save_top_k=-1, **when)
    fit(stages, max_epochs=EPOCHS, max_steps=step + 2, callbacks=[saving], enable_checkpointing=True, **more)
    (path,) = folder.glob(f"*step={step}.ckpt")
    return path


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted() -> Outcome:
    return fit(None)


@pytest.mark.parametrize("step", [BATCHES, BATCHES + 2], ids=["between epochs", "within an epoch"])
@pytest.mark.parametrize(
    ("writer", "reader"),
    [(None, None), (3, None), (None, 3), (4, 3)],
    ids=["plain to plain", "swarm to plain", "plain to swarm", "4 stages to 3"],
)
def test_the_rest_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    writer: int | None, reader: int | None, step: int, tmp_path: Path, uninterrupted: Outcome
) -> None:
    resumed = fit(reader, ckpt_path=str(write(tmp_path, writer, step)))
    assert difference(resumed.weights, uninterrupted.weights) <= 1e-6
    assert difference(resumed.optimizer, uninterrupted.optimizer) <= 1e-6
    assert resumed.rates == uninterrupted.rates[step:]
    for of_both in ("global_step", "current_epoch"):
        assert getattr(resumed.trainer, of_both) == getattr(uninterrupted.trainer, of_both)
    for name, value in uninterrupted.trainer.callback_metrics.items():
        if name != "train_loss_epoch":  # Lightning forgets the part of an epoch that it did not see.
            assert float(resumed.trainer.callback_metrics[name]) == pytest.approx(float(value), abs=1e-6), name


@pytest.mark.parametrize("step", [BATCHES, BATCHES + 2], ids=["between epochs", "within an epoch"])
def test_random_numbers_go_on_after_a_checkpoint(step: int, tmp_path: Path) -> None:
    def make() -> pl.LightningModule:
        net = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.2), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 4))
        return Regressor(net, "adamw")

    exact = {"swarm": {"reproducible": True}}
    whole = fit(3, make, **exact)
    resumed = fit(3, make, ckpt_path=str(write(tmp_path, 3, step, make=make, **exact)), **exact)
    assert difference(resumed.weights, whole.weights) == 0.0
    assert difference(resumed.optimizer, whole.optimizer) == 0.0


@pytest.mark.parametrize("step", [BATCHES, BATCHES + 2], ids=["between epochs", "within an epoch"])
def test_a_checkpoint_is_the_one_that_one_process_writes(step: int, tmp_path: Path) -> None:
    plain, swarm = (load(write(tmp_path / str(stages), stages, step)) for stages in (None, 4))
    for checkpoint in (plain, swarm):
        for state in checkpoint["callbacks"].values():
            for name in [name for name in state if "path" in name or name in ("dirpath", "best_k_models")]:
                del state[name]
    # Everything: weights, optimizer states in the order of the user's groups, schedulers, loops, hyperparameters.
    assert difference(swarm, plain) <= 1e-6
    weights = [p.shape for p in Warm().parameters() if p.dim() > 1]
    states = swarm["optimizer_states"][0]["state"]
    assert [states[index]["exp_avg"].shape for index in range(len(weights))] == weights


def test_a_checkpoint_loads_without_the_swarm_and_holds_the_trained_weights(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True)
    trained = fit(3, callbacks=[saving], enable_checkpointing=True)
    start = Warm().state_dict()
    loaded = Warm.load_from_checkpoint(tmp_path / "last.ckpt")
    assert difference(dict(loaded.state_dict()), trained.weights) == 0.0
    assert difference(dict(start), trained.weights) > 1e-2
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in trained.module.parameters())


def test_shared_parameters_survive_a_checkpoint(tmp_path: Path) -> None:
    data = CASES["tied gpt"].loader(3)

    def make() -> pl.LightningModule:
        return GPT(tied=True, optimizer="adamw")

    saving = ModelCheckpoint(tmp_path, save_last=True)
    fit_swarm(make, data, 3, swarm={"microbatches": 4}, callbacks=[saving], enable_checkpointing=True)
    path = str(tmp_path / "last.ckpt")
    whole = fit_plain(make, data, max_epochs=2)
    for resumed in (
        fit_plain(make, data, max_epochs=2, ckpt_path=path),
        fit_swarm(make, data, 4, swarm={"microbatches": 4}, max_epochs=2, ckpt_path=path),
    ):
        assert difference(resumed.weights, whole.weights) <= 1e-6
        assert difference(resumed.optimizer, whole.optimizer) <= 1e-6


CALLS = ("validate", "test", "predict", "fit", "validate", "test", "predict")


def results_of_all_calls(trainer: pl.Trainer, module: pl.LightningModule) -> list[Any]:
    results = []
    for call in CALLS:
        before = {name: value.clone() for name, value in module.state_dict().items()}
        data = CASE.loader(2) if call != "fit" else CASE.loader(BATCHES)
        results.append(getattr(trainer, call)(module, data))
        changed = difference(before, dict(module.state_dict())) > 0
        assert changed == (call == "fit"), call
        assert module.training
    return results


def test_evaluation_before_and_after_training_says_what_one_process_says() -> None:
    outcomes = []
    for strategy in ("auto", ThreadSwarmStrategy(Warm, 3, calls=CALLS, microbatches=4)):
        pl.seed_everything(7, verbose=False)
        try:
            trainer = pl.Trainer(**options(strategy=strategy, devices=1))
            outcomes.append(results_of_all_calls(trainer, Warm()))
        finally:
            if isinstance(strategy, ThreadSwarmStrategy):
                strategy.shutdown()
    plain, swarm = outcomes
    assert swarm[0] != swarm[4]
    for call, ours, theirs in zip(CALLS, swarm, plain):
        if call == "predict":
            assert [row.shape for row in ours] == [row.shape for row in theirs]
            assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(ours, theirs))
        elif call != "fit":
            assert [row.keys() for row in ours] == [row.keys() for row in theirs]
            assert ours[0]["val_loss"] == pytest.approx(theirs[0]["val_loss"], abs=1e-6)


def test_the_best_checkpoint_is_found_and_evaluated(tmp_path: Path) -> None:
    # The "best" is that of the largest loss, so that it is not the last one.
    losses = []
    for name, strategy in (("plain", "auto"), ("swarm", ThreadSwarmStrategy(Warm, 3, calls=("fit", "validate")))):
        pl.seed_everything(7, verbose=False)
        saving = ModelCheckpoint(tmp_path / name, monitor="val_loss", mode="max")
        try:
            trainer = pl.Trainer(
                **options(strategy=strategy, devices=1, max_epochs=3, callbacks=[saving], enable_checkpointing=True)
            )
            module = Warm()
            trainer.fit(module, CASE.loader(BATCHES), CASE.loader(1))
            last = float(trainer.callback_metrics["val_loss"])
            (best,) = trainer.validate(dataloaders=CASE.loader(1), ckpt_path="best")
        finally:
            if isinstance(strategy, ThreadSwarmStrategy):
                strategy.shutdown()
        losses.append((last, best["val_loss"]))
        assert best["val_loss"] > last
        assert difference(dict(module.state_dict()), load(Path(saving.best_model_path))["state_dict"]) == 0.0
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
