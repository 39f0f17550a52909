"""Nested values survive the wire, and nothing else gets through."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch

from lightning_swarm.swarm.errors import CallerError, ProtocolError
from lightning_swarm.swarm.tree import decode_tree, encode_tree


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Sample:
    x: torch.Tensor
    name: str


def _there_and_back(value: Any) -> Any:
    description, tensors = encode_tree(value)
    return decode_tree(msgpack.unpackb(msgpack.packb(description), use_list=False), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "text", b"bytes", True, 2**70],
        {"a": (1, [2]), 3: {4}},
        Pair(1, [Pair(2, 3)]),
        torch.float16,
        torch.device("cpu"),
        np.float32(1.5),
    ],
)
def test_plain_values(value: Any) -> None:
    back = _there_and_back(value)
    assert back == value and type(back) is type(value)


def test_tensors_arrays_and_classes() -> None:
    value = {"s": Sample(torch.arange(3), "n"), "m": UserDict(x=torch.ones(2)), "a": np.arange(4)}
    back = _there_and_back(value)
    assert isinstance(back["s"], Sample) and torch.equal(back["s"].x, torch.arange(3)) and back["s"].name == "n"
    assert isinstance(back["m"], UserDict) and torch.equal(back["m"]["x"], torch.ones(2))
    assert np.array_equal(back["a"], np.arange(4))


def test_a_stand_in_crosses_instead_of_the_data() -> None:
    description, tensors = encode_tree(
        [torch.ones(5), torch.zeros(2)], replace=lambda t: list(t.shape) if t.sum() else None
    )
    assert len(tensors) == 1
    back = decode_tree(description, tensors, restore=lambda shape: ("ghost", *shape))
    assert back[0] == ("ghost", 5) and torch.equal(back[1], torch.zeros(2))


def test_what_cannot_cross_is_named() -> None:
    with pytest.raises(CallerError, match="type builtins.object cannot be sent"):
        encode_tree({"x": object()})


@pytest.mark.parametrize(
    "description",
    [
        ["tensor", 5],
        ["dataclass", "os:system", []],
        ["named tuple", "subprocess:Popen", [1]],
        ["dtype", "nn"],
        ["mapping", "builtins:eval", []],
        ["what", 1],
        ["stand-in", 1],
        17.5j,
        [],
    ],
)
def test_malformed_descriptions_are_refused(description: Any) -> None:
    with pytest.raises(ProtocolError):
        decode_tree(description, [])
