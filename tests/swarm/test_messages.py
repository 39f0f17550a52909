"""A message is what its annotations say, or it is refused with the field's name."""

import random
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import pytest

from lightning_swarm.swarm.errors import ProtocolError
from lightning_swarm.swarm.messages import Message


@dataclass(frozen=True)
class Source(Message):
    peer: str
    stage: int = 0


@dataclass(frozen=True)
class Job(Message):
    step: int
    scale: float
    sources: tuple[Source, ...] = ()
    pair: tuple[int, str] = (0, "")
    sizes: dict[str, list[int]] | None = None
    kind: Literal["train", "val"] = "train"
    data: bytes = b""
    flag: bool = False
    anything: Any = None
    stages: frozenset[int] = frozenset()
    by_stage: dict[int, Source] | None = None

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError("a step is not negative")


JOB = Job(
    3,
    0.5,
    (Source("a"), Source("b", 1)),
    (1, "x"),
    {"k": [1, 2]},
    "val",
    b"\x00",
    True,
    [None, 1],
    frozenset({1, 2}),
    {0: Source("c")},
)


def over_the_wire(message: Message) -> Any:
    return msgpack.unpackb(msgpack.packb(message.to_dict()), use_list=False, strict_map_key=False)


def test_a_message_comes_back() -> None:
    back = Job.from_dict(over_the_wire(JOB))
    assert back.sources == JOB.sources and back.sizes == JOB.sizes and back.stages == JOB.stages
    assert back == Job.from_dict(JOB.to_dict() | {"anything": (None, 1)})


def test_defaults_do_not_travel() -> None:
    assert Job(1, 2.0).to_dict() == {"step": 1, "scale": 2.0}
    assert Job.from_dict({"step": 1, "scale": 2}) == Job(1, 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": None}, '"step": int was expected, not NoneType'),
        ({"step": True}, '"step": int was expected, not bool'),
        ({"step": -1}, "a step is not negative"),
        ({"scale": "1"}, '"scale": float was expected, not str'),
        ({"sources": [{"peer": 3}]}, '"sources": "peer": str was expected, not int'),
        ({"sources": "ab"}, '"sources": a list was expected, not str'),
        ({"pair": [1]}, '"pair": 2 items were expected, not 1'),
        ({"sizes": {"k": 1}}, '"sizes"'),
        ({"kind": "test"}, '"kind": one of'),
        ({"stages": [[1]]}, '"stages": int was expected'),
        ({"more": 1}, "'more' is unknown"),
        ({b"\xff": 1}, "is unknown"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[Any, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match="^Job: ") as caught:
        Job.from_dict(JOB.to_dict() | change)
    assert message in str(caught.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ProtocolError, match='Job: "scale" is missing'):
        Job.from_dict({"step": 1})


@pytest.mark.parametrize("data", [None, [], "x", 3, {}, {1: 2}], ids=repr)
def test_what_is_no_dictionary_of_fields_is_refused(data: Any) -> None:
    with pytest.raises(ProtocolError):
        Job.from_dict(data)


def test_an_annotation_that_cannot_be_checked_is_refused_early() -> None:
    @dataclass(frozen=True)
    class Bad(Message):
        x: complex

    with pytest.raises(TypeError, match="complex"):
        Bad.from_dict({"x": 1})


def test_random_values_in_any_field_are_refused_or_of_the_right_type() -> None:
    rng = random.Random(0)
    values = [
        None,
        True,
        1,
        -1,
        1.5,
        "a",
        b"b",
        [],
        [1],
        {},
        {"peer": "x"},
        [{"peer": "x"}],
        [1, "a"],
        {1: {"peer": "x"}},
        2**70,
    ]
    for _ in range(10_000):
        data = JOB.to_dict()
        for name in rng.sample(list(data), rng.randrange(1, 4)):
            data[name] = rng.choice(values)
        try:
            job = Job.from_dict(data)
        except ProtocolError:
            continue
        assert type(job.step) is int and type(job.scale) is float and type(job.data) is bytes
        assert all(type(source) is Source for source in job.sources)
