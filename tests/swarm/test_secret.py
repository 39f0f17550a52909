"""Without the run's secret nothing is answered, believed or changed."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swarm._compat_hivemind import DHTNode, PeerID, get_dht_time
from lightning_swarm.swarm.errors import PeerUnreachable
from lightning_swarm.swarm.messages import Message
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.opening import CallingStream


@dataclass(frozen=True)
class Speaker(Message):
    stage: int


class Run:
    """Two peers that share a secret, and a stranger that is connected to them."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.first = Node(run_id="secret", secret=b"the secret")
        self.second = Node(run_id="secret", secret=b"the secret", initial_peers=self.first.maddrs)
        self.stranger = Node(run_id="secret")
        self.first.serve({"echo": self.echo})

    async def echo(self, caller: str, header: dict, tensors: list) -> tuple[dict, list]:
        self.called.append(caller)
        return header, tensors


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    run = Run()
    yield run
    for node in (run.stranger, run.second, run.first):
        node.close()


def connect_stranger(run: Run) -> None:
    with pytest.raises(MisconfigurationException, match="does not let this peer in"):
        Node(run_id="secret", initial_peers=run.first.maddrs).close()


@pytest.mark.parametrize("secret", [None, b"another secret"])
def test_who_has_not_the_secret_does_not_get_in(run: Run, secret: bytes | None) -> None:
    with pytest.raises(MisconfigurationException, match="can be reached, but does not let this peer in") as caught:
        Node(run_id="secret", initial_peers=run.first.maddrs, secret=secret)
    assert run.first.maddrs[0] in str(caught.value) and "same secret" in str(caught.value)


def test_who_has_it_is_answered(run: Run) -> None:
    call = run.second.call(run.first.peer_id, "echo", {"n": 1}, deadline_s=10)
    assert run.second.run(call)[0] == {"n": 1}


def test_a_strangers_call_is_not_answered_and_does_nothing(run: Run) -> None:
    dial_first(run)
    run.called.clear()
    with pytest.raises(PeerUnreachable, match="has another secret"):
        run.stranger.run(run.stranger.call(run.first.peer_id, "echo", {}, deadline_s=10))
    assert not run.called


def test_what_a_stranger_answers_is_not_listened_to(run: Run) -> None:
    dial_first(run)
    run.stranger._answerer.handlers.setdefault("echo", run.echo)
    with pytest.raises(PeerUnreachable):
        run.first.run(run.first.call(run.stranger.peer_id, "echo", {}, deadline_s=10))


def dial_first(run: Run) -> None:
    from lightning_swarm._compat_hivemind import Multiaddr, connect

    address, _, peer = run.first.maddrs[0].partition("/p2p/")
    dht: DHTNode = run.stranger.directory._dht
    run.stranger.run(connect(dht.p2p, PeerID.from_base58(peer), [Multiaddr(address)]))


def test_a_stranger_reads_no_record_and_writes_none(run: Run) -> None:
    dial_first(run)
    run.first.run(run.first.directory.announce("speaker", Speaker(1), 30))
    assert run.second.run(run.second.directory.read("speaker", Speaker)) == {run.first.peer_id: Speaker(1)}

    dht: DHTNode = run.stranger.directory._dht
    first = PeerID.from_base58(run.first.peer_id)

    async def as_a_stranger() -> tuple[object, object, object]:
        from hivemind.dht.routing import DHTID

        key = DHTID.generate(source="secret/speaker")
        pong = await dht.protocol.call_ping(first)
        found = await dht.protocol.call_find(first, [key])
        stored = await dht.protocol.call_store(first, [key], [b"lie"], get_dht_time() + 30, subkeys=["liar"])
        return pong, found, stored

    assert run.stranger.run(as_a_stranger()) == (None, None, None)
    assert run.second.run(run.second.directory.read("speaker", Speaker)) == {run.first.peer_id: Speaker(1)}
    assert not run.second.directory.ignored


def test_a_strangers_bytes_do_nothing(run: Run) -> None:
    dial_first(run)
    run.called.clear()
    context = run.stranger._context
    rng = random.Random(0)

    async def throw(data: bytes) -> None:
        stream = CallingStream(context, run.first.peer_id)
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, context.control_path)
        await stream.open(context.protocol, 5)
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.exchange([data]), 10)

    async def throw_all() -> None:
        for _ in range(10):
            await asyncio.gather(*(throw(rng.randbytes(rng.randrange(60, 3000))) for _ in range(20)))

    refused = run.first.refused
    run.stranger.run(throw_all())
    assert (
        run.first.refused == refused + 200
        and not run.called
        and not run.first._answerer.streams_of[run.stranger.peer_id]
    )
    test_who_has_it_is_answered(run)
