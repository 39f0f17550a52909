"""Taking tensors out of a call's arguments, and putting others in, by their position among the flattened leaves.

The rest of the arguments must stay the very objects that they are: a cache or a list that a model hands from layer to
layer is changed by them. So only the containers that hold a replaced tensor are built anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_swarm.slicing._compat import tree_flatten, tree_unflatten
from lightning_swarm.slicing.bind import real


def take(args: tuple[Any, ...], kwargs: Mapping[str, Any], positions: Iterable[int]) -> tuple[list[Tensor], int]:
    """The leaves at these positions, and how many there are altogether."""
    leaves = tree_flatten((args, kwargs))[0]
    return [real(leaves[position]) for position in positions if position < len(leaves)], len(leaves)


def splice(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], places: Mapping[int, Tensor]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], int]:
    """The arguments with other leaves at these positions, and how many leaves there are altogether."""
    filler = _Filler(places)
    new_args = tuple(filler.fill(value) for value in args)
    new_kwargs = {name: filler.fill(value) for name, value in kwargs.items()}
    return (new_args, new_kwargs), filler.position


class _Filler:
    def __init__(self, places: Mapping[int, Tensor]) -> None:
        self.places = places
        self.position = 0

    def fill(self, value: Any) -> Any:
        leaves, spec = tree_flatten(value)
        begin, self.position = self.position, self.position + len(leaves)
        if not any(position in self.places for position in range(begin, self.position)):
            return value
        return tree_unflatten([self.places.get(begin + i, leaf) for i, leaf in enumerate(leaves)], spec)
