"""What a call means for shapes: the key under which a `MemoMode` remembers its results, and what kind of call it is."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.slicing._compat import FakeTensor, any_autocast_enabled
from lightning_swarm.slicing.rehearsal import AFTER_ANOTHER, BLANKS, LOOKS

PLAIN = frozenset(
    {
        int, float, bool, str, complex, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
        type(Ellipsis), types.FunctionType, types.BuiltinFunctionType, type, range,
    }
)  # fmt: skip
"""Types whose values are compared when calls are."""

_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
_NOT_IN_PLACE = frozenset({"__invert__", "__index__", "__int__"})


_CACHE = object()  # marks a part of a key that stands for an object whose content does not matter


class Kind(enum.Enum):
    """How a function of torch is treated over ghosts."""

    DIRECT = enum.auto()
    """Cheap, or without a tensor as result: just done."""
    SPECIAL = enum.auto()
    """Looks at data, or at a ghost's shape alone."""
    IN_PLACE = enum.auto()
    HOOK = enum.auto()
    COMPUTE = enum.auto()


def classify(function: Any) -> Kind:
    """The kind of a function, by its name and what is known of it."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return Kind.DIRECT
    if name in _HOOKS:
        return Kind.HOOK
    if function in LOOKS or function in BLANKS or function in AFTER_ANOTHER:
        return Kind.SPECIAL
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return Kind.IN_PLACE
    return Kind.IN_PLACE if name.startswith("__i") and name not in _NOT_IN_PLACE else Kind.COMPUTE


def surroundings() -> tuple[Any, ...]:
    """What around a call changes the types of its results."""
    if not any_autocast_enabled():
        return (torch.is_grad_enabled(),)
    kinds = ("cpu", "cuda")
    return (torch.is_grad_enabled(), *(torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in kinds))


def sign(values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> bool:
    """Appends to ``key`` what values mean for shapes and to ``tensors`` those among them; False if that cannot be told.

    This runs for every ghost call of every microbatch, hence no recursion for the most frequent types.
    """
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            tensors.append(value)
            known = value.__dict__.get("_signature")
            if known is None:
                known = value.__dict__["_signature"] = (value.shape, value.stride(), value.dtype, value.fake_device)
            key.append(known)
            key.append(value.requires_grad)
        elif kind in PLAIN:
            key.append(kind)
            key.append(value)
        elif kind is Tensor or kind is nn.Parameter:
            tensors.append(value)
            key.append((kind, value.shape, value.stride(), value.dtype, value.device, value.requires_grad))
        elif not _sign_other(value, kind, key, tensors):
            return False
    return True


def _sign_other(value: Any, kind: type, key: list[Any], tensors: list[Tensor]) -> bool:
    if kind is tuple or kind is list or kind is torch.Size:
        key.append((kind, len(value)))
        return sign(value, key, tensors)
    if kind is dict:
        key.append(tuple(value))
        return sign(value.values(), key, tensors)
    if kind is slice:
        key.append(kind)
        return sign((value.start, value.stop, value.step), key, tensors)
    if isinstance(value, enum.Enum):
        key.append(value)
        return True
    if _is_cache(kind):
        key.append((kind, _CACHE, value.get_seq_length()))
        return True
    return False


def keepable(key: list[Any], tensors: list[Tensor]) -> bool:
    """Whether the call's arguments themselves may be kept: they hold on to no data."""
    if any(type(tensor) is not FakeTensor for tensor in tensors):
        return False
    return not any(type(item) is tuple and len(item) == 3 and item[1] is _CACHE for item in key)


@functools.lru_cache(maxsize=256)
def _is_cache(kind: type) -> bool:
    """Whether this is a cache of keys and values of Hugging Face's, which its models pass to all layers.

    Every layer writes its own entry and reads no other, so a layer in front of the split point need not be run for it.
    """
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in kind.__mro__)
