"""What a stage is, in plain data: split points, what crosses at them, and what one step function does between them.

Everything here is a frozen dataclass of numbers and names. It is learnt once by a dry run (`plan.py`), travels to every
peer as msgpack through ``to_dict``, and tells a `Stage` all that it needs to know: nothing is guessed at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, order=True)
class SplitPoint:
    """The call of a submodule that begins a stage.

    Args:
        module: The submodule's name, as in ``named_modules()``.
        call: Which of its calls in one step, from 0. A step that runs the model twice is cut by call number.

    Example::

        >>> str(SplitPoint("blocks.3")), str(SplitPoint("encoder", 1))
        ('blocks.3', 'encoder#1')
        >>> SplitPoint.parse("encoder#1")
        SplitPoint(module='encoder', call=1)

    """

    module: str
    call: int = 0

    def __str__(self) -> str:
        return f"{self.module}#{self.call}" if self.call else self.module

    @classmethod
    def parse(cls, text: str) -> SplitPoint:
        """Reads what ``str()`` wrote: ``"blocks.3"`` or ``"blocks.3#1"``."""
        module, _, call = text.partition("#")
        if call and not call.isdecimal():
            raise ValueError(f'"{text}" is no split point: what follows "#" is the number of the call, from 0')
        return cls(module, int(call or 0))


@dataclass(frozen=True)
class LeafSpec:
    """Shape and type of a tensor, without the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> LeafSpec:
        """The spec of a real or a ghost tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.numel() * tensor.element_size())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for msgpack."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "requires_grad": self.requires_grad,
            "bytes": self.bytes,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LeafSpec:
        """The reverse of ``to_dict``."""
        dtype = getattr(torch, data["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {data['dtype']!r}")
        return cls(tuple(data["shape"]), dtype, bool(data["requires_grad"]), int(data["bytes"]))


@dataclass(frozen=True)
class Boundary:
    """What enters a stage at its split point.

    Args:
        positions: Positions, in ``tree_flatten((args, kwargs))`` of the split point's call, of the tensors that cross.
        specs: What they looked like in the dry run, in the same order.
        bytes_per_sample: Their bytes for one sample of the batch.
        twins: ``(position, index into positions)`` where a crossing tensor appears among the arguments once more.
        held: For each of them, whether code around the call uses it after the call.
        leaves: How many leaves the call has altogether; another number means that the step took another path.

    """

    positions: tuple[int, ...]
    specs: tuple[LeafSpec, ...]
    bytes_per_sample: float
    twins: tuple[tuple[int, int], ...]
    held: tuple[bool, ...]
    leaves: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for msgpack."""
        return {
            "positions": list(self.positions),
            "specs": [spec.to_dict() for spec in self.specs],
            "bytes_per_sample": self.bytes_per_sample,
            "twins": [list(twin) for twin in self.twins],
            "held": list(self.held),
            "leaves": self.leaves,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Boundary:
        """The reverse of ``to_dict``."""
        return cls(
            positions=tuple(data["positions"]),
            specs=tuple(LeafSpec.from_dict(spec) for spec in data["specs"]),
            bytes_per_sample=float(data["bytes_per_sample"]),
            twins=tuple((position, index) for position, index in data["twins"]),
            held=tuple(data["held"]),
            leaves=data["leaves"],
        )


@dataclass(frozen=True)
class StepSignature:
    """What one dry run of one step function learnt, for fixed split points. All tuples but ``boundaries`` are per
    stage.

    Args:
        step: The step function's name, ``"training_step"``.
        boundaries: ``boundaries[k]`` enters stage ``k + 1``.
        batch_leaves: Positions in ``tree_flatten(batch)`` of the tensors whose data the stage needs.
        parameters: Canonical names of the parameters that the step uses in the stage's own range.
        buffers: Names of the buffers whose data the stage needs.
        veiled: Those of its parameters that an earlier stage uses too: they are ghosts until the split point.
        written: Names of the buffers that the step changes in the stage's own range.
        speaking: Whether the stage calls ``self.log`` or changes plain attributes in its own range.
        flops: Forward FLOPs of one sample.
        modules: The submodules that run there, as few names as will do.

    """

    step: str
    boundaries: tuple[Boundary, ...]
    batch_leaves: tuple[tuple[int, ...], ...]
    parameters: tuple[frozenset[str], ...]
    buffers: tuple[frozenset[str], ...]
    veiled: tuple[frozenset[str], ...]
    written: tuple[frozenset[str], ...]
    speaking: tuple[bool, ...]
    flops: tuple[float, ...]
    modules: tuple[tuple[str, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for msgpack."""
        return {
            "step": self.step,
            "boundaries": [boundary.to_dict() for boundary in self.boundaries],
            "batch_leaves": [list(leaves) for leaves in self.batch_leaves],
            **{name: [sorted(names) for names in getattr(self, name)] for name in _NAME_SETS},
            "speaking": list(self.speaking),
            "flops": list(self.flops),
            "modules": [list(names) for names in self.modules],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepSignature:
        """The reverse of ``to_dict``."""
        return cls(
            step=data["step"],
            boundaries=tuple(Boundary.from_dict(boundary) for boundary in data["boundaries"]),
            batch_leaves=tuple(tuple(leaves) for leaves in data["batch_leaves"]),
            speaking=tuple(bool(value) for value in data["speaking"]),
            flops=tuple(float(value) for value in data["flops"]),
            modules=tuple(tuple(names) for names in data["modules"]),
            **{name: tuple(frozenset(names) for names in data[name]) for name in _NAME_SETS},
        )


_NAME_SETS = ("parameters", "buffers", "veiled", "written")
