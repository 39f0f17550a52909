"""Nested Python values as plain data plus tensors, so that batches and step outputs cross the network without pickle.

``encode_tree`` turns a value into a msgpack-able description and a list of tensors; ``decode_tree`` is its inverse.
What can cross: ``None``, numbers, strings, bytes, tensors, NumPy arrays and scalars, dtypes, devices, and dicts, lists,
tuples, sets, named tuples, dataclasses and mapping classes of these. A class is named by its import path and looked up
among the modules that the receiving script has imported itself: nothing is imported or run on a peer's word.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_swarm.swarm.errors import CallerError, ProtocolError

_PLAIN = (type(None), bool, int, float, str, bytes)
_MAX_DEPTH = 64


def encode_tree(value: Any, replace: Callable[[Tensor], Any] | None = None) -> tuple[Any, list[Tensor]]:
    """Describe a nested value.

    Args:
        value: The value; its tensors are not copied.
        replace: Called with every tensor; what it returns (a msgpack-able value) crosses instead of the tensor's data,
            marked so that :func:`decode_tree` can hand it to ``restore``. ``None`` keeps the tensor.

    Returns:
        The description (msgpack-able) and the tensors in the order in which the description numbers them.

    Raises:
        CallerError: A value of a type that cannot cross; names the type.
    """
    tensors: list[Tensor] = []

    def walk(item: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise CallerError(f"A value is nested deeper than {_MAX_DEPTH} levels and cannot be sent to another peer.")
        if type(item) in _PLAIN:
            return item if not isinstance(item, int) or -(2**63) <= item < 2**64 else ["big", str(item)]
        if isinstance(item, Tensor):
            instead = replace(item) if replace is not None else None
            if instead is not None:
                return ["stand-in", instead]
            tensors.append(item.detach())
            return ["tensor", len(tensors) - 1]
        if type(item) is list:
            return ["list", [walk(v, depth + 1) for v in item]]
        if type(item) is tuple:
            return ["tuple", [walk(v, depth + 1) for v in item]]
        if type(item) is dict:
            return ["dict", [[walk(k, depth + 1), walk(v, depth + 1)] for k, v in item.items()]]
        if isinstance(item, (set, frozenset)):
            return ["set", [walk(v, depth + 1) for v in item]]
        if isinstance(item, np.ndarray):
            tensors.append(torch.from_numpy(np.ascontiguousarray(item)))
            return ["array", len(tensors) - 1]
        if isinstance(item, np.generic):
            return ["scalar", str(item.dtype), item.item()]
        if isinstance(item, torch.dtype):
            return ["dtype", str(item).removeprefix("torch.")]
        if isinstance(item, torch.device):
            return ["device", str(item)]
        if isinstance(item, torch.Size):
            return ["tuple", list(item)]
        name = f"{type(item).__module__}:{type(item).__qualname__}"
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return ["named tuple", name, [walk(v, depth + 1) for v in item]]
        if isinstance(item, Mapping):
            return ["mapping", name, [[walk(k, depth + 1), walk(v, depth + 1)] for k, v in item.items()]]
        if dataclasses.is_dataclass(item):
            fields = [[f.name, walk(getattr(item, f.name), depth + 1)] for f in dataclasses.fields(item) if f.init]
            return ["dataclass", name, fields]
        raise CallerError(
            f"A value of type {type(item).__module__}.{type(item).__qualname__} cannot be sent to another peer. "
            f"Batches and "
            "step outputs may hold tensors, numbers, strings and dicts, lists, tuples, named tuples or dataclasses "
            "of them."
        )

    return walk(value, 0), tensors


def decode_tree(description: Any, tensors: list[Tensor], restore: Callable[[Any], Any] | None = None) -> Any:
    """Rebuild what :func:`encode_tree` described.

    Raises:
        ProtocolError: The description is malformed or names a class that this script does not have.
    """

    def walk(item: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ProtocolError(f"a nested value is deeper than {_MAX_DEPTH} levels")
        if type(item) in _PLAIN:
            return item
        kind, *rest = item
        if kind == "tensor":
            return tensors[rest[0]]
        if kind == "stand-in":
            if restore is None:
                raise ProtocolError("a stand-in for a tensor came where tensors were expected")
            return restore(rest[0])
        if kind == "list":
            return [walk(v, depth + 1) for v in rest[0]]
        if kind == "tuple":
            return tuple(walk(v, depth + 1) for v in rest[0])
        if kind == "dict":
            return {walk(k, depth + 1): walk(v, depth + 1) for k, v in rest[0]}
        if kind == "set":
            return {walk(v, depth + 1) for v in rest[0]}
        if kind == "array":
            return tensors[rest[0]].numpy()
        if kind == "scalar":
            return np.dtype(rest[0]).type(rest[1])
        if kind == "dtype":
            return _dtype(rest[0])
        if kind == "device":
            return torch.device(rest[0])
        if kind == "big":
            return int(rest[0])
        values = rest[1]
        if kind == "named tuple":
            return _known_class(rest[0], lambda c: issubclass(c, tuple) and hasattr(c, "_fields"))(
                *(walk(v, depth + 1) for v in values)
            )
        if kind == "mapping":
            return _known_class(rest[0], lambda c: issubclass(c, Mapping))(
                {walk(k, depth + 1): walk(v, depth + 1) for k, v in values}
            )
        if kind == "dataclass":
            return _known_class(rest[0], dataclasses.is_dataclass)(**{k: walk(v, depth + 1) for k, v in values})
        raise ProtocolError(f"unknown kind of nested value {kind!r}")

    try:
        return walk(description, 0)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise ProtocolError(f"malformed nested value: {error}") from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"unknown dtype {name!r}")
    return dtype


def _known_class(path: str, accept: Callable[[type], bool]) -> Callable[..., Any]:
    module_name, _, qualified_name = path.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not accept(found):
        raise ProtocolError(f"this script has no class {path!r} that a batch could be made of")
    return found
