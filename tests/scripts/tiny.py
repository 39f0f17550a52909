"""A script as a user writes it, small; its argument says what it does. Workers run it again."""

import json
import os
import sys

if __name__ == "__main__":
    import tests.scripts.light  # noqa: F401

if sys.argv[1:] == ["broken worker"] and os.environ.get("LIGHTNING_SWARM_ROLE") == "worker":
    raise RuntimeError("this worker is broken")

if sys.argv[3:] == ["for good"] and os.environ.get("LIGHTNING_SWARM_LOCAL_INDEX") == "0":
    try:
        open("started once", "x").close()
    except FileExistsError:
        raise RuntimeError("this worker is broken") from None

import signal
import threading
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_swarm import SwarmStrategy
from lightning_swarm.swarm import watched


class Tiny(pl.LightningModule):
    """Two layers."""

    def __init__(self, hang_in_step: int | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.hang_in_step = hang_in_step

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.second(self.first(batch[0]).tanh()) - batch[1]).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.global_step == self.hang_in_step:
            print("in the middle of a step", flush=True)
            threading.Event().wait()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 1:
            print("a worker speaks", flush=True)
        self.log("loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.second(self.first(batch[0]).tanh())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Watch(pl.Callback):
    """Tells of exceptions."""

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        print("exception", type(exception).__name__, flush=True)


def data(epochs: int = 1) -> DataLoader[Any]:
    """Four batches, or as many times four."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator)
    x, y = x.repeat(epochs, 1), y.repeat(epochs, 1)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def make_trainer(strategy: Any, **more: Any) -> pl.Trainer:
    """Quiet and quick."""
    options: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    options.update(enable_progress_bar=False, enable_model_summary=False, **more)
    return pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, **options)


def start_and_stop() -> None:
    """A swarm of as many stages as each line of the input says; a worker knows of one only."""
    once = os.environ.get("LIGHTNING_SWARM_ROLE") == "worker"
    for stages in ["2"] if once else sys.stdin:
        strategy = SwarmStrategy(stages=int(stages))
        make_trainer(strategy, limit_train_batches=1).fit(Tiny(), data())
        strategy.shutdown()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
        threads = [thread.name for thread in threading.enumerate()]
        print("the swarm has stopped", len(os.listdir("/proc/self/fd")), threads, flush=True)


def all_calls(strategy: Any = "swarm") -> list[Any]:
    """Fit, validate, test and predict; every process tells what it gets."""
    pl.seed_everything(7, verbose=False)
    saving = ModelCheckpoint("checkpoints", monitor="loss", mode="max")
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[saving, Watch()], enable_checkpointing=True)
    module = Tiny()
    trainer.fit(module, data(), data())
    results: list[Any] = []
    for call in (trainer.validate, trainer.test):
        results.append(call(module, data())[0]["loss"])
        print("result", json.dumps(results[-1]), flush=True)
    results.append(trainer.test(module, data(), ckpt_path="best")[0]["loss"])
    print("result", json.dumps(results[-1]), flush=True)
    predictions: Any = trainer.predict(module, data())
    results.append([row.tolist() for row in predictions])
    print("predictions", json.dumps(results[-1]), flush=True)
    if isinstance(trainer.strategy, SwarmStrategy) and trainer.strategy._local is not None:
        workers = [worker.process for worker in trainer.strategy._local._workers]
        trainer.strategy.shutdown()
        print("exit codes", [worker.returncode for worker in workers], flush=True)
    return results


class AllReady(pl.Callback):
    """Waits before the second step until that many workers are ready. Tells the loss of every step."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        if index == 1 and trainer.is_global_zero:
            while sum(row["ready"] for row in strategy.report()["workers"]) != self.workers:
                threading.Event().wait(0.1)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            print("loss", float(outputs["loss"]), flush=True)


class Stuck(Tiny):
    """Local worker 0 hangs in its compute thread when the sixth step begins, once."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 5 and os.environ.get("LIGHTNING_SWARM_LOCAL_INDEX") == "0":
            try:
                open("hung once", "x").close()
            except FileExistsError:
                pass
            else:
                threading.Event().wait()
        return super().training_step(batch, batch_idx)


class AllBack(AllReady):
    """Waits once more, before the ninth step."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        super().on_train_batch_start(trainer, module, batch, 1 if index == 8 else index)


class Kill(pl.Callback):
    """Sends local worker 0 a signal when the sixth step begins, and tells how often one was restarted."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        if index == 5 and trainer.is_global_zero:
            strategy._local._workers[0].process.send_signal(self.number)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if trainer.is_global_zero:
            print("restarts", strategy._local.restarts, flush=True)


def train(strategy: Any, *callbacks: pl.Callback, make: Any = Tiny) -> list[float]:
    """Fit twelve batches, and tell the weights that came out."""
    pl.seed_everything(7, verbose=False)
    module = make()
    trainer = make_trainer(strategy, callbacks=[Watch(), *callbacks])
    trainer.fit(module, data(3))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    if trainer.is_global_zero:
        print("weights", json.dumps(weights), flush=True)
    return weights


class Patient(pl.Callback):
    """Waits for the snapshot of each step, and tells the step."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        while strategy._session._snapshot is not None and not strategy._session._snapshot.done():
            threading.Event().wait(0.01)
        print("step", trainer.global_step, flush=True)


def shuffled() -> DataLoader[Any]:
    """Four batches, in another order in every epoch."""
    return DataLoader(data().dataset, batch_size=8, shuffle=True)


def go_on(folder: str) -> None:
    """Fit three epochs, after an earlier run if there was one, and tell the weights."""
    pl.seed_everything(7, verbose=False)
    module = Tiny()
    # One stage: what takes time is to start processes, twice.
    strategy = SwarmStrategy(stages=1, microbatches=4, snapshot_every_n_steps=1, snapshot_dir=folder)
    trainer = make_trainer(strategy, max_epochs=3, callbacks=[Patient()])
    trainer.fit(module, shuffled(), ckpt_path="swarm")
    print("weights", json.dumps(torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()), flush=True)


def main() -> None:
    """What the arguments say."""
    what, *more = sys.argv[1:]
    if what == "start and stop":
        start_and_stop()
    elif what == "all calls":
        all_calls()
    elif what == "hang":
        make_trainer(SwarmStrategy(stages=2), callbacks=[Watch()]).fit(Tiny(hang_in_step=2), data())
    elif what == "broken worker":
        make_trainer(SwarmStrategy(stages=2), callbacks=[Watch()]).fit(Tiny(), data())
    elif what == "elsewhere":
        make_trainer(SwarmStrategy(stages=2, workers=0), callbacks=[Watch()]).fit(Tiny(), data())
        print("trained", flush=True)
    elif what == "go on":
        go_on(more[0])
    elif what == "train":
        workers, reproducible = int(more[0]), more[1:] == ["reproducible"]
        train(SwarmStrategy(stages=2, workers=workers, microbatches=8, reproducible=reproducible), AllReady(workers))
    elif what == "stuck worker":
        watched._STUCK_AFTER_S = 5.0
        train(SwarmStrategy(stages=1, workers=2, microbatches=8), AllBack(2), make=Stuck)
    elif what == "killed worker":
        # The trainer's port and key, which its worker finds in the script, too. One stage: what takes time is to start.
        own: dict[str, Any] = {"host_maddrs": [f"/ip4/127.0.0.1/tcp/{more[0]}"], "identity_path": "trainer.key"}
        number = signal.SIGTERM if more[1:] == ["SIGTERM"] else signal.SIGKILL
        train(SwarmStrategy(stages=1, microbatches=4, **own), AllReady(1), Kill(number))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
