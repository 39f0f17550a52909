"""Who the trainer of a run is: its other peers know, and the DHT does."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_swarm.swarm.calls import TrainerRecord
from lightning_swarm.swarm.errors import SwarmError

if TYPE_CHECKING:
    from lightning_swarm.swarm.node import Node

_ASK_DEADLINE_S = 5.0


async def told_trainer(node: "Node", addresses: Sequence[str]) -> str | None:
    """The trainer's peer id, as the first of these peers says that knows it."""
    for address in addresses:
        with contextlib.suppress(SwarmError):
            peer = address.rpartition("/p2p/")[2]
            answer, _ = await node.call(peer, "trainer", {}, deadline_s=_ASK_DEADLINE_S)
            if isinstance(answer.get("trainer"), str):
                return str(answer["trainer"])
    return None


async def announced_trainer(node: "Node") -> str | None:
    """The one that has announced itself in the DHT; of several the newest."""
    records = await node.directory.read("trainer", TrainerRecord)
    return max(records, key=lambda peer: records[peer].started_s, default=None)
