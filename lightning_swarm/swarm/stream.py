"""One libp2p stream, as frames.

``p2pd`` hands us every libp2p stream as a unix socket: it begins with one length-prefixed protocol buffer (who is at
the other end, or why there is nobody) and is ours from then on. `Stream` reads that hello, then frames. Small parts go
through a scratch buffer that all streams of a node share; tensors are read from the socket straight into the memory
that they will live in. What a frame means is left to its subclasses, in `opening` and `answering`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from lightning_swarm.swarm.codec import Buffer, Slot
from lightning_swarm.swarm.errors import ProtocolError, SwarmError
from lightning_swarm.swarm.forks import forget, let_go_in_children
from lightning_swarm.swarm.frames import (
    PREFIX_BYTES,
    Limits,
    Prefix,
    check_lengths,
    make_slots,
    unpack_header,
    unpack_prefix,
)

_DIRECT_BYTES = 32_768
_HELLO_BYTES = 65_536
SCRATCH_BYTES = 262_144


class Stream(asyncio.BufferedProtocol):
    """Reads frames; subclasses say what to do with them.

    Args:
        limits: What is accepted.
        scratch: Buffer shared by all streams of one event loop. Sharing is sound, because an event loop asks for a
            buffer, reads and hands over the bytes without another stream in between.
    """

    def __init__(self, limits: Limits, scratch: memoryview) -> None:
        self.limits = limits
        self.transport: asyncio.Transport | None = None
        self.bytes_in = 0  # of frames, since somebody set it to 0
        self.heard_s = time.monotonic()  # when something came last
        self._scratch = scratch
        self._partial = bytearray()
        self._wanted = 1
        self._stage: Callable[[Buffer], None] = self._on_varint
        self._varint = 0
        self._varint_shift = 0
        self._prefix: Prefix | None = None
        self._header: Any = None
        self._slots: list[Slot] = []
        self._unfilled: list[memoryview] = []
        self._target: memoryview | None = None

    def on_hello(self, hello: bytes) -> None:
        """The protocol buffer that ``p2pd`` sends first."""
        raise NotImplementedError

    def on_prefix(self, prefix: Prefix) -> None:
        """A frame begins. Raising `ProtocolError` refuses it before anything else of it is looked at."""
        raise NotImplementedError

    def tensors_of(self, prefix: Prefix, header: Any) -> Any:
        """The metas in a frame's header."""
        raise NotImplementedError

    def on_frame(self, prefix: Prefix, header: Any, slots: list[Slot]) -> None:
        """A whole frame is here."""
        raise NotImplementedError

    def on_refused(self, error: SwarmError) -> None:
        """What came is not acceptable, and this stream has no future; `on_lost` follows."""
        self.abort()

    def on_lost(self, error: Exception | None) -> None:
        """The stream ended, by either side or because what came was refused; may be called twice."""
        raise NotImplementedError

    @property
    def is_clean(self) -> bool:
        """Whether no frame is half read or half sent."""
        half_read = self._stage != self._on_prefix or self._partial or self._target is not None
        return not half_read and self.transport is not None and not self.transport.get_write_buffer_size()

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes whenever something comes or goes."""
        unsent = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return self.bytes_in, len(self._partial), unsent

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Queues buffers; those of tensors are not copied and must stay as they are."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.writelines(buffers)

    def abort(self) -> None:
        """Ends the stream at once, which the other side sees."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's classes
        let_go_in_children(self, self.transport.get_extra_info("socket").fileno())

    def connection_lost(self, exc: Exception | None) -> None:
        forget(self)
        self.transport, self._slots, self._unfilled, self._target = None, [], [], None
        self.on_lost(exc)

    def eof_received(self) -> bool:
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None and len(self._target) >= _DIRECT_BYTES:
            return self._target
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.heard_s = time.monotonic()
        try:
            if self._target is not None and len(self._target) >= _DIRECT_BYTES:
                self._filled(nbytes)
            else:
                self._feed(self._scratch[:nbytes])
        except SwarmError as error:
            self.on_refused(error)
            self.on_lost(error)

    def _feed(self, data: memoryview) -> None:
        while data:
            if self._target is not None:
                size = min(len(data), len(self._target))
                self._target[:size] = data[:size]
                data = data[size:]
                self._filled(size)
                continue
            missing = self._wanted - len(self._partial)
            if self._partial or len(data) < missing:
                self._partial += data[:missing]
                data = data[missing:]
                if len(self._partial) < self._wanted:
                    return
                part: Buffer = bytes(self._partial)
                self._partial.clear()
            else:
                part, data = data[:missing], data[missing:]
            self.bytes_in += len(part)
            self._stage(part)

    def _filled(self, size: int) -> None:
        assert self._target is not None
        self.bytes_in += size
        if size < len(self._target):
            self._target = self._target[size:]
            return
        self._target = self._unfilled.pop() if self._unfilled else None
        if self._target is None:
            self._end_frame()

    def skip_hello(self) -> None:
        """Frames begin at once."""
        self._expect(PREFIX_BYTES, self._on_prefix)

    def _expect(self, wanted: int, stage: Callable[[Buffer], None]) -> None:
        self._wanted, self._stage = wanted, stage

    def _on_varint(self, part: Buffer) -> None:
        self._varint |= (part[0] & 0x7F) << self._varint_shift
        self._varint_shift += 7
        if part[0] & 0x80 or not self._varint:
            if self._varint_shift > 28:
                raise ProtocolError("p2pd began a stream with an endless length.")
            return
        if self._varint > _HELLO_BYTES:
            raise ProtocolError("p2pd began a stream with a message that is too long.")
        self._expect(self._varint, self._on_hello)

    def _on_hello(self, part: Buffer) -> None:
        self.skip_hello()
        self.bytes_in = 0
        self.on_hello(bytes(part))

    def _on_prefix(self, part: Buffer) -> None:
        self._prefix = unpack_prefix(part)
        self.on_prefix(self._prefix)
        check_lengths(self._prefix.header_bytes, self._prefix.body_bytes, self.limits)
        self._expect(self._prefix.header_bytes, self._on_header)

    def _on_header(self, part: Buffer) -> None:
        assert self._prefix is not None
        self._header = unpack_header(part)
        self._slots = make_slots(
            self.tensors_of(self._prefix, self._header),
            self._prefix.body_bytes,
            self.limits,
        )
        self._unfilled = [buffer for slot in reversed(self._slots) for buffer in reversed(slot.buffers)]
        if self._unfilled:
            self._target = self._unfilled.pop()
        else:
            self._end_frame()

    def _end_frame(self) -> None:
        prefix, header, slots = self._prefix, self._header, self._slots
        assert prefix is not None
        self._prefix, self._header, self._slots = None, None, []
        self._expect(PREFIX_BYTES, self._on_prefix)
        self.on_frame(prefix, header, slots)


def length_prefixed(message: bytes) -> bytes:
    """A protocol buffer as ``p2pd`` expects it: its length as a varint, then the message."""
    size, prefix = len(message), bytearray()
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + message
