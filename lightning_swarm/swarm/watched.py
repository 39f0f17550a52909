"""Long calls to peers that may stop answering: while one is out, the peer is asked now and then what it does.

A peer that answers nothing is gone. One that answers, but whose compute thread has stood still for long, will not do
either what that thread is needed for (a driver that hangs, a deadlock in the user's code), and counts as silent.
"""

import asyncio
from collections.abc import Collection
from typing import Any

from lightning_swarm.swarm.calls import ProbeReply, ProbeRequest
from lightning_swarm.swarm.errors import CallerError, DeadlineExceeded, PeerBusy
from lightning_swarm.swarm.node import Node

_ASK_AFTER_S = 3.0
_PROBE_DEADLINE_S = 5.0
_STUCK_AFTER_S = 60.0
# A slow machine's microbatches may take minutes, each time.
_STUCK_AFTER_USUAL = 10.0


def is_stuck(computing_s: float, usual_s: float) -> bool:
    """Whether a compute thread that has got no further for so long will not get any further.

    Args:
        computing_s: For how long.
        usual_s: How long it takes on average for what takes it longest.
    """
    return computing_s > max(_STUCK_AFTER_S, _STUCK_AFTER_USUAL * usual_s)


async def ask(node: Node, peer: str, *, computes: bool = True) -> None:
    """Ask a peer whether it lives.

    Args:
        node: This peer.
        peer: The other one.
        computes: Whether its compute thread has to live, too.

    Raises:
        SwarmError: It does not answer, or hangs.
    """
    try:
        header, _ = await node.call(peer, "probe", ProbeRequest().to_dict(), deadline_s=_PROBE_DEADLINE_S)
    except (CallerError, PeerBusy):  # A refusal is an answer, too.
        return
    status = ProbeReply.from_dict(header)
    if computes and is_stuck(status.computing_s, status.usual_s):
        raise DeadlineExceeded(
            f"{peer} has got no further for {status.computing_s:.0f} s with what usually takes it "
            f"{status.usual_s:.1f} s",
            peer,
        )


async def watch(node: Node, peer: str, calls: Collection["asyncio.Future[Any]"], *, computes: bool = True) -> None:
    """Until one of these calls to a peer has ended, or :func:`ask` has found the peer silent."""
    while True:
        done, _ = await asyncio.wait(calls, timeout=_ASK_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return
        await ask(node, peer, computes=computes)
