"""Addresses that do not work are named at once, those that do are enough."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swarm.swarm.node import Node

SOMEBODY = "12D3KooWEiXZcTZLnBNGsDwoStTQUmQ3cbnU3h3TDSMpfvwX8dGF"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(run_id="bootstrap") as node:
        yield node


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "127.0.0.1:3000",
        "/ip4/127.0.0.1/tcp/3000",
        "/ip4/127.0.0.1/tcp/3000/p2p/",
        "/ip4/127.0.0.1/tcp/3000/p2p/abc",
        f"/ip4/300.0.0.1/tcp/3000/p2p/{SOMEBODY}",
        f"/ip4/127.0.0.1/tcp/x/p2p/{SOMEBODY}",
    ],
)
def test_a_malformed_address_is_named_before_anything_starts(address: str, node: Node) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        Node(run_id="bootstrap", initial_peers=[*node.maddrs, address])
    assert f"initial_peers: {address!r} is not the address of a peer" in str(caught.value)
    assert "/ip4/192.0.2.1/tcp/31337/p2p/Qm" in str(caught.value)


def test_one_string_instead_of_a_list_is_refused(node: Node) -> None:
    with pytest.raises(MisconfigurationException, match="a list of addresses, not one string"):
        Node(run_id="bootstrap", initial_peers=node.maddrs[0])


def test_who_refuses_is_named_without_waiting() -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{SOMEBODY}"
    start = time.monotonic()
    with pytest.raises(MisconfigurationException, match="none can be reached") as caught:
        Node(run_id="bootstrap", initial_peers=[address])
    assert f"{address}: " in str(caught.value) and "connection refused" in str(caught.value)
    assert time.monotonic() - start < 10


def test_who_is_somebody_else_is_named(node: Node) -> None:
    address = node.maddrs[0].replace(node.peer_id, SOMEBODY)
    with pytest.raises(MisconfigurationException, match="none can be reached") as caught:
        Node(run_id="bootstrap", initial_peers=[address])
    assert "peer id mismatch" in str(caught.value)


def test_who_does_not_answer_is_named_in_time() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        address = f"/ip4/127.0.0.1/tcp/{deaf.getsockname()[1]}/p2p/{SOMEBODY}"
        start = time.monotonic()
        with pytest.raises(MisconfigurationException) as caught:
            Node(run_id="bootstrap", initial_peers=[address], startup_timeout_s=3)
        assert f"{address}: no answer" in str(caught.value) and time.monotonic() - start < 10


def test_one_live_peer_is_enough(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{SOMEBODY}"
    with Node(run_id="bootstrap", initial_peers=[dead, *node.maddrs]) as second:
        assert second.peer_id != node.peer_id
    assert "some cannot be reached" in caplog.text and dead in caplog.text


def test_the_only_peer_may_be_busy(node: Node) -> None:
    async def hold_the_loop(seconds: float) -> None:
        asyncio.get_running_loop().call_soon(time.sleep, seconds)
        await asyncio.sleep(seconds)

    with ThreadPoolExecutor() as pool:
        busy = pool.submit(node.run, hold_the_loop(4.0))  # longer than hivemind waits
        with Node(run_id="bootstrap", initial_peers=node.maddrs):
            busy.result()


def test_a_failed_start_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = Path(f"/tmp/test-{free_port()}")
    directory.mkdir()
    with pytest.raises(MisconfigurationException):
        address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{SOMEBODY}"
        Node(run_id="bootstrap", initial_peers=[address], runtime_dir=directory)
    directory.rmdir()


@pytest.mark.parametrize("listening_on", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_named(listening_on: str) -> None:
    with socket.socket() as other:
        other.bind((listening_on, 0))
        other.listen()
        address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        with pytest.raises(MisconfigurationException, match="is in use by another process") as caught:
            Node(run_id="bootstrap", host_maddrs=[address])
        assert f"host_maddrs: {address} " in str(caught.value)


def test_the_port_of_another_peer_is_in_use(node: Node) -> None:
    address = node.maddrs[0].split("/p2p/")[0]
    with pytest.raises(MisconfigurationException, match="is in use"):
        Node(run_id="bootstrap", host_maddrs=[address])


@pytest.mark.parametrize("address", ["nonsense", "/ip4/127.0.0.1/tcp/x", "/ip4/192.0.2.1/tcp/0"])
def test_an_address_that_cannot_be_listened_on_is_named(address: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        Node(run_id="bootstrap", host_maddrs=[address])
    assert "host_maddrs" in str(caught.value) and address in str(caught.value)


def test_a_port_can_be_used_again_at_once() -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    for _ in range(2):
        with Node(run_id="bootstrap", host_maddrs=[address]) as first:
            assert first.maddrs == [f"{address}/p2p/{first.peer_id}"]
            Node(run_id="bootstrap", initial_peers=first.maddrs).close()


def test_a_runtime_directory_that_is_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="runtime_dir: .* too long"):
        Node(run_id="bootstrap", runtime_dir=tmp_path / ("x" * 60))
