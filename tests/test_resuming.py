"""A trainer that was killed and started again with ``ckpt_path="swarm"`` ends with the weights of one that was not."""

import asyncio
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_swarm import SwarmStrategy
from lightning_swarm.swarm.errors import NodeClosed
from lightning_swarm.swarm.node import Node
from lightning_swarm.testing import Faults, ThreadSwarmStrategy, _ThreadWorkers
from lightning_swarm.trainer import position
from lightning_swarm.trainer.snapshots import Snapshots
from tests.harness import Outcome, difference, fit_swarm, options
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


def fit(*callbacks: pl.Callback, **more: Any) -> tuple[Outcome, Counting]:
    """Two epochs with validation in their middle and at their end, two batches a step."""
    swarm = {"microbatches": 3, "reproducible": True, "snapshot_every_n_steps": 1, **more.pop("swarm", {})}
    counting = Counting()
    outcome = fit_swarm(
        Scheduled, CASE.loader(BATCHES), 2, swarm=swarm, callbacks=[counting, *callbacks], ckpt_path="swarm",
        max_epochs=EPOCHS, accumulate_grad_batches=2, val_dataloaders=CASE.loader(1), val_check_interval=4, **more,
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


@pytest.mark.parametrize("batch", [3, 7], ids=["in a step", "first of an epoch"])
def test_from_the_disk(batch: int, tmp_path: Path, undisturbed: tuple[Outcome, Counting]) -> None:
    with pytest.raises(Killed):
        fit(Die(batch), swarm={"snapshot_dir": tmp_path})
    names = {path.name for path in tmp_path.iterdir()}
    assert 1 <= len(names) <= 2 and all(name.endswith(".ckpt") for name in names), names
    assert_same(fit(swarm={"snapshot_dir": tmp_path}), undisturbed)


@pytest.mark.parametrize("damage", ["cut off", "one bit"])
def test_a_damaged_snapshot_is_passed_over(
    damage: str, tmp_path: Path, undisturbed: tuple[Outcome, Counting], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Killed):
        fit(Die(9), swarm={"snapshot_dir": tmp_path})
    before, newest = sorted(tmp_path.iterdir(), key=lambda path: int(path.stem.removeprefix("step=")))
    content = bytearray(newest.read_bytes())
    if damage == "cut off":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert Snapshots(tmp_path).newest() == (int(before.stem.removeprefix("step=")), before)
    assert f"Snapshot {newest} is damaged" in caplog.text
    assert_same(fit(swarm={"snapshot_dir": tmp_path}), undisturbed)


def test_a_snapshot_resumes_in_plain_lightning(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(Die(5), swarm={"snapshot_dir": tmp_path})
    step, path = Snapshots(tmp_path).newest() or (0, None)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == step == 2
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(list(Scheduled().parameters()))
    module = Scheduled()
    trainer = pl.Trainer(**options(max_epochs=1, accumulate_grad_batches=2, callbacks=[Counting()]))
    trainer.fit(module, CASE.loader(BATCHES), CASE.loader(1), ckpt_path=str(path))
    assert trainer.global_step == STEPS // EPOCHS


def test_a_full_disk_is_a_warning(
    tmp_path: Path, undisturbed: tuple[Outcome, Counting], caplog: pytest.LogCaptureFixture
) -> None:
    # Nothing larger than this can be written: as if there were no more room.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        assert_same(fit(swarm={"snapshot_dir": tmp_path}), undisturbed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"could not be written to {tmp_path}: File too large. Training goes on" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_trainer_had_half_written_is_removed_by_the_next_write(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    for name in ("step=3.part", "other.part"):
        (tmp_path / name).write_bytes(b"half")
    snapshots.write(4, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.part", "step=4.ckpt"]


def test_the_snapshots_of_an_earlier_run_that_came_further_go_first(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    for step in (4950, 5000, 50, 100):
        snapshots.write(step, {})
        path = tmp_path / f"step={step}.ckpt"
        assert snapshots.newest() == (step, path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=100.ckpt", "step=50.ckpt"]


class Elsewhere:
    """Workers that are not the trainer's: they know a bootstrap peer, and outlive trainers.

    Args:
        workers: How many.
        more: Arguments of :class:`ThreadSwarmStrategy`.
    """

    def __init__(self, workers: int = 2, **more: Any) -> None:
        self.bootstrap = Node(run_id="tide")
        self.strategy = ThreadSwarmStrategy(Scheduled, 2, workers=workers, **more)
        self.workers = _ThreadWorkers(self.strategy, self.bootstrap)
        while len(self.workers.strategies) < workers:
            threading.Event().wait(0.01)  # They draw weights, and what comes next draws from the same generator.

    def strategy_of_trainer(self, **more: Any) -> dict[str, Any]:
        """For :func:`fit`."""
        return {"workers": 0, "run_id": "tide", "initial_peers": self.bootstrap.maddrs, **more}

    def close(self) -> None:
        for strategy in self.workers.strategies.values():
            if strategy._peer is not None:
                self.workers.kill(strategy._peer.node.peer_id)
        self.workers.end()
        self.bootstrap.close()


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Elsewhere]]:
    made: list[Elsewhere] = []

    def make(*args: Any, **more: Any) -> Elsewhere:
        made.append(Elsewhere(*args, **more))
        return made[-1]

    yield make
    for swarm in made:
        swarm.close()


class Report(pl.Callback):
    """What the swarm did before the workers leave."""

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.report = trainer.strategy.report()


@pytest.mark.parametrize("batch", [1, 2, 7, 11], ids=["in step 0", "in step 1", "first of an epoch", "in a step"])
def test_from_the_workers(
    batch: int, elsewhere: Callable[..., Elsewhere], undisturbed: tuple[Outcome, Counting]
) -> None:
    swarm = elsewhere()
    with pytest.raises(Killed):
        fit(Die(batch), swarm=swarm.strategy_of_trainer())
    report = Report()
    assert_same(fit(report, swarm=swarm.strategy_of_trainer()), undisturbed)
    assert [worker["downloads"] for worker in report.report["workers"]] == ([1, 1] if batch > 1 else [2, 2])


def test_states_of_callbacks_that_are_too_large_for_the_workers_go_to_the_disk_alone(
    tmp_path: Path,
    undisturbed: tuple[Outcome, Counting],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    elsewhere: Callable[..., Elsewhere],
) -> None:
    monkeypatch.setattr(position, "_MOST_BYTES", 1000)
    swarm = elsewhere()
    with pytest.raises(Killed):
        fit(Die(5), swarm=swarm.strategy_of_trainer(snapshot_dir=tmp_path))
    assert caplog.text.count("too much to go to the workers with each step") == 1
    assert [s._peer.service.committed.position for s in swarm.workers.strategies.values()] == [b"", b""]
    assert_same(fit(swarm=swarm.strategy_of_trainer(snapshot_dir=tmp_path)), undisturbed)


class Terminate(Die):
    """Lightning has got SIGTERM."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            raise SIGTERMException


def test_a_trainer_that_is_told_to_end_leaves_the_run_to_its_workers(
    elsewhere: Callable[..., Elsewhere], undisturbed: tuple[Outcome, Counting]
) -> None:
    swarm = elsewhere()
    with pytest.raises(SIGTERMException):
        fit(Terminate(7), swarm=swarm.strategy_of_trainer())
    report = Report()
    assert_same(fit(report, swarm=swarm.strategy_of_trainer()), undisturbed)
    assert [worker["downloads"] for worker in report.report["workers"]] == [1, 1]


class DieInCommit(Faults):
    """The trainer vanishes when the first worker has committed a step, and before any other one has heard of it."""

    def __init__(self, step: int) -> None:
        super().__init__([])
        self._step, self._first = step, True
        self._committed = threading.Event()
        self.trainer: Any = None

    async def around(
        self, worker: Any, call: str, caller: str, header: dict[str, Any], tensors: Any, handler: Any
    ) -> Any:
        if call != "commit" or header["step"] != self._step or self._committed.is_set():
            return await handler(caller, header, tensors)
        if self._first:
            self._first = False
            reply = await handler(caller, header, tensors)
            threading.Thread(target=self._kill_trainer).start()
            return reply
        await asyncio.Event().wait()

    def _kill_trainer(self) -> None:
        self.trainer.node.close()
        self._committed.set()

    def watch(self) -> pl.Callback:
        """Learns who the trainer is."""

        class Watch(pl.Callback):
            def on_train_start(_, trainer: pl.Trainer, module: pl.LightningModule) -> None:
                self.trainer = trainer.strategy._peer  # type: ignore[attr-defined]

        return Watch()


def test_killed_in_the_middle_of_a_commit(
    elsewhere: Callable[..., Elsewhere], undisturbed: tuple[Outcome, Counting]
) -> None:
    faults = DieInCommit(step=2)
    swarm = elsewhere(workers=4, faults=faults)
    with pytest.raises(NodeClosed):
        fit(faults.watch(), AllReady(4), swarm=swarm.strategy_of_trainer())
    steps = sorted(strategy._peer.service.server.version for strategy in swarm.workers.strategies.values())
    assert steps == [2, 2, 2, 3]
    report = Report()
    run = fit(report, swarm=swarm.strategy_of_trainer())
    assert_same(run, undisturbed)
    assert (
        len(run[0].rates) == len(undisturbed[0].rates) - 4
    )  # The batches of steps 0 and 1; those of 2 only say it again.
    assert [worker["downloads"] for worker in report.report["workers"]] == [1, 1, 1, 1]


class AllReady(pl.Callback):
    """Waits before the second batch until so many workers are ready."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        while index == 1 and sum(row["ready"] for row in strategy.report()["workers"]) != self.workers:
            threading.Event().wait(0.05)


class Kill(pl.Callback):
    """The only worker of a stage vanishes when a batch begins, and another one comes."""

    def __init__(self, swarm: Elsewhere, batch: int, stage: int, another: bool = True) -> None:
        self.swarm, self.batch, self.stage, self.another = swarm, batch, stage, another

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            strategy: Any = trainer.strategy
            self.swarm.workers.kill(strategy._session.roster.at_stage(self.stage)[0].peer)
            if self.another:
                self.swarm.workers.start(100)


def test_a_stage_is_lost_and_then_the_trainer_is_killed(
    elsewhere: Callable[..., Elsewhere], undisturbed: tuple[Outcome, Counting]
) -> None:
    swarm = elsewhere()
    with pytest.raises(Killed):
        fit(Kill(swarm, 5, stage=1), Die(10), swarm=swarm.strategy_of_trainer())
    assert_same(fit(swarm=swarm.strategy_of_trainer()), undisturbed)


def test_a_stage_and_the_trainer_are_killed_together(
    elsewhere: Callable[..., Elsewhere], undisturbed: tuple[Outcome, Counting], tmp_path: Path
) -> None:
    swarm = elsewhere()
    with pytest.raises(Killed):
        fit(Kill(swarm, 9, stage=1, another=False), Die(9), swarm=swarm.strategy_of_trainer(snapshot_dir=tmp_path))
    swarm.workers.start(100)
    with pytest.raises(MisconfigurationException, match=MISSING):
        fit(swarm=swarm.strategy_of_trainer())
    with pytest.warns(UserWarning, match=r"do not hold all 2 stages .* The snapshot on disk is used\."):
        run = fit(swarm=swarm.strategy_of_trainer(snapshot_dir=tmp_path))
    assert_same(run, undisturbed)


MISSING = r"do not hold all 2 stages of any step\. They hold, by step: step 5: \[0\]\. There is no snapshot on disk"


# What is wrong is said


def test_only_fit_goes_on_from_the_swarm() -> None:
    strategy = ThreadSwarmStrategy(Scheduled, 2, workers=2, calls=("validate",))
    with pytest.raises(MisconfigurationException, match="only trainer.fit goes on from what the swarm holds"):
        pl.Trainer(**options(strategy=strategy)).validate(Scheduled(), CASE.loader(1), ckpt_path="swarm")


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = rf"SwarmStrategy\(snapshot_dir='{tmp_path}/file/here'\): nothing can be written there \(Not a directory\)"
    with pytest.raises(MisconfigurationException, match=message):
        fit(swarm={"snapshot_dir": tmp_path / "file" / "here"})


def test_a_snapshot_of_another_model(tmp_path: Path) -> None:
    Snapshots(tmp_path).write(3, {"state_dict": {"other.weight": torch.zeros(1)}, "pytorch-lightning_version": "2.6.0"})
    with pytest.raises(MisconfigurationException) as caught:
        fit(swarm={"snapshot_dir": tmp_path})
    assert str(caught.value).startswith(
        f"Snapshot {tmp_path}/step=3.ckpt is of another model: this one has no ['other.weight'], and there is no "
        "['blocks.0.mlp.0.bias', 'blocks.0.mlp.0.weight', "
    )


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_timeout_that_is_none(seconds: float) -> None:
    with pytest.raises(MisconfigurationException, match=rf"trainer_timeout={seconds}\) must be a number"):
        SwarmStrategy(trainer_timeout=seconds)
