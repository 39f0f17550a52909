"""How a reduction divides a vector among the members of a group, and what its pieces look like in an outbox.

An *entry* is the list of tensors under one key. With the codec ``"none"`` it holds the values themselves, as a view of
the vector; with another codec a header and the encoded bytes. In place of values that will not come stands a header
that says whose fault that is, so that those who wait for them learn it at once.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from lightning_swarm.swarm.calls import Group
from lightning_swarm.swarm.codec import decode, encode
from lightning_swarm.swarm.errors import CallerError, ProtocolError, SourceFailed

# 2 MB of float32: small enough to overlap, large enough that a call's fixed cost does not show.
_CHUNK = 1 << 19
# A part begins at a multiple of this, so that the blocks of the 8-bit codec are whole.
_GRAIN = 1 << 8
# Powers of two that float32 can be multiplied with, and back.
_MAX_SHIFT = 120


class ReductionFailed(SourceFailed):
    """The group has no sum, at any member; nothing was changed.

    Args:
        peer: The member to blame.
        phase: ``"slices"`` or ``"sums"``: what it did not deliver.
        cause: Name of the error class that was met with.
        details: What was seen.
        reported_by: The member that met with it, if not this one.
    """

    def __init__(self, peer: str, phase: str, cause: str, details: str = "", reported_by: str | None = None) -> None:
        seen = f", as {reported_by} reports" if reported_by else ""
        message = f"The reduction failed: {peer} did not deliver its {phase} ({cause}{seen}). {details}"
        super().__init__(message.rstrip(), peer, cause)
        self.phase = phase
        self.reported_by = reported_by


class Chunk(NamedTuple):
    """A piece of the vector: ``vector[start:stop]``, added by one owner."""

    owner: str
    number: int
    start: int
    stop: int


def chunks(group: Group, length: int) -> dict[str, list[Chunk]]:
    """Which member adds which pieces of a vector; a pure function, so that all members agree.

    Args:
        group: Its members' weights say how the vector is divided; a member of weight 0 only sends and receives.
        length: Number of values.

    Returns:
        Every member's chunks, in order; together they are the whole vector.
    """
    weights = [member.weight for member in group.members]
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise CallerError(f"The weights of group {group.name!r} are {weights}; they must be finite and not negative.")
    # Not by `sum`, whose last bit depends on the version of Python.
    passed = list(itertools.accumulate(weights if any(weights) else [1.0] * len(weights)))
    result, start = {}, 0
    for member, until in zip(group.members, passed):
        stop = length if until == passed[-1] else min(length, round(length * (until / passed[-1]) / _GRAIN) * _GRAIN)
        pieces = enumerate(range(start, stop, _CHUNK))
        result[member.peer] = [Chunk(member.peer, i, at, min(at + _CHUNK, stop)) for i, at in pieces]
        start = stop
    return result


def pack(values: Tensor, codec: str) -> list[Tensor]:
    """A chunk's values, contiguous, as an entry; without a copy for the codec ``"none"``."""
    if codec == "none":
        return [values]
    shift = _shift(values) if codec == "fp16" and values.dtype == torch.float32 else 0
    buffers, meta = encode(values * 2.0**shift if shift else values, codec)
    return [_header([meta, shift]), *(torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers)]


def unpack(entry: Sequence[Tensor], dtype: torch.dtype, length: int, codec: str) -> Tensor:
    """The values of an entry.

    Raises:
        ProtocolError: It does not hold ``length`` values of this dtype.
    """
    if codec != "none":
        match header_of(entry):
            case [[_, [int(announced)], *_] as meta, int(shift)] if announced == length and abs(shift) <= _MAX_SHIFT:
                pass
            case header:
                raise ProtocolError(f"An entry of a reduction has the header {str(header)[:80]}.")
        if any(tensor.dtype != torch.uint8 for tensor in entry):
            raise ProtocolError("An encoded entry of a reduction is not made of bytes.")
        values = decode(meta, b"".join(tensor.numpy().tobytes() for tensor in entry[1:]))
        entry = [values * 2.0**-shift if shift else values]
    if len(entry) != 1 or entry[0].dtype != dtype or entry[0].shape != (length,):
        came = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in entry[:4]]
        raise ProtocolError(f"An entry of a reduction should be {length} values of {dtype}, not {came}.")
    return entry[0]


def _shift(values: Tensor) -> int:
    """The power of two that makes the most of fp16's range, in which gradients such as 1e-7 would be lost."""
    largest = max(map(abs, torch.stack(values.aminmax()).tolist())) if len(values) else 0.0
    return min(15 - math.frexp(largest)[1], _MAX_SHIFT) if 0 < largest < math.inf else 0


def blame(failure: ReductionFailed) -> list[Tensor]:
    """The entry that stands for values that will not come."""
    return [_header({"peer": failure.peer, "phase": failure.phase, "cause": failure.cause})]


def blamed(header: dict[Any, Any], reporter: str, members: Collection[str]) -> ReductionFailed:
    """The failure that a `blame` tells of.

    Raises:
        ProtocolError: It is malformed or blames somebody who is no member.
    """
    peer, phase, cause = (str(header.get(key)) for key in ("peer", "phase", "cause"))
    if peer not in members or phase not in ("slices", "sums"):
        raise ProtocolError(f"An entry of a reduction blames {str(header)[:200]}.")
    return ReductionFailed(peer, phase, cause[:100], reported_by=None if peer == reporter else reporter)


def header_of(entry: Sequence[Tensor]) -> Any:
    """``None`` for plain values, a list before encoded ones, a dictionary in place of values that will not come.

    Raises:
        ProtocolError: It cannot be read.
    """
    if not entry or entry[0].dtype != torch.uint8:
        return None
    try:
        return msgpack.unpackb(entry[0].numpy().tobytes())
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"The header of a reduction's entry cannot be read: {error}") from error


def _header(content: Any) -> Tensor:
    return torch.frombuffer(bytearray(msgpack.packb(content)), dtype=torch.uint8)
