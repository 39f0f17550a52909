"""Taking tensors out of a call's arguments, and putting others in, by their position among the flattened leaves.

Positions are those of torch's ``tree_flatten((args, kwargs))``. What is not replaced must stay the very object that it
is: a cache or a list that a model hands from layer to layer is changed by them. So only containers that hold a
replaced tensor are built anew. This runs at every split point of every microbatch; pytree alone would be ten times
slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.slicing._compat import FakeTensor, tree_flatten, tree_unflatten
from lightning_swarm.slicing.bind import real

_LEAVES = frozenset({Tensor, FakeTensor, torch.nn.Parameter, type(None), bool, int, float, str})


def flatten(value: Any, into: list[Any]) -> list[Any]:
    """Appends the leaves of a value, in pytree's order."""
    kind = type(value)
    if kind in _LEAVES:
        into.append(value)
    elif kind is tuple or kind is list:
        for item in value:
            flatten(item, into)
    elif kind is dict:
        for item in value.values():
            flatten(item, into)
    else:
        into.extend(tree_flatten(value)[0])
    return into


def take(args: tuple[Any, ...], kwargs: Mapping[str, Any], positions: Iterable[int]) -> tuple[list[Tensor], int]:
    """The leaves at these positions, and how many there are altogether."""
    leaves = flatten((args, kwargs), [])
    return [real(leaves[position]) for position in positions if position < len(leaves)], len(leaves)


def splice(
    args: tuple[Any, ...], kwargs: dict[str, Any], places: Mapping[int, Tensor]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], int]:
    """The arguments with other leaves at these positions, and how many leaves there are altogether."""
    rebuilt = Rebuilt(lambda position, leaf: places.get(position, leaf))
    return (rebuilt.build(args), rebuilt.build(kwargs)), rebuilt.position


class Rebuilt:
    """Puts ``function(position, leaf)`` in place of every leaf; what does not change stays the same object."""

    def __init__(self, function: Callable[[int, Any], Any]) -> None:
        self.function = function
        self.position = 0

    def build(self, value: Any) -> Any:
        """The value with its leaves replaced."""
        kind = type(value)
        if kind in _LEAVES:
            return self.leaf(value)
        if kind is tuple or kind is list:
            items = [self.build(item) for item in value]
            return value if _same(items, value) else kind(items)
        if kind is dict:
            items = [self.build(item) for item in value.values()]
            return value if _same(items, value.values()) else dict(zip(value, items, strict=True))
        leaves, spec = tree_flatten(value)
        new = [self.leaf(leaf) for leaf in leaves]
        return value if _same(new, leaves) else tree_unflatten(new, spec)

    def leaf(self, leaf: Any) -> Any:
        """What stands for a leaf."""
        self.position += 1
        return self.function(self.position - 1, leaf)


def _same(items: list[Any], others: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(items, others, strict=True))
