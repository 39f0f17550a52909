"""Ghosts: tensors with a shape, a type and a device but no storage, in place of parameters that a peer does not hold.

A ghost is torch's ``FakeTensor``. Code that touches one computes shapes only, so the user's own step runs through the
parts of the model that are not here. This file makes ghosts, finds the places of a module's parameters and swaps them;
how calls over ghosts are made cheap is in `memo.py`, what happens when one fails in `rehearsal.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lightning_swarm.slicing._compat import DisableTorchFunction, FakeTensor, FakeTensorMode
from lightning_swarm.slicing.bind import BoundGhost


def is_ghost(value: Any) -> TypeGuard[FakeTensor]:
    """Whether this is a tensor without storage."""
    return isinstance(value, FakeTensor) and not isinstance(value, BoundGhost)


class Ghosts:
    """Makes ghosts. Those of different makers do not mix, so a stage has one maker for all of its life."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(
        self,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        stride: tuple[int, ...] | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """A new ghost, a leaf for autograd."""
        with DisableTorchFunction(), torch.inference_mode(False):
            meta = torch.empty_strided(size, stride or _contiguous(size), dtype=dtype, device="meta")
            ghost = FakeTensor(self.mode, meta, device)
            ghost.requires_grad_(requires_grad)
        return ghost

    def like(self, tensor: Tensor, device: torch.device | None = None, *, requires_grad: bool | None = None) -> Tensor:
        """A ghost of this tensor: same shape, strides and type."""
        grad = tensor.requires_grad if requires_grad is None else requires_grad
        return self.empty(
            tuple(tensor.shape), tensor.dtype, device or tensor.device, stride=tensor.stride(), requires_grad=grad
        )

    def parameter(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """A ghost in place of a parameter."""
        ghost = self.empty(tuple(parameter.shape), parameter.dtype, device)
        return nn.Parameter(ghost, requires_grad=parameter.requires_grad)

    def inner(self, tensor: Tensor) -> Tensor:
        """A ghost like this one that is not a leaf and hangs on no graph, so that in-place operations on it work."""
        if not tensor.requires_grad:
            return self.like(tensor)
        if not _dense(tensor):
            return tensor
        with DisableTorchFunction(), torch.enable_grad():
            return self.like(tensor).clone()


def stand_in(ghost: Tensor, fill: int = 0) -> Tensor:
    """A real tensor in place of a ghost for an operation that must look at data. It takes the memory of one element."""
    with DisableTorchFunction(), torch.no_grad():
        value = fill if ghost.dtype is not torch.bool else 0
        return torch.full((), value, dtype=ghost.dtype, device=ghost.device).expand(tuple(ghost.shape))


@dataclass(frozen=True)
class Slot:
    """One place where a module keeps a parameter or a buffer."""

    module: nn.Module
    name: str
    full_name: str


@dataclass(frozen=True)
class Entry:
    """A parameter or buffer with all the places where it is kept; tied ones have several."""

    name: str
    tensor: Tensor
    slots: tuple[Slot, ...]


def parameter_entries(module: nn.Module) -> dict[str, Entry]:
    """All parameters by canonical name: the first under which ``named_parameters`` finds them."""
    return _entries(module, "_parameters")


def buffer_entries(module: nn.Module) -> dict[str, Entry]:
    """All buffers by canonical name, persistent or not."""
    return _entries(module, "_buffers")


def put(entry: Entry, tensor: Tensor) -> None:
    """Puts a tensor in all the places of a parameter or buffer, past every ``__setattr__``."""
    kind = "_parameters" if isinstance(entry.tensor, nn.Parameter) else "_buffers"
    for slot in entry.slots:
        getattr(slot.module, kind)[slot.name] = tensor


def shield(module: nn.Module) -> None:
    """Makes ``to``, ``half``, ``cuda`` work on modules with ghosts; torch would try to swap their storage."""
    for part in module.modules():
        held = (*part._parameters.values(), *part._buffers.values())
        if any(is_ghost(tensor) for tensor in held) and "_apply" not in part.__dict__:
            part.__dict__["_apply"] = _Apply(part)


class _Apply:
    """``Module._apply`` for a module with ghosts."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        part = self.part
        if recurse:
            for child in part.children():
                child._apply(fn)
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        ghosts = [(table, name, tensor) for table in tables for name, tensor in table.items() if is_ghost(tensor)]
        for table, name, _ in ghosts:
            table[name] = None
        try:
            type(part)._apply(part, fn, recurse=False)
        finally:
            for table, name, ghost in ghosts:
                table[name] = _applied(fn, ghost)
        return part

    def __deepcopy__(self, memo: dict[int, Any]) -> _Apply:
        return _Apply(memo.get(id(self.part), self.part))


def _applied(fn: Callable[[Tensor], Tensor], ghost: Tensor) -> Tensor:
    """What a ghost becomes: another one if its type or device changes, the same one for all places of a tied one."""
    try:
        with torch.no_grad():
            wanted = fn(ghost)
    except Exception:
        return ghost  # what needs storage, such as share_memory_, means nothing here
    if wanted.dtype == ghost.dtype and wanted.device == ghost.device:
        return ghost
    known = ghost.__dict__.get("_applied")
    if known is None or (known.dtype, known.device) != (wanted.dtype, wanted.device):
        known = wanted.detach()
        if isinstance(ghost, nn.Parameter):
            known = nn.Parameter(known, requires_grad=ghost.requires_grad)
        ghost.__dict__["_applied"] = known
    return known


@contextmanager
def ghosted(module: nn.Module, ghosts: Ghosts, device: torch.device) -> Iterator[Mapping[str, nn.Parameter]]:
    """While it lasts all parameters of the module are ghosts; yields them by canonical name."""
    entries = parameter_entries(module)
    replaced = {}
    try:
        for name, entry in entries.items():
            assert isinstance(entry.tensor, nn.Parameter)
            replaced[name] = ghosts.parameter(entry.tensor, device)
            put(entry, replaced[name])
        yield replaced
    finally:
        for entry in entries.values():
            put(entry, entry.tensor)


def _entries(module: nn.Module, kind: str) -> dict[str, Entry]:
    found: dict[int, tuple[str, Tensor, list[Slot]]] = {}
    for path, part in module.named_modules():
        for name, tensor in getattr(part, kind).items():
            if tensor is not None:
                full_name = f"{path}.{name}" if path else name
                found.setdefault(id(tensor), (full_name, tensor, []))[2].append(Slot(part, name, full_name))
    return {name: Entry(name, tensor, tuple(slots)) for name, tensor, slots in found.values()}


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True
