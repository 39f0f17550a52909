"""However a peer's process ends, nothing of it stays, and its callers know at once."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_swarm.swarm.errors import PeerUnreachable
from lightning_swarm.swarm.node import Node
from tests.swarm.peers import PeerProcess


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[PeerProcess]:
    process = PeerProcess(**getattr(request, "param", {"run_id": "processes"}))
    yield process
    process.close()


def end_input(peer: PeerProcess) -> None:
    assert peer.process.stdin is not None
    peer.process.stdin.close()
    assert peer.process.wait(120) == 0


@pytest.mark.parametrize("peer", [{"run_id": "abandon"}], indirect=True)
def test_a_script_that_ends_without_closing_leaves_nothing(peer: PeerProcess) -> None:
    end_input(peer)
    assert peer.is_gone()


@pytest.mark.parametrize(
    "peer", [{"run_id": "kill"}, {"run_id": "fork", "fork": True}], indirect=True, ids=["alone", "with a forked child"]
)
def test_a_killed_peer_leaves_nothing_and_its_callers_know_at_once(peer: PeerProcess) -> None:
    run_id = "fork" if peer.child else "kill"
    with Node(run_id=run_id, initial_peers=peer.maddrs) as node:
        waiting = node.spawn(node.call(peer.peer_id, "wait", {}, deadline_s=100), "waiting")
        node.run(node.call(peer.peer_id, "echo", {}, deadline_s=10))
        peer.signal(signal.SIGKILL)
        with pytest.raises(PeerUnreachable):
            waiting.result(5)
        assert peer.is_gone()
        with pytest.raises(PeerUnreachable):
            node.run(node.call(peer.peer_id, "echo", {}, deadline_s=5))
        assert not peer.child or Path(f"/proc/{peer.child}").exists()


def test_ctrl_c_interrupts_the_script_and_not_its_network_and_a_closed_peer_leaves_nothing(peer: PeerProcess) -> None:
    assert len(peer.daemons()) == 2 and Path(peer.directory).exists()
    os.killpg(peer.process.pid, signal.SIGINT)
    assert peer.process.stdout is not None and peer.process.stdout.readline() == "interrupted\n"
    with Node(run_id="processes", initial_peers=peer.maddrs) as node:
        assert node.run(node.call(peer.peer_id, "echo", {"still": "here"}, deadline_s=10))[0] == {"still": "here"}
    end_input(peer)
    assert peer.is_gone(0.1)


def test_peers_find_each_other_after_the_one_that_introduced_them_is_gone(peer: PeerProcess) -> None:
    with Node(run_id="processes", initial_peers=peer.maddrs) as first:
        with Node(run_id="processes", initial_peers=peer.maddrs) as second:

            async def hello(caller: str, header: dict, tensors: list) -> tuple[dict, list]:
                return {"from": second.peer_id}, []

            second.serve({"hello": hello})
            peer.signal(signal.SIGKILL)
            assert peer.is_gone()
            reply, _ = first.run(first.call(second.peer_id, "hello", {}, deadline_s=10))
            assert reply == {"from": second.peer_id}
            with Node(run_id="processes", initial_peers=[*peer.maddrs, *second.maddrs]) as third:
                assert third.run(third.call(second.peer_id, "hello", {}, deadline_s=10))[0] == reply


def test_a_stopped_peer_costs_its_callers_no_more_than_their_deadline(peer: PeerProcess) -> None:
    with Node(run_id="processes", initial_peers=peer.maddrs) as node:
        node.run(node.call(peer.peer_id, "echo", {}, deadline_s=10))
        peer.signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(Exception, match="did not answer 'echo' within 0.3 s"):
            node.run(node.call(peer.peer_id, "echo", {}, deadline_s=0.3))
        assert time.monotonic() - start < 5
        peer.signal(signal.SIGCONT)
        assert node.run(node.call(peer.peer_id, "echo", {"back": 1}, deadline_s=10))[0] == {"back": 1}
