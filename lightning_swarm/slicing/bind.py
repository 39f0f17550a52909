"""Ghosts that become real: the enclosing code's own references to what crosses a split point.

Replacing the arguments of the split point's call is not enough. Code around it may hold the same tensor in a variable
and use it after the call: a residual connection, encoder states that go to every decoder layer. So the ghost object
itself is bound to the tensor received, by giving it a class whose operations work on that tensor instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.slicing._compat import FakeTensor, tree_flatten, tree_map
from lightning_swarm.slicing.frames import in_custom_function
from lightning_swarm.slicing.seeds import seed_everything


class _Bound:
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not torch.is_grad_enabled() and in_custom_function():
            # Autograd took the ghost for the input, not the tensor received: gradients would be lost in silence.
            raise RuntimeError(
                "a torch.autograd.Function was applied to a value that crosses a split point and is used again after "
                "the call that begins the stage; begin the stage at another call"
            )
        return func(*unbound(tuple(args)), **unbound(kwargs or {}))


class BoundGhost(_Bound, FakeTensor):
    """What was a ghost in front of the split point, and is a real tensor behind it."""


class BoundTensor(_Bound, Tensor):
    """What was drawn at random in front of the split point, and is what the stage before drew behind it."""


def bind(stand_in: Tensor, tensor: Tensor, seed: int) -> None:
    """From now on all references to ``stand_in`` mean ``tensor``; ``seed`` is that of the stage's own range."""
    stand_in.__dict__["_real"] = tensor
    stand_in.__dict__["_seed"] = seed
    stand_in.__class__ = BoundGhost if isinstance(stand_in, FakeTensor) else BoundTensor


def reseed_if_repeated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Activation checkpointing calls the first module again in the backward pass: it must draw the same numbers."""
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, _Bound):
            seed_everything(leaf.__dict__["_seed"])
            return


def real(leaf: Any) -> Any:
    """The real tensor if this is bound to one, else the very object."""
    return leaf.__dict__["_real"] if isinstance(leaf, _Bound) else leaf


def unbound(structure: Any) -> Any:
    """The structure with the real tensors in place of those bound to them."""
    return tree_map(real, structure)
