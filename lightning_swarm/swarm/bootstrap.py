"""Finding the swarm: which of the given addresses are addresses, which of them answer, and do they let us in."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swarm._compat_hivemind import (
    P2P,
    DHTNode,
    Multiaddr,
    P2PDaemonError,
    PeerID,
    ValidationError,
    connect,
    peer_id_bytes,
)
from lightning_swarm.swarm.errors import DeadlineExceeded, NotNow, PeerUnreachable, ProtocolError
from lightning_swarm.swarm.guard import CallGuard, RecordGuard

if TYPE_CHECKING:
    from lightning_swarm.swarm.node import Node

_ASK_DEADLINE_S = 5.0
_ASK_AGAIN_S = 0.5
_JOIN_DEADLINE_S = 30.0

_log = logging.getLogger(__name__)


def parse_initial_peers(addresses: Sequence[str]) -> list[Multiaddr]:
    """The addresses, parsed.

    Raises:
        MisconfigurationException: Naming the first that is malformed or names no peer.
    """
    if isinstance(addresses, str):
        raise MisconfigurationException(f"initial_peers must be a list of addresses, not one string: {addresses!r}.")
    parsed = []
    for address in addresses:
        try:
            maddr = Multiaddr(str(address).strip())
            peer_id_bytes(maddr["p2p"])
        except Exception as error:  # the parser raises whatever its parts raise
            raise MisconfigurationException(
                f"initial_peers: {str(address)!r} is not the address of a peer. It must look like "
                f"/ip4/192.0.2.1/tcp/31337/p2p/Qm..., as a running peer prints it. ({type(error).__name__}: {error})"
            ) from error
        parsed.append(maddr)
    return parsed


async def connect_initial(p2p: P2P, maddrs: Sequence[Multiaddr], timeout_s: float) -> list[str]:
    """Dials all at once and returns those that answered, as soon as one has and the rest had a moment to.

    Raises:
        NotNow: When none answers, as soon as that is clear, with the reason for each.
    """
    if not maddrs:
        return []
    dials = {asyncio.ensure_future(_dial(p2p, maddr)): maddr for maddr in maddrs}
    reasons: dict[str, str] = {}
    live: list[str] = []
    loop = asyncio.get_running_loop()
    until, pending = loop.time() + max(1.0, min(timeout_s - 1.0, 10.0)), set(dials)
    try:
        while pending and loop.time() < until:
            done, pending = await asyncio.wait(
                pending,
                timeout=until - loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for dial in done:
                error = dial.exception()
                if error is None:
                    live.append(str(dials[dial]))
                    until = min(until, loop.time() + 0.5)
                elif isinstance(error, (P2PDaemonError, OSError, EOFError)):
                    reasons[str(dials[dial])] = str(error).replace("Connect failed. msg=", "")
                else:
                    raise error
    finally:
        for dial in pending:
            dial.cancel()
    reasons.update({str(dials[dial]): "no answer" for dial in pending})
    listing = "".join(f"\n  {address}: {reason}" for address, reason in reasons.items())
    if not live:
        raise NotNow(f"initial_peers: none can be reached. Is a peer of the run alive there?{listing}")
    if reasons:
        _log.warning(
            "initial_peers: some cannot be reached, going on with the others:%s",
            listing,
        )
    return live


async def _dial(p2p: P2P, maddr: Multiaddr) -> None:
    peer = PeerID.from_base58(maddr["p2p"])
    if peer == p2p.peer_id:
        raise P2PDaemonError("this is the address of this very peer")
    await connect(p2p, peer, [Multiaddr(str(maddr).rsplit("/p2p/", 1)[0])])


async def join_dht(p2p: P2P, live: Sequence[str], run_id: str, secret: bytes | None) -> DHTNode:
    """This peer's part of the DHT, joined to that of the live peers.

    Nothing is cached: a swarm has few records, and a stale one is worse than a call.

    Raises:
        MisconfigurationException: When the live peers do not let this one in.
    """
    dht = await DHTNode.create(
        p2p=p2p,
        record_validator=RecordGuard(secret, run_id),
        authorizer=None if secret is None else CallGuard(secret, run_id),
        cache_locally=False,
        cache_on_store=False,
        cache_nearest=0,
        cache_refresh_before_expiry=0,
    )
    if live:
        try:
            await _introduce(dht, [PeerID.from_base58(Multiaddr(address)["p2p"]) for address in live])
        except (DeadlineExceeded, ValidationError) as error:
            raise MisconfigurationException(
                f"initial_peers: {', '.join(live)} can be reached, but does not let this peer in. Is a peer of the run "
                f"there, with the same secret, and do the clocks of both machines agree? ({error})"
            ) from error
    return dht


async def _introduce(dht: DHTNode, peers: Sequence[PeerID]) -> None:
    """Make one of these peers, at least, know this one, and look around from there.

    A refusal comes at once. What takes long is no refusal: the peer may be busy starting its run, and is asked again.

    Raises:
        DeadlineExceeded: None of them answers.
        ValidationError: They do not reach this one, or their clocks differ from ours.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + _JOIN_DEADLINE_S
    while True:
        asked = loop.time()
        pings = [dht.protocol.call_ping(peer, validate=True, strict=True) for peer in peers]
        outcomes = await asyncio.gather(*pings, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if any(outcome is not None and outcome not in errors for outcome in outcomes):
            break
        if loop.time() > until or loop.time() - asked < dht.protocol.wait_timeout / 2:
            raise errors[0] if errors else DeadlineExceeded("none responds to a ping")
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(dht.find_nearest_nodes([dht.node_id]), dht.protocol.wait_timeout)


async def refuse_other_runs(node: "Node", addresses: Sequence[str]) -> None:
    """See that the initial peers are of the node's run. Without a secret, peers of any run let it into their DHT.

    Raises:
        MisconfigurationException: Some are alive, and all of these are of other runs.
    """
    peers = [maddr["p2p"] for maddr in parse_initial_peers(addresses)]
    for attempt in range(2):
        if attempt:  # one that is just starting answers the DHT before it answers calls
            await asyncio.sleep(_ASK_AGAIN_S)
        calls = (node.call(peer, "trainer", {}, deadline_s=_ASK_DEADLINE_S) for peer in peers)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        known = [error for error in outcomes if not isinstance(error, (PeerUnreachable, DeadlineExceeded))]
        strangers = [address for address, error in zip(addresses, outcomes) if isinstance(error, ProtocolError)]
        if len(strangers) < max(1, len(known)):  # whatever else a peer answers, it is of this run
            return
    raise MisconfigurationException(
        f"initial_peers: {', '.join(strangers)} can be reached, but belongs to another run than {node.run_id!r} (or to "
        "another version of this package). Give the run id that its join line shows, or the address of a peer of "
        f"run {node.run_id!r}."
    )
