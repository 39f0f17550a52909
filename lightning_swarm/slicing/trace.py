"""What happened in one dry run, as plain data: which values were made where, and who used them.

A `Trace` is a list of events in the order of the step. `tracer.py` writes it, `liveness.py` reads it; neither needs the
other, so where a model can be cut is decided, and tested, without running anything.
"""

from __future__ import annotations

import enum
import linecache
import os
import re
from dataclasses import dataclass, field

import torch

from lightning_swarm.slicing.points import LeafSpec


@dataclass(frozen=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    def assigned_name(self) -> str | None:
        """The one variable that this line assigns to, if it does."""
        match = _ASSIGNMENT.match(linecache.getline(self.file, self.line))
        return match.group(1) if match else None


_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(?::[^=]+)?[-+*/@&|^]?=(?!=)")


@dataclass(slots=True)
class Value:
    """A tensor that the step saw. Views share their ``storage``.

    ``kind`` is "parameter", "buffer", "leaf" (of the batch), "outside" (found in some object of the user) or "made".
    ``key`` is the name of a parameter or buffer, or the position of a leaf.
    """

    kind: str
    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str | int | None = None
    place: Place | None = None


@dataclass(slots=True)
class Op:
    """An operation. Numbers are indices into ``Trace.values``.

    ``blank``: the result depends on shapes only (``zeros_like``). ``looks``: Python saw data of what it reads, as a
    number, or as the shape of the result; ``contained``: it did so in code that gives no numbers back, that of a
    metric. ``random``: it draws from torch's generator, or, if ``own_generator``, from one that no seed reaches.
    ``custom``: it is part of a ``torch.autograd.Function``.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    flops: float = 0.0
    random: bool = False
    own_generator: bool = False
    blank: bool = False
    looks: bool = False
    contained: bool = False
    custom: bool = False
    place: Place | None = None
    frame: Call | None = None


class Checkpoint(enum.Enum):
    """How a call is made by activation checkpointing, which repeats it in the backward pass."""

    ITSELF = "itself"
    INSIDE = "inside"
    REENTRANT = "reentrant"


@dataclass(slots=True)
class Call:
    """A submodule's call: ``leaves`` are its flattened arguments, tensors as values and others as None."""

    module: str
    call: int
    leaves: tuple[int | None, ...]
    specs: tuple[LeafSpec | None, ...]
    parent: Call | None = None
    closed_at: int | None = None
    leaks_numbers: bool = False
    checkpoint: Checkpoint | None = None


@dataclass(slots=True)
class Kept:
    """Values that leave the step: logged, stored on a module, or returned (``returned``)."""

    reads: tuple[int, ...]
    returned: bool = False


Event = Op | Call | Kept


@dataclass
class Trace:
    """One dry run."""

    values: list[Value] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def calls(self) -> list[tuple[int, Call]]:
        """All submodule calls with their position among the events."""
        return [(index, event) for index, event in enumerate(self.events) if isinstance(event, Call)]
