"""The calling end of a stream, and the ways to open one: by libp2p, or by a peer's shortcut."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from lightning_swarm._compat_hivemind import p2pd_pb2, peer_id_bytes
from lightning_swarm.swarm.codec import Buffer, Slot
from lightning_swarm.swarm.errors import (
    CallerError,
    DeadlineExceeded,
    NodeClosed,
    PeerUnreachable,
    ProtocolError,
    SwarmError,
)
from lightning_swarm.swarm.frames import FAILURE, REPLY, REQUEST, Prefix
from lightning_swarm.swarm.rpc import Context
from lightning_swarm.swarm.shortcut import METHOD, Shortcut, machine
from lightning_swarm.swarm.stream import Stream, length_prefixed


class CallingStream(Stream):
    """The calling end of a stream: one call at a time.

    Args:
        context: The node's.
        peer: Whom it leads to.

    Attributes:
        lost: Why the stream is of no use any more; ``None`` while it is.
        used: Set and unset by the pool.

    Raises:
        CallerError: When ``peer`` is no peer id.
    """

    def __init__(self, context: Context, peer: str) -> None:
        super().__init__(context.limits, context.scratch)
        self.peer = peer
        try:
            self._peer_bytes = peer_id_bytes(peer)
        except ValueError as error:
            raise CallerError(f"{peer!r} is not a peer id.") from error
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
        """Gives whoever waits for an answer this result or error."""
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
            raise ProtocolError("It answered what was not asked, or without the run's secret.")

    def tensors_of(self, prefix: Prefix, header: Any) -> Any:
        if prefix.kind == FAILURE:
            return ()
        if not isinstance(header, tuple) or len(header) != 2 or not isinstance(header[0], dict):
            raise ProtocolError("It sent a malformed reply.")
        return header[1]

    def on_frame(self, prefix: Prefix, header: Any, slots: list[Slot]) -> None:
        self.settle((prefix, header, slots))

    def on_lost(self, error: Exception | None) -> None:
        if self.lost is None:
            if isinstance(error, ProtocolError):
                self.lost = ProtocolError(f"Peer {self.peer}: {error}", self.peer)
            else:
                message = f"Peer {self.peer} ended the stream without an answer: it is gone, or has another secret."
                self.lost = PeerUnreachable(message, self.peer)
        self.settle(error=self.lost)


class Opener:
    """Opens streams to peers, by the best way that is known.

    Args:
        context: The node's.
        shortcuts: Whether to leave libp2p out on the way to peers of the same machine.
    """

    def __init__(self, context: Context, shortcuts: bool) -> None:
        self._context = context
        self._machine = machine() if shortcuts else None
        self._shortcuts: dict[str, Shortcut | None] = {}

    async def open(self, peer: str, deadline_s: float) -> CallingStream:
        """A stream that is ready for a call.

        Raises:
            SwarmError: PeerUnreachable, DeadlineExceeded, ProtocolError (of another run), CallerError or NodeClosed.
        """
        try:
            return await asyncio.wait_for(self._open(peer, deadline_s), deadline_s)
        except asyncio.TimeoutError as error:
            raise DeadlineExceeded(f"Peer {peer} could not be reached within {deadline_s:.3g} s.", peer) from error

    def forget(self, peer: str) -> None:
        """Drops what is known about the way to a peer."""
        self._shortcuts.pop(peer, None)

    async def _open(self, peer: str, deadline_s: float) -> CallingStream:
        if (shortcut := self._shortcuts.get(peer)) is not None:
            try:
                return await self._by_shortcut(peer, shortcut)
            except OSError:  # the peer was restarted, or is gone
                self.forget(peer)
        stream = await self._by_libp2p(peer, deadline_s)
        if self._machine is None or peer in self._shortcuts:
            return stream
        direct = None
        try:
            shortcut = self._shortcuts[peer] = await self._ask(stream)
            direct = None if shortcut is None else await self._by_shortcut(peer, shortcut)
        except OSError:  # the same machine, but not the same file system
            self._shortcuts[peer] = None
        except BaseException:
            stream.abort()
            raise
        if direct is None:
            return stream
        stream.abort()
        return direct

    async def _by_libp2p(self, peer: str, deadline_s: float) -> CallingStream:
        stream = CallingStream(self._context, peer)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: stream, self._context.control_path)
            await stream.open(self._context.protocol, deadline_s)
        except (ConnectionError, FileNotFoundError) as error:
            raise NodeClosed("This node's libp2p daemon is gone.") from error
        except OSError as error:
            raise SwarmError(f"This node cannot open a stream: {error}. Is the limit on open files too low?") from error
        except BaseException:
            stream.abort()
            raise
        return stream

    async def _by_shortcut(self, peer: str, shortcut: Shortcut) -> CallingStream:
        stream = CallingStream(self._context, peer)
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, shortcut.path)
        stream.enter(shortcut)
        return stream

    async def _ask(self, stream: CallingStream) -> Shortcut | None:
        request = (METHOD, {"machine": self._machine}, (), "none", self._context.limits.deadline_s)
        prefix, reply, _ = await stream.exchange(self._context.frame(REQUEST, request))
        stream.bytes_in = 0
        if prefix.kind != REPLY or not reply[0]:
            return None
        try:
            shortcut = Shortcut.from_dict(reply[0])
            shortcut.check(self._context.peer_id)
        except ProtocolError as error:
            raise ProtocolError(f"Peer {stream.peer}: {error}", stream.peer) from error
        return shortcut
