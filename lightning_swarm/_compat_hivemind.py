"""The names of hivemind that its documentation does not promise, in one place, each with the reason.

hivemind 1.1.12 gives us libp2p's daemon ``p2pd``, the protocol buffers to speak to it, and the DHT. Its own streams
copy every message several times and its unary calls end at 2 MB, so `swarm` speaks to ``p2pd`` itself.
"""

import importlib.resources

import hivemind.hivemind_cli as _cli

# hivemind.DHT would fork a process; this is the same DHT on our event loop.
from hivemind.dht.node import DHTNode

# What DHTNode.create raises when the clocks disagree.
from hivemind.dht.protocol import ValidationError

# The base of what signs and checks the records of our DHT node.
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

# P2P.replicate attaches to a daemon that we started ourselves.
from hivemind.p2p.p2p_daemon import P2P

# Turns a peer id from base58 into bytes and back.
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID

# What a failed connect raises.
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

# The protocol spoken with p2pd over its unix socket.
from hivemind.proto import p2pd_pb2

# The base of what signs and checks the calls of our DHT node.
from hivemind.utils.auth import AuthorizerBase

# Parses addresses as p2pd does, and gives their binary form.
from hivemind.utils.multiaddr import Multiaddr

# The clock that the DHT's expirations are compared with.
from hivemind.utils.timed_storage import get_dht_time

__all__ = [
    "P2P",
    "AuthorizerBase",
    "DHTNode",
    "DHTRecord",
    "Multiaddr",
    "P2PDaemonError",
    "PeerID",
    "RecordValidatorBase",
    "ValidationError",
    "attach",
    "connect",
    "get_dht_time",
    "p2pd_path",
    "p2pd_pb2",
    "peer_id_bytes",
]


def p2pd_path() -> str:
    """Where the wheel put the daemon's binary."""
    return str(importlib.resources.files(_cli) / "p2pd")


async def attach(control_maddr: str, directory: str) -> P2P:
    """A `P2P` object over a running daemon that keeps its sockets in ``directory``.

    hivemind puts them directly under /tmp through a class attribute, and they would stay there when we are killed.
    """
    scoped: type[P2P] = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{directory}/"})
    return await scoped.replicate(Multiaddr(control_maddr))


async def connect(p2p: P2P, peer: PeerID, maddrs: list[Multiaddr]) -> None:
    """Dials a peer at these addresses; raises `P2PDaemonError` with libp2p's reason. P2P has no public way to do it."""
    await p2p._client.connect(peer, maddrs)


def peer_id_bytes(peer: str) -> bytes:
    """A peer id's bytes; raises `ValueError` for what cannot be one. p2pd would only say that it cannot parse it."""
    packed = PeerID.from_base58(peer).to_bytes()
    if len(packed) < 2 or len(packed) != 2 + packed[1]:
        raise ValueError(f"{peer!r} is not a peer id.")
    return packed
