"""The bytes of one message: prefix, header, tensors.

A frame is a fixed prefix (magic and version, kind, the lengths of what follows, the sender's token), a msgpack header
and the raw bytes of the tensors that the header describes. A reader looks at the token first, at the lengths next, at
the header then, and only after all of that makes memory for tensors, so a stranger's bytes cost nothing.

Requests carry ``[method, header, tensors, codec, deadline_s]``, replies ``[header, tensors]``, failures what
`pack_error` gives; ``tensors`` are `codec` metas.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from lightning_swarm.swarm.codec import Buffer, Meta, Slot
from lightning_swarm.swarm.errors import CallerError, ProtocolError

REQUEST, REPLY, FAILURE = 1, 2, 3
MAGIC = b"LSW\x01"
_PREFIX = struct.Struct("<4sB3xIQ32s")
PREFIX_BYTES = _PREFIX.size
NO_TOKEN = bytes(32)


@dataclass(frozen=True)
class Limits:
    """What a peer accepts from others; checked before memory is made.

    Args:
        header_bytes: The largest header. Plans of models with very many parameters may need more.
        body_bytes: The most tensor bytes in one frame. What may be larger is handed over in parts, see `parts`.
        tensors: The most tensors in one frame.
        streams: The most streams open to this peer at a time, from all peers.
        streams_per_peer: The same from one peer.
        stall_s: How long a frame may arrive without any progress before its stream is closed.
        deadline_s: The longest time that a call may be asked to take.
    """

    header_bytes: int = 16 << 20
    body_bytes: int = 4 << 30
    tensors: int = 65_536
    streams: int = 1024
    streams_per_peer: int = 256
    stall_s: float = 30.0
    deadline_s: float = 3600.0


class Prefix(NamedTuple):
    kind: int
    header_bytes: int
    body_bytes: int
    token: bytes


def make_token(secret: bytes | None, run_id: str, peer: str) -> bytes:
    """What proves that ``peer`` knows the run's secret; of no use to another peer, for libp2p proves who sends it."""
    if secret is None:
        return NO_TOKEN
    return hmac.digest(secret, f"lightning-swarm call|{run_id}|{peer}".encode(), hashlib.sha256)


def pack(kind: int, token: bytes, header: Any, buffers: Sequence[Buffer], limits: Limits) -> list[Buffer]:
    """A frame as buffers to send in order; the tensors' are not copied.

    Raises:
        CallerError: When the header holds what msgpack cannot carry, or the frame would be refused for its size.
    """
    try:
        packed = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CallerError(f"A header may hold only numbers, strings, bytes, lists and dictionaries: {error}") from error
    body_bytes = sum(map(len, buffers))
    try:
        check_lengths(len(packed), body_bytes, limits)
    except ProtocolError as error:
        raise CallerError(f"{error} Send it in parts.") from None
    head = _PREFIX.pack(MAGIC, kind, len(packed), body_bytes, token) + packed
    return [head, *(buffer for buffer in buffers if buffer)] if buffers else [head]


def unpack_prefix(data: Buffer) -> Prefix:
    """The prefix; its lengths are still to be checked.

    Raises:
        ProtocolError: When it is not one of ours.
    """
    magic, kind, header_bytes, body_bytes, token = _PREFIX.unpack(data)
    if magic != MAGIC:
        if magic[:3] == MAGIC[:3]:
            raise ProtocolError(f"The peer speaks version {magic[3]} of the protocol, this one version {MAGIC[3]}.")
        raise ProtocolError("These bytes are not a message of lightning-swarm.")
    if kind not in (REQUEST, REPLY, FAILURE):
        raise ProtocolError(f"A message of the unknown kind {kind}.")
    return Prefix(kind, header_bytes, body_bytes, token)


def check_lengths(header_bytes: int, body_bytes: int, limits: Limits) -> None:
    """Raises `ProtocolError` when a frame is larger than what is accepted."""
    if not 0 < header_bytes <= limits.header_bytes:
        raise ProtocolError(f"A header of {header_bytes} bytes; 1 to {limits.header_bytes} are accepted.")
    if body_bytes > limits.body_bytes:
        raise ProtocolError(f"Tensors of {body_bytes} bytes in one message; at most {limits.body_bytes} are accepted.")


def unpack_header(data: Buffer) -> Any:
    """The header. Lists come back as tuples, so that they can be keys."""
    try:
        return msgpack.unpackb(data, use_list=False, strict_map_key=False)
    except Exception as error:  # msgpack raises a dozen kinds; whatever it is, these bytes are not a header
        raise ProtocolError(f"A header is not valid msgpack: {type(error).__name__}.") from error


def make_slots(metas: Sequence[Meta], body_bytes: int, limits: Limits) -> list[Slot]:
    """Memory for the announced tensors, if what they need is exactly what will come."""
    if not isinstance(metas, tuple) or len(metas) > limits.tensors:
        raise ProtocolError("A message does not describe its tensors, or has too many.")
    slots = [Slot(meta) for meta in metas]
    needed = sum([slot.bytes for slot in slots])
    if needed != body_bytes:
        raise ProtocolError(f"A message describes tensors of {needed} bytes and announces {body_bytes}.")
    for slot in slots:
        slot.allocate()
    return slots
