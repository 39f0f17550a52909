"""Runs a model in one plain process and in a swarm, and compares what comes out."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_swarm.faults import Faults, Reply
from lightning_swarm.swarm.calls import StateRequest
from lightning_swarm.testing import ThreadSwarmStrategy
from lightning_swarm.worker.state import fetch_state


@dataclass
class Outcome:
    """What a run leaves behind."""

    trainer: pl.Trainer
    module: pl.LightningModule
    rates: list[list[float]] = field(default_factory=list)
    """Of every parameter group, after every batch."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Its state dict at the end of training."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The state dict of the module."""
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}


class _Watch(pl.Callback):
    """Notes every learning rate, and the optimizer's state as a checkpoint at the end would have it."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.outcome.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.outcome.optimizer = copy.deepcopy(trainer.strategy.optimizer_state(trainer.optimizers[0]))


def times(number: int, usually: int = 2) -> list[Any]:
    """Parameters of a test that is to be made again and again; all but a few are left to the long run."""
    return [*range(usually), *long_run(*range(usually, number))]


def long_run(*values: Any) -> list[Any]:
    """Parameters of a test that are left to the long run, each a value or a tuple of them."""
    marks = pytest.mark.chaos
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks) for value in values]


class AllAtWork(pl.Callback):
    """Begins with the second batch when all workers are ready, so that every stage has its workers from then on."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        if index == 1:
            wait(strategy, lambda: ready(strategy) >= strategy.thread_workers)


class Meddling(Faults):
    """A test's own doing at the calls to workers."""

    def __init__(self) -> None:
        super().__init__([])

    async def before(self, worker: Any, call: str, header: dict[str, Any]) -> None:
        """A call has arrived."""

    async def after(self, worker: Any, call: str, caller: str, header: dict[str, Any], reply: Reply) -> Reply:
        """It is answered; gives what is sent."""
        return reply

    async def around(
        self, worker: Any, call: str, caller: str, header: dict[str, Any], tensors: Any, handler: Any
    ) -> Reply:
        """As any fault."""
        await self.before(worker, call, header)
        reply = await super().around(worker, call, caller, header, tensors, handler)
        return await self.after(worker, call, caller, header, reply)


def ready(strategy: Any) -> int:
    """How many workers get tasks."""
    return sum(worker.ready for worker in strategy._session.roster.workers.values())


def wait(strategy: Any, condition: Callable[[], bool]) -> None:
    """Until something is so, looking on the trainer's event loop, so that Ctrl-C and the swarm's errors end it."""

    while not condition():
        strategy._peer.run(asyncio.sleep(0.02))


def logged(strategy: Any) -> None:
    """Wait until the gradients of the last step have come to the trainer."""
    strategy._peer.run(strategy._session._gradient_log.settle())


def digests(strategy: Any, stage: int) -> set[str]:
    """Of the states of all workers of a stage: one if they are the same bit for bit."""
    session = strategy._session
    request = StateRequest(session._identity.session, session._plan_version, stage)

    async def ask(peer: str) -> str:
        return (await fetch_state(session._node, peer, request)).digest()

    return {strategy._peer.run(ask(worker.peer)) for worker in session.roster.at_stage(stage)}


def options(**more: Any) -> dict[str, Any]:
    """Arguments that keep a Trainer quiet and quick."""
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        **more,
    }


def fit_plain(make: Callable[[], pl.LightningModule], data: DataLoader[Any], seed: int = 7, **more: Any) -> Outcome:
    """One process, no swarm."""
    pl.seed_everything(seed, verbose=False)
    module = make()
    outcome = Outcome(None, module)  # type: ignore[arg-type]
    callbacks = [_Watch(outcome), *more.pop("callbacks", [])]
    fit_options = {key: more.pop(key) for key in ("val_dataloaders", "ckpt_path") if key in more}
    outcome.trainer = pl.Trainer(**options(callbacks=callbacks, devices=1, **more))
    outcome.trainer.fit(module, data, **fit_options)
    return outcome


def fit_swarm(
    make: Callable[[], pl.LightningModule],
    data: DataLoader[Any],
    stages: int | Sequence[str] = 3,
    seed: int = 7,
    swarm: dict[str, Any] | None = None,
    after: Callable[[pl.Trainer, pl.LightningModule], None] | None = None,
    **more: Any,
) -> Outcome:
    """The same in a swarm of threads; ``after`` is called before the swarm is let go."""
    pl.seed_everything(seed, verbose=False)
    module = make()
    outcome = Outcome(None, module)  # type: ignore[arg-type]
    callbacks = [_Watch(outcome), *more.pop("callbacks", [])]
    fit_options = {key: more.pop(key) for key in ("val_dataloaders", "ckpt_path") if key in more}
    worker_options = {"precision": more["precision"]} if "precision" in more else {}
    strategy = ThreadSwarmStrategy(make, stages, worker_trainer_options=worker_options, **(swarm or {}))
    outcome.trainer = pl.Trainer(**options(strategy=strategy, callbacks=callbacks, **more))
    try:
        outcome.trainer.fit(module, data, **fit_options)
        if after is not None:
            after(outcome.trainer, module)
    finally:
        strategy.shutdown()
    return outcome


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest absolute difference between two nested states of the same keys."""
    assert a.keys() == b.keys(), (sorted(a.keys() ^ b.keys()), "are only in one of them")
    largest = 0.0
    for key, value in a.items():
        other = b[key]
        if isinstance(value, dict):
            largest = max(largest, difference(value, other))
        elif isinstance(value, Tensor):
            assert value.shape == other.shape and value.dtype == other.dtype, key
            if value.numel():
                largest = max(largest, (value.double() - other.double()).abs().max().item())
        elif isinstance(value, (list, tuple)):
            assert len(value) == len(other), key
            largest = max(largest, difference(dict(enumerate(value)), dict(enumerate(other))))
        else:
            assert value == other, key
    return largest


def assert_same_training(swarm: Outcome, plain: Outcome, tolerance: float) -> None:
    """Weights, optimizer state and learning rates agree."""
    assert difference(swarm.weights, plain.weights) <= tolerance
    assert difference(swarm.optimizer, plain.optimizer) <= tolerance
    assert torch.equal(torch.tensor(swarm.rates), torch.tensor(plain.rates))
