"""The leaves of a batch, also of one whose containers torch's pytree does not know.

Positions are those of ``tree_flatten(batch)`` where that sees all tensors. Other mappings (a tokenizer's
``BatchEncoding``) and dataclasses, which it takes for leaves, are opened in place.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_swarm.slicing._compat import tree_flatten, tree_unflatten


@dataclasses.dataclass(frozen=True)
class GhostLeaf:
    """A tensor of the batch that a stage does not need: only its shape and type travel."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def leaves_of(batch: Any) -> list[Any]:
    """All leaves, tensors and others, in order."""
    found: list[Any] = []

    def see(position: int, leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    replace_leaves(batch, see)
    return found


def replace_leaves(batch: Any, function: Callable[[int, Any], Any]) -> Any:
    """The batch with ``function(position, leaf)`` for every leaf; a container without changes stays the same object."""
    return _Walk(function).rebuild(batch)


class _Walk:
    def __init__(self, function: Callable[[int, Any], Any]) -> None:
        self.function = function
        self.position = 0

    def rebuild(self, value: Any) -> Any:
        leaves, spec = tree_flatten(value)
        new = [self._leaf(leaf) for leaf in leaves]
        return value if all(a is b for a, b in zip(leaves, new, strict=True)) else tree_unflatten(new, spec)

    def _leaf(self, leaf: Any) -> Any:
        names: list[Any] = []
        if isinstance(leaf, Mapping):
            names, get = list(leaf), leaf.__getitem__
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, GhostLeaf)):
            names, get = [field.name for field in dataclasses.fields(leaf)], lambda name: getattr(leaf, name)
        if not names:
            self.position += 1
            return self.function(self.position - 1, leaf)
        new = {name: self.rebuild(get(name)) for name in names}
        if all(new[name] is get(name) for name in names):
            return leaf
        opened = copy.copy(leaf)
        for name, value in new.items():
            if isinstance(leaf, Mapping):
                opened[name] = value
            else:
                object.__setattr__(opened, name, value)
        return opened
