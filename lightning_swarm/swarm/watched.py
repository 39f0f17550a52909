"""Long calls to peers that may stop answering: while one is out, the peer is asked now and then whether it lives."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_swarm.swarm.errors import CallerError, PeerBusy
from lightning_swarm.swarm.node import Node

_ASK_AFTER_S = 3.0
_PROBE_DEADLINE_S = 5.0


async def call_watched(
    node: Node, peer: str, method: str, header: dict[str, Any], *, deadline_s: float
) -> tuple[dict[str, Any], Sequence[Tensor]]:
    """As :meth:`Node.call`, but ends soon after the peer has stopped to answer anything.

    Raises:
        SwarmError: What the call raised, or what asking the peer raised.
    """
    call = asyncio.ensure_future(node.call(peer, method, header, deadline_s=deadline_s))
    try:
        while True:
            await asyncio.wait({call}, timeout=_ASK_AFTER_S)
            if call.done():
                return call.result()
            with contextlib.suppress(CallerError, PeerBusy):  # A refusal is an answer, too.
                await node.call(peer, "probe", {}, deadline_s=_PROBE_DEADLINE_S)
    finally:
        call.cancel()
