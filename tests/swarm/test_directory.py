"""Records appear, change and vanish as their owners say, and nonsense is counted, not believed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from lightning_swarm._compat_hivemind import DHTRecord, get_dht_time
from lightning_swarm.swarm.guard import MAX_LIFETIME_S, MAX_RECORD_BYTES, RecordGuard
from lightning_swarm.swarm.messages import Message
from lightning_swarm.swarm.node import Node


@dataclass(frozen=True)
class Speaker(Message):
    stage: int
    speed: float = 1.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    first = Node(run_id="directory")
    others = [Node(run_id="directory", initial_peers=first.maddrs) for _ in range(2)]
    yield [first, *others]
    for node in [*others, first]:
        node.close()


def read(node: Node, kind: str) -> dict[str, Speaker]:
    return node.run(node.directory.read(kind, Speaker))


def announce(node: Node, kind: str, stage: int, lifetime_s: float = 30.0) -> bool:
    return node.run(node.directory.announce(kind, Speaker(stage), lifetime_s))


def test_everybody_reads_what_everybody_announces(nodes: list[Node]) -> None:
    assert all(announce(node, "all", stage) for stage, node in enumerate(nodes))
    expected = {node.peer_id: Speaker(stage) for stage, node in enumerate(nodes)}
    assert all(read(node, "all") == expected for node in nodes)
    assert all(read(node, "none") == {} for node in nodes)


def test_the_latest_word_counts_even_if_it_lives_shorter(nodes: list[Node]) -> None:
    announce(nodes[1], "changing", 1, lifetime_s=60)
    announce(nodes[1], "changing", 2, lifetime_s=1)
    assert read(nodes[2], "changing") == {nodes[1].peer_id: Speaker(2)}


def test_a_withdrawn_record_is_gone_at_once_and_may_come_back(nodes: list[Node]) -> None:
    announce(nodes[1], "leaving", 1)
    nodes[1].run(nodes[1].directory.withdraw("leaving"))
    assert read(nodes[0], "leaving") == read(nodes[1], "leaving") == {}
    announce(nodes[1], "leaving", 3)
    assert read(nodes[0], "leaving") == {nodes[1].peer_id: Speaker(3)}


def test_a_record_vanishes_with_its_lifetime(nodes: list[Node]) -> None:
    announce(nodes[1], "short", 1, lifetime_s=0.3)

    async def until_gone() -> None:
        async for records in nodes[0].directory.watch("short", Speaker, period_s=0.02):
            if not records:
                return

    nodes[0].run(until_gone(), timeout_s=5)


def test_a_watcher_hears_changes_only(nodes: list[Node]) -> None:
    heard: list[dict[str, Speaker]] = []

    async def listen() -> None:
        async for records in nodes[0].directory.watch("watched", Speaker, period_s=0.02):
            heard.append(records)

    def wait_until_heard(times: int) -> None:
        until = time.monotonic() + 10.0
        while len(heard) < times and time.monotonic() < until:
            time.sleep(0.01)

    listening = nodes[0].spawn(listen(), "listening")
    wait_until_heard(1)
    for times, stage in ((2, 1), (2, 1), (3, 2)):
        announce(nodes[2], "watched", stage)
        wait_until_heard(times)
        time.sleep(0.1)
    listening.cancel()
    name = nodes[2].peer_id
    assert heard == [{}, {name: Speaker(1)}, {name: Speaker(2)}]


@pytest.mark.parametrize(
    "value",
    [3, "text", b"\xc1", b"", msgpack.packb([]), msgpack.packb({"stage": "x"}), msgpack.packb({"speed": 1.0})],
    ids=repr,
)
def test_a_malformed_record_is_ignored_and_counted(nodes: list[Node], value: Any) -> None:
    kind = f"bad {value!r}"
    announce(nodes[1], kind, 1)
    store = nodes[2].directory._dht.store(f"directory/{kind}", value, get_dht_time() + 30, subkey="somebody")
    assert nodes[2].run(store)
    assert read(nodes[0], kind) == {nodes[1].peer_id: Speaker(1)}
    assert nodes[0].directory.ignored[kind] == (0 if value == b"" else 1)


def record(value: bytes, lifetime_s: float = 10.0) -> DHTRecord:
    return DHTRecord(b"key", b"subkey", value, get_dht_time() + lifetime_s)


def test_a_signed_record_is_valid_as_it_is_and_only_so() -> None:
    guard = RecordGuard(b"secret", "run")
    plain = record(b"value")
    signed = DHTRecord(plain.key, plain.subkey, guard.sign_value(plain), plain.expiration_time)
    assert guard.validate(signed) and guard.strip_value(signed) == b"value"
    changes: list[dict[str, Any]] = [
        {"key": b"other"},
        {"subkey": b"other"},
        {"value": b"x" + signed.value[1:]},
        {"value": plain.value},
        {"value": b""},
        {"expiration_time": signed.expiration_time + 1},
    ]
    for change in changes:
        assert not guard.validate(DHTRecord(**{**signed.__dict__, **change}))
    assert not RecordGuard(b"other", "run").validate(signed) and not RecordGuard(b"secret", "other").validate(signed)


def test_even_without_a_secret_records_are_small_and_end() -> None:
    guard = RecordGuard(None, "run")
    assert guard.validate(record(bytes(MAX_RECORD_BYTES)))
    assert not guard.validate(record(bytes(MAX_RECORD_BYTES + 1)))
    assert not guard.validate(record(b"", MAX_LIFETIME_S + 1)) and not guard.validate(record(b"", float("nan")))
