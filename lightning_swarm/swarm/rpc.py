"""Calls between peers over kept-alive libp2p streams: what both ends share.

A call takes an idle stream to the peer, or opens one, writes one request frame, reads one reply frame and gives the
stream back. A stream carries one call at a time, so a large tensor holds up nobody, and ending a stream is how either
side lets go: a call that is cancelled, late or failed closes its stream, which cancels the handler at the other side,
and a peer that dies ends its streams, which fails the calls on them at once.

The calling end is in `opening` and `calling`, the other in `answering`. Both send their token in every frame and
look at no frame without the other's. Tensors are encoded and decoded on the event loop where that is free (see
`codec.is_cheap`), in the node's codec thread otherwise.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_swarm.swarm.codec import Buffer, Meta, Slot, encode, is_cheap
from lightning_swarm.swarm.frames import Limits, make_token, pack
from lightning_swarm.swarm.stream import SCRATCH_BYTES

Handler = Callable[[str, dict, list[Tensor]], Awaitable[tuple[dict, Sequence[Tensor]]]]
"""Answers one call: ``async (caller's peer id, header, tensors) -> (header, tensors)``."""


@dataclass
class Context:
    """What all streams of one node share.

    Attributes:
        control_path: Unix socket of the node's ``p2pd``.
        protocol: libp2p protocol id; names the run, so peers of another run are refused by libp2p itself.
        sent: Bytes of frames by method, requests and replies. Not by peer, as every restart of one is another peer.
        received: The same.
    """

    run_id: str
    peer_id: str
    secret: bytes | None
    control_path: str
    limits: Limits
    codec_thread: Executor
    sent: "Counter[str]" = field(default_factory=Counter)
    received: "Counter[str]" = field(default_factory=Counter)
    scratch: memoryview = field(default_factory=lambda: memoryview(bytearray(SCRATCH_BYTES)))

    def __post_init__(self) -> None:
        self.protocol = f"/lightning-swarm/1/{self.run_id}"
        self.token = self.token_of(self.peer_id)

    def token_of(self, peer: str) -> bytes:
        """What frames of ``peer`` carry."""
        return make_token(self.secret, self.run_id, peer)

    def frame(self, kind: int, header: Any, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
        """A frame from this peer."""
        return pack(kind, self.token, header, buffers, self.limits)

    async def encode(self, tensors: Sequence[Tensor], codec: str) -> tuple[list[Buffer], list[Meta]]:
        """All tensors' bytes and metas; what takes long is done in the codec thread."""
        if all(is_cheap(tensor, codec) for tensor in tensors):
            return encode_all(tensors, codec)
        return await asyncio.get_running_loop().run_in_executor(self.codec_thread, encode_all, tensors, codec)

    async def decode(self, slots: Sequence[Slot]) -> list[Tensor]:
        """The tensors of full slots; what takes long is done in the codec thread."""
        if not any(slot.heavy for slot in slots):
            return decode_all(slots)
        return await asyncio.get_running_loop().run_in_executor(self.codec_thread, decode_all, slots)


def encode_all(tensors: Sequence[Tensor], codec: str) -> tuple[list[Buffer], list[Meta]]:
    """The bytes and metas of several tensors."""
    buffers: list[Buffer] = []
    metas: list[Meta] = []
    for tensor in tensors:
        parts, meta = encode(tensor, codec)
        buffers += parts
        metas.append(meta)
    return buffers, metas


def decode_all(slots: Sequence[Slot]) -> list[Tensor]:
    """The tensors of full slots."""
    return [slot.tensor() for slot in slots]
