"""What is too large for one message, handed over in parts.

A message holds a few gigabytes at most, the state of a stage any number. So who gives it puts it into its outbox in
parts of bounded size, and who wants it fetches one after the other. Meanwhile the call that asked for it stays open:
its end, which a receiver that dies brings about, too, is what lets the giver drop the parts. So they stay for as long
as somebody fetches them, however slow the link is, and not for longer, and no timer has to guess.

Tensors travel flat, so one that is larger than a part is cut anywhere.
"""

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.swarm.codec import MAX_DIMENSIONS
from lightning_swarm.swarm.errors import ProtocolError
from lightning_swarm.swarm.loop import unheard
from lightning_swarm.swarm.messages import Message
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import Entry, Outbox, fetch
from lightning_swarm.swarm.watched import watch

_PART_BYTES = 256 << 20
_PART_DEADLINE_S = 600.0
_DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Offer(Message):
    """What comes with the first part."""

    header: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    """Of all tensors."""
    parts: int

    def __post_init__(self) -> None:
        if any(len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape) for shape in self.shapes):
            raise ValueError("a tensor's shape is not a short list of sizes")


def is_part(key: Any, method: str = "") -> bool:
    """Whether a key of an outbox is that of a part; of those that were asked for by this method, if one is given."""
    return str(key).startswith(f"parts/{method}")


async def give(
    outbox: Outbox, method: str, caller: str, key: str, header: dict[str, Any], tensors: Sequence[Tensor]
) -> tuple[dict[str, Any], list[Tensor]]:
    """Offer what a caller has asked for until it lets go. To be awaited by the call's handler.

    Args:
        outbox: The one that this peer's ``fetch`` is answered from.
        method: Of the call.
        caller: Who asks.
        key: What :func:`take` has sent.
        header: What msgpack carries.
        tensors: Must not be changed any more.
    """
    parts = await asyncio.to_thread(_cut, tensors)
    offer = Offer(header, tuple(tuple(tensor.shape) for tensor in tensors), len(parts))
    prefix = _prefix(method, caller, key)
    try:
        for number, part in enumerate(parts):
            outbox.put(f"{prefix}{number}", part, {} if number else offer.to_dict())
        await asyncio.Event().wait()
    finally:
        outbox.drop(lambda entry: str(entry).startswith(prefix))
    return {}, []


async def take(
    node: Node, peer: str, method: str, request: dict[str, Any], *, computes: bool = True
) -> tuple[dict[str, Any], list[Tensor]]:
    """What a peer gives in answer to a call whose handler awaits :func:`give`; all of it, or nothing.

    Args:
        node: Our node; this must be awaited on its event loop.
        peer: Who gives it.
        method: The call.
        request: Its header, to which ``"key"`` is added.
        computes: Whether the peer has to compute something before it can give.

    Raises:
        SwarmError: The call's, or the peer has fallen silent or has sent something else than it has announced.
    """
    key = secrets.token_hex(8)
    prefix = _prefix(method, node.peer_id, key)
    asking = asyncio.ensure_future(node.call(peer, method, {**request, "key": key}, deadline_s=_DEADLINE_S))
    unheard(asking)

    async def part(number: int) -> Entry:
        fetching = asyncio.ensure_future(fetch(node, peer, f"{prefix}{number}", deadline_s=_PART_DEADLINE_S))
        try:
            await watch(node, peer, {asking, fetching}, computes=computes and not number)
            if not fetching.done():
                asking.result()
                raise ProtocolError(f"{peer} has ended {method!r} before all parts were fetched.", peer)
            return fetching.result()
        finally:
            fetching.cancel()

    try:
        first = await part(0)
        offer, pieces = Offer.from_dict(first.header), deque(first.tensors)
        del first
        for number in range(1, offer.parts):
            pieces += (await part(number)).tensors
    finally:
        asking.cancel()
    return offer.header, await asyncio.to_thread(_join, pieces, offer.shapes)


def _prefix(method: str, caller: str, key: str) -> str:
    return f"parts/{method}/{caller}/{key}/"


def _cut(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Flat pieces of the tensors, in order, as parts of bounded size; at least one part."""
    parts: list[list[Tensor]] = [[]]
    room = _PART_BYTES
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        for piece in flat.split(max(1, _PART_BYTES // flat.itemsize)):
            if piece.nbytes > room:
                parts.append([])
                room = _PART_BYTES
            parts[-1].append(piece)
            room -= piece.nbytes
    return parts


def _join(pieces: deque[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The tensors of these shapes again; lets go of the pieces on the way, as they may be half of the memory."""
    tensors = []
    for shape in shapes:
        missing = math.prod(shape)
        found: list[Tensor] = []
        while missing or not found:
            piece = pieces.popleft() if pieces else None
            if piece is None or piece.ndim != 1 or len(piece) > missing or (found and piece.dtype != found[0].dtype):
                raise ProtocolError("The parts of a reply are not the tensors that were announced.")
            found.append(piece)
            missing -= len(piece)
        tensors.append((found[0] if len(found) == 1 else torch.cat(found)).view(shape))
    if pieces:
        raise ProtocolError("The parts of a reply hold more than the tensors that were announced.")
    return tensors
