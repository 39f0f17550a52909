"""The calling end: a pool of kept-alive streams to each peer."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_swarm._compat_hivemind import p2pd_pb2, peer_id_bytes
from lightning_swarm.swarm.codec import CODECS, Buffer, Slot
from lightning_swarm.swarm.errors import (
    CallerError,
    DeadlineExceeded,
    NodeClosed,
    PeerUnreachable,
    ProtocolError,
    SwarmError,
    unpack_error,
)
from lightning_swarm.swarm.frames import FAILURE, REPLY, REQUEST, Prefix
from lightning_swarm.swarm.rpc import Context
from lightning_swarm.swarm.shortcut import METHOD, Shortcut, machine
from lightning_swarm.swarm.stream import Stream, length_prefixed


class _Calling(Stream):
    """The calling end of a stream."""

    def __init__(self, context: Context, peer: str) -> None:
        super().__init__(context.limits, context.scratch)
        self.peer = peer
        self._peer_bytes = peer_id_bytes(peer)
        self._token = context.token_of(peer)
        self._answer: asyncio.Future | None = None
        self.lost: SwarmError | None = None
        self.used = True

    def _expect_answer(self) -> asyncio.Future:
        if self.lost is not None:
            raise self.lost
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    async def open(self, protocol: str, deadline_s: float) -> None:
        """Asks ``p2pd`` for a stream to the peer."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(
                peer=self._peer_bytes,
                proto=[protocol],
                timeout=max(1, math.ceil(deadline_s)),
            ),
        )
        answer = self._expect_answer()
        self.send([length_prefixed(request.SerializeToString())])
        await answer

    def enter(self, shortcut: Shortcut) -> None:
        """Begins a stream that was opened by the shortcut."""
        self.skip_hello()
        self.send([length_prefixed(shortcut.ticket)])

    async def exchange(self, frame: Sequence[Buffer]) -> tuple[Prefix, Any, list[Slot]]:
        """Sends a request frame and waits for what comes back."""
        answer = self._expect_answer()
        self.send(frame)
        return await answer

    def on_hello(self, hello: bytes) -> None:
        response = p2pd_pb2.Response()
        response.ParseFromString(hello)
        if response.type != p2pd_pb2.Response.ERROR:
            return self.settle()
        reason = response.error.msg
        if "protocol" in reason and "not supported" in reason:
            error: SwarmError = ProtocolError(f"Peer {self.peer} is of another run or version: {reason}", self.peer)
        else:
            error = PeerUnreachable(f"Peer {self.peer} cannot be reached: {reason}", self.peer)
        self.lost = error
        self.abort()
        self.settle(error=error)

    def on_prefix(self, prefix: Prefix) -> None:
        if prefix.kind == REQUEST or prefix.token != self._token or self._answer is None:
            raise ProtocolError(
                f"Peer {self.peer} answered what was not asked, or without the run's secret.",
                self.peer,
            )

    def tensors_of(self, prefix: Prefix, header: Any) -> Any:
        if prefix.kind == FAILURE:
            return ()
        if not isinstance(header, tuple) or len(header) != 2 or not isinstance(header[0], dict):
            raise ProtocolError(f"Peer {self.peer} sent a malformed reply.", self.peer)
        return header[1]

    def on_frame(self, prefix: Prefix, header: Any, slots: list[Slot]) -> None:
        self.settle((prefix, header, slots))

    def on_lost(self, error: Exception | None) -> None:
        if self.lost is None:
            if isinstance(error, ProtocolError):
                self.lost = ProtocolError(f"Peer {self.peer}: {error}", self.peer)
            else:
                self.lost = PeerUnreachable(
                    f"Peer {self.peer} ended the stream without an answer: it is gone, or has another secret.",
                    self.peer,
                )
        self.settle(error=self.lost)


class Caller:
    """Calls other peers, over a pool of kept-alive streams a peer.

    Args:
        context: The node's.
        shortcuts: Whether to leave libp2p out on the way to peers of the same machine.
        idle_streams: How many idle streams to a peer are kept.
    """

    def __init__(self, context: Context, shortcuts: bool, idle_streams: int = 32) -> None:
        self._context = context
        self._machine = machine() if shortcuts else None
        self._shortcuts: dict[str, Shortcut | None] = {}
        self._idle_streams = idle_streams
        self._idle: dict[str, list[_Calling]] = defaultdict(list)
        self._busy: set[_Calling] = set()
        self._closed = False

    async def call(
        self,
        peer: str,
        method: str,
        header: dict,
        tensors: Sequence[Tensor],
        deadline_s: float,
        codec: str,
    ) -> tuple[dict, list[Tensor]]:
        """See `Node.call`."""
        context = self._context
        if self._closed:
            raise NodeClosed("This node is closed.")
        if not 0 < deadline_s <= context.limits.deadline_s:
            raise CallerError(
                f"A call needs a deadline of at most {context.limits.deadline_s:.0f} s; got {deadline_s}."
            )
        if codec not in CODECS:
            raise CallerError(f"Unknown codec {codec!r}; known are: {', '.join(CODECS)}.")
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        buffers, metas = await context.encode(tensors, codec)
        frame = context.frame(REQUEST, (method, header, metas, codec, deadline_s), buffers)
        stream, expiry = None, None
        try:
            stream = self._take(peer)
            if stream is None:
                stream = await self._open(peer, until - loop.time())
            expiry = loop.call_at(until, self._expire, stream, method, deadline_s)
            self._busy.add(stream)
            prefix, reply, slots = await stream.exchange(frame)
        except BaseException:
            if stream is not None:
                stream.abort()
            raise
        finally:
            if expiry is not None:
                expiry.cancel()
            if stream is not None:
                self._busy.discard(stream)
        context.sent[peer, method] += sum(map(len, frame))
        context.received[peer, method] += stream.bytes_in
        stream.bytes_in = 0
        self._give_back(stream)
        if prefix.kind == FAILURE:
            raise unpack_error(reply, peer)
        return reply[0], await context.decode(slots)

    @staticmethod
    def _expire(stream: _Calling, method: str, deadline_s: float) -> None:
        message = f"Peer {stream.peer} did not answer {method!r} within {deadline_s:.3g} s."
        stream.settle(error=DeadlineExceeded(message, stream.peer))

    def _take(self, peer: str) -> _Calling | None:
        idle = self._idle.get(peer)
        while idle:
            stream = idle.pop()
            if stream.lost is None:
                return stream
        return None

    def _give_back(self, stream: _Calling) -> None:
        idle = self._idle[stream.peer]
        if self._closed or not stream.is_clean or len(idle) >= self._idle_streams:
            stream.abort()
        else:
            stream.used = True
            idle.append(stream)

    async def _open(self, peer: str, deadline_s: float) -> _Calling:
        try:
            return await asyncio.wait_for(self._open_by_best_way(peer, deadline_s), deadline_s)
        except asyncio.TimeoutError as error:
            raise DeadlineExceeded(f"Peer {peer} could not be reached within {deadline_s:.3g} s.", peer) from error

    async def _open_by_best_way(self, peer: str, deadline_s: float) -> _Calling:
        if (shortcut := self._shortcuts.get(peer)) is not None:
            try:
                return await self._open_shortcut(peer, shortcut)
            except OSError:  # the peer was restarted, or is gone
                del self._shortcuts[peer]
        stream = await self._open_libp2p(peer, deadline_s)
        if self._machine is None or peer in self._shortcuts:
            return stream
        try:
            found = await self._ask_for_shortcut(stream)
            direct = None if found is None else await self._open_shortcut(peer, found)
        except OSError:  # same machine, other file system
            direct = None
        except BaseException:
            stream.abort()
            raise
        if direct is None:
            self._shortcuts[peer] = None
            return stream
        self._shortcuts[peer] = found
        stream.abort()
        return direct

    async def _open_libp2p(self, peer: str, deadline_s: float) -> _Calling:
        stream = self._new_stream(peer)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: stream, self._context.control_path)
        except (ConnectionError, FileNotFoundError) as error:
            raise NodeClosed("This node's libp2p daemon is gone.") from error
        except OSError as error:
            raise SwarmError(f"This node cannot open a stream: {error}. Is the limit on open files too low?") from error
        try:
            await stream.open(self._context.protocol, deadline_s)
        except BaseException:
            stream.abort()
            raise
        return stream

    async def _open_shortcut(self, peer: str, shortcut: Shortcut) -> _Calling:
        stream = self._new_stream(peer)
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, shortcut.path)
        stream.enter(shortcut)
        return stream

    async def _ask_for_shortcut(self, stream: _Calling) -> Shortcut | None:
        request = (METHOD, {"machine": self._machine}, (), "none", 60.0)
        prefix, reply, _ = await stream.exchange(self._context.frame(REQUEST, request))
        stream.bytes_in = 0
        return Shortcut.from_dict(reply[0]) if prefix.kind == REPLY and reply[0] else None

    def _new_stream(self, peer: str) -> _Calling:
        try:
            return _Calling(self._context, peer)
        except ValueError as error:
            raise CallerError(f"{peer!r} is not a peer id.") from error

    def sweep(self) -> None:
        """To be called now and then: ends the streams that were not used since the last time."""
        for peer, idle in list(self._idle.items()):
            kept = [stream for stream in idle if stream.lost is None and stream.used]
            for stream in idle:
                if stream not in kept:
                    stream.abort()
                stream.used = False
            if kept:
                self._idle[peer] = kept
            else:
                del self._idle[peer]
                self._shortcuts.pop(peer, None)

    def close(self) -> None:
        """Ends every stream; calls on them fail."""
        self._closed = True
        for stream in [
            *self._busy,
            *(stream for idle in self._idle.values() for stream in idle),
        ]:
            stream.lost = NodeClosed("This node was closed.")
            stream.abort()
        self._idle.clear()
