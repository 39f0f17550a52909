"""Whose code is running: answers found on Python's stack, for places in messages and for what the tracer must know."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch
import torch.utils.checkpoint
from torchmetrics import Metric

from lightning_swarm.slicing.trace import Checkpoint, Place

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, _PACKAGE, "<")
_LIGHTNING = os.sep + "lightning" + os.sep
_CHECKPOINT = torch.utils.checkpoint.__file__
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place() -> Place | None:
    """The innermost line of the user's code, or of the model library that it uses."""
    for frame in _callers():
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_USERS) and _LIGHTNING not in name:
            return Place(name, frame.f_lineno)
    return None


def checkpoint() -> Checkpoint | None:
    """Whether the submodule that is just being called is called by activation checkpointing."""
    direct = True
    for frame in _callers():
        name = frame.f_code.co_filename
        if name == _CHECKPOINT:
            if frame.f_code.co_name == "forward":
                return Checkpoint.REENTRANT
            return Checkpoint.ITSELF if direct else Checkpoint.INSIDE
        direct = direct and name.startswith(_NOT_THE_USERS)
    return None


def in_a_metric() -> bool:
    """Whether code of a metric is running: it checks its inputs, and hands no numbers on."""
    directory = os.sep + "torchmetrics" + os.sep
    return any(
        directory in frame.f_code.co_filename or isinstance(frame.f_locals.get("self"), Metric) for frame in _callers()
    )


def in_custom_function() -> bool:
    """Whether the forward of a ``torch.autograd.Function`` is running. It runs without gradients, so ask only then."""
    return any(frame.f_code is _APPLY for frame in _callers())
