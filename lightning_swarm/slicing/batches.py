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

from lightning_swarm.slicing.splice import Rebuilt


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
    return _Opened(function).build(batch)


class _Opened(Rebuilt):
    def leaf(self, leaf: Any) -> Any:
        """Opens what pytree takes for a leaf."""
        if isinstance(leaf, Mapping):
            names, get = list(leaf), leaf.__getitem__
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, GhostLeaf)):
            names, get = [field.name for field in dataclasses.fields(leaf)], lambda name: getattr(leaf, name)
        else:
            return super().leaf(leaf)
        new = {name: self.build(get(name)) for name in names}
        if all(new[name] is get(name) for name in names):
            return leaf
        opened = copy.copy(leaf)
        for name, value in new.items():
            if isinstance(leaf, Mapping):
                opened[name] = value
            else:
                object.__setattr__(opened, name, value)
        return opened
