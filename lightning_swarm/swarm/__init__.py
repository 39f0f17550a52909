"""Peers and what flows between them: nothing here knows Lightning's loops, stages or steps."""

from lightning_swarm.swarm.errors import (
    CallerError,
    DeadlineExceeded,
    Dropped,
    NodeClosed,
    NotNow,
    PeerBusy,
    PeerStale,
    PeerUnreachable,
    ProtocolError,
    RemoteError,
    SourceFailed,
    SwarmError,
)
from lightning_swarm.swarm.frames import Limits
from lightning_swarm.swarm.messages import Message
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import Entry, Outbox, fetch

__all__ = [
    "CallerError",
    "DeadlineExceeded",
    "Dropped",
    "Entry",
    "Limits",
    "Message",
    "Node",
    "NodeClosed",
    "NotNow",
    "Outbox",
    "PeerBusy",
    "PeerStale",
    "PeerUnreachable",
    "ProtocolError",
    "RemoteError",
    "SourceFailed",
    "SwarmError",
    "fetch",
]
