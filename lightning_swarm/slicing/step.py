"""Calling a step function of the user's module as Lightning would, and what stands in for a trainer in a dry run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

_MISSING = object()


def trains(step: str) -> bool:
    """Whether gradients are wanted of this step function."""
    return step == "training_step"


def call_step(module: nn.Module, step: str, batch: Any, step_args: tuple[Any, ...]) -> Any:
    """Calls ``module.training_step(batch, batch_idx)``, with as many of the arguments as the function takes."""
    function = getattr(module, step)
    return function(
        batch, *step_args[: _room(getattr(function, "__func__", function), hasattr(function, "__func__")) - 1]
    )


@functools.lru_cache(maxsize=64)
def _room(function: Callable[..., Any], bound: bool) -> int:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 1 << 30
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in positional for kind in kinds) - bound


class RehearsalTrainer:
    """What ``self.trainer`` is in a dry run: the real trainer with loggers that write nothing, or a bare one."""

    current_epoch = 0
    global_step = 0
    max_epochs = None
    estimated_stepping_batches = 1
    num_training_batches = 1
    is_last_batch = False
    sanity_checking = False
    barebones = False
    training = True
    validating = testing = predicting = False

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        self.logger = DummyLogger()
        self.loggers = [self.logger]

    def __getattribute__(self, name: str) -> Any:
        trainer = object.__getattribute__(self, "_trainer")
        if trainer is None or name in ("logger", "loggers", "_trainer"):
            return object.__getattribute__(self, name)
        return getattr(trainer, name)


@contextmanager
def detached_from_trainer(module: nn.Module, log: Callable[..., Any]) -> Iterator[None]:
    """While it lasts ``self.log`` calls ``log(values)`` and loggers write nothing, with or without a trainer."""
    if not isinstance(module, LightningModule):
        yield
        return
    trainer = RehearsalTrainer(module._trainer)
    shadows = {
        "_trainer": trainer,
        "log": lambda name, value, *args, **kwargs: log(value),
        "log_dict": lambda dictionary, *args, **kwargs: log(dict(dictionary)),
        "print": lambda *args, **kwargs: None,
    }
    before = {name: module.__dict__.get(name, _MISSING) for name in shadows}
    module.__dict__.update(shadows)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value
