"""The answering end: runs a handler for each request and sends what it gives.

Strangers are let in by libp2p, so everything here is bounded before it is trusted: streams, headers, bodies, and the
time that a half-sent frame or an unread reply may take.
"""

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgpack
from torch import Tensor

from lightning_swarm._compat_hivemind import Multiaddr, PeerID, p2pd_pb2
from lightning_swarm.swarm.codec import CODECS, Slot
from lightning_swarm.swarm.errors import (
    CallerError,
    DeadlineExceeded,
    PeerBusy,
    ProtocolError,
    SwarmError,
    pack_error,
    unpack_error,
)
from lightning_swarm.swarm.forks import forget, let_go_in_children
from lightning_swarm.swarm.frames import FAILURE, REPLY, REQUEST, Prefix, unpack_header
from lightning_swarm.swarm.rpc import Context, Handler
from lightning_swarm.swarm.shortcut import METHOD, Tickets
from lightning_swarm.swarm.stream import Stream, length_prefixed

_log = logging.getLogger(__name__)
# A caller whose deadline passes ends its stream, which cancels the handler. Only when that does not arrive, because the
# network is cut, the handler is cancelled from here, this much later.
_GRACE_S = 1.0


class _Answering(Stream):
    def __init__(self, answerer: "Answerer") -> None:
        super().__init__(answerer.context.limits, answerer.context.scratch)
        self.peer = ""
        self._answerer = answerer
        self._context = answerer.context
        self._token = b""
        self._trusted = False
        self._task: asyncio.Task | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._expired = False
        self._last_progress: tuple[int, int, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._answerer.streams) >= self.limits.streams:
            self.abort()
        self._answerer.streams.add(self)

    def on_hello(self, hello: bytes) -> None:
        info = p2pd_pb2.StreamInfo()
        info.ParseFromString(hello)
        self._is_from(PeerID(info.peer).to_base58())

    def _is_from(self, peer: str) -> None:
        self.peer = peer
        self._token = self._context.token_of(peer)
        self._answerer.streams_of[peer] += 1

    def on_prefix(self, prefix: Prefix) -> None:
        self._trusted = hmac.compare_digest(prefix.token, self._token)
        if not self._trusted:
            raise ProtocolError("It has not the run's secret.")
        if prefix.kind != REQUEST or self._task is not None:
            self._trusted = False
            raise ProtocolError("It sent what is no request, or a second one before the first was answered.")
        if self._answerer.streams_of[self.peer] > self.limits.streams_per_peer:
            raise PeerBusy(f"More than {self.limits.streams_per_peer} streams are open from one peer.")

    def tensors_of(self, prefix: Prefix, header: Any) -> Any:
        if not isinstance(header, tuple) or len(header) != 5:
            raise ProtocolError("A malformed request.")
        method, content, metas, codec, deadline_s = header
        if not isinstance(method, str) or not isinstance(content, dict) or codec not in CODECS:
            raise ProtocolError("A malformed request.")
        if type(deadline_s) not in (int, float) or not 0 < deadline_s <= self.limits.deadline_s:
            raise ProtocolError("A request without a valid deadline.")
        return metas

    def on_frame(self, prefix: Prefix, header: Any, slots: list[Slot]) -> None:
        method, content, _, codec, deadline_s = header
        self._context.received[self._answerer.known(method)] += self.bytes_in
        self.bytes_in = 0
        loop = asyncio.get_running_loop()
        self._expired = False
        self._expiry = loop.call_later(deadline_s + _GRACE_S, self._expire)
        self._task = loop.create_task(self._answer(method, content, slots, codec))

    async def _answer(self, method: str, content: dict, slots: list[Slot], codec: str) -> None:
        context = self._context
        try:
            handler = self._answerer.handler(method)
            header, tensors = await handler(self.peer, content, await context.decode(slots))
            buffers, metas = await context.encode(tensors, codec)
            frame = context.frame(REPLY, (header, metas), buffers)
        except asyncio.CancelledError:
            if self.transport is None or self.transport.is_closing():
                raise
            given_up: SwarmError = PeerBusy(f"This peer gave up {method[:80]!r}.")
            if self._expired:
                given_up = DeadlineExceeded(f"{method[:80]!r} was not done within its deadline.")
            frame = context.frame(FAILURE, pack_error(given_up, self.peer))
        except Exception as error:
            _log.debug("%s failed for peer %s", method[:80], self.peer, exc_info=True)
            frame = context.frame(FAILURE, pack_error(error, self.peer))
        self._context.sent[self._answerer.known(method)] += sum(map(len, frame))
        self._done()
        self.send(frame)

    def _expire(self) -> None:
        if self._task is not None:
            self._expired = True
            self._task.cancel()

    def _done(self) -> None:
        self._task = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def on_refused(self, error: SwarmError) -> None:
        if self._trusted and self._task is None and self.transport is not None:
            self.send(self._context.frame(FAILURE, pack_error(error, self.peer)))
            self.transport.close()
        else:
            self.abort()

    def on_lost(self, error: Exception | None) -> None:
        if self not in self._answerer.streams:
            return
        self._answerer.streams.discard(self)
        if self.peer:
            self._answerer.streams_of[self.peer] -= 1
            if not self._answerer.streams_of[self.peer]:
                del self._answerer.streams_of[self.peer]
        if isinstance(error, ProtocolError):
            self._answerer.refused += 1
            _log.debug("Refused a request of peer %s: %s", self.peer, error)
        task = self._task
        self._done()
        if task is not None:
            task.cancel()

    def check_progress(self) -> None:
        """Ends a stream whose half-sent frame or unread reply has not moved since the last time this was called."""
        if self.progress == self._last_progress and self._task is None and not self.is_clean:
            self.abort()
        self._last_progress = self.progress


class _AnsweringNeighbour(_Answering):
    """A stream that came by the shortcut: it begins with a ticket."""

    def on_hello(self, hello: bytes) -> None:
        self._is_from(self._answerer.tickets.peer(hello))


class Answerer:
    """Answers the calls of other peers.

    Args:
        context: The node's.

    Attributes:
        handlers: By method; may be added to at any time.
        refused: How many streams were ended because what came was not a valid request.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.handlers: dict[str, Handler] = {}
        self.streams: set[_Answering] = set()
        self.streams_of: Counter[str] = Counter()
        self.refused = 0
        self.tickets = Tickets("")
        self._servers: list[asyncio.AbstractServer] = []

    def known(self, method: str) -> str:
        """The method, or ``""`` for one that is not answered: counters must not grow with what strangers invent."""
        return method if method in self.handlers else ""

    def handler(self, method: str) -> Handler:
        """Who answers a method; raises `CallerError` when nobody does."""
        try:
            return self.handlers[method]
        except KeyError:
            known = ", ".join(sorted(name for name in self.handlers if not name.startswith("_")))
            raise CallerError(f"This peer does not answer {method[:80]!r}; it answers: {known}.") from None

    async def answer_self(
        self, method: str, header: dict, tensors: Sequence[Tensor], deadline_s: float
    ) -> tuple[dict, list[Tensor]]:
        """A peer's call to itself: as from another, but without the network, which cannot do it."""
        peer = self.context.peer_id
        copied = unpack_header(msgpack.packb(header))
        try:
            answer = self.handler(method)(peer, copied, [tensor.detach().cpu().clone() for tensor in tensors])
            reply, results = await asyncio.wait_for(answer, deadline_s)
        except asyncio.TimeoutError as error:
            raise DeadlineExceeded(
                f"Peer {peer} did not answer {method!r} within {deadline_s:.3g} s.",
                peer,
            ) from error
        except Exception as error:
            raise unpack_error(pack_error(error, peer), peer) from error
        return unpack_header(msgpack.packb(reply)), [tensor.detach().cpu().clone() for tensor in results]

    async def start(self, path: str, shortcut_path: str | None) -> None:
        """Listens on a unix socket at ``path`` and asks ``p2pd`` to hand the run's streams to it.

        Args:
            path: Of the socket.
            shortcut_path: Where to listen for peers of this machine that come by the shortcut.
        """
        if shortcut_path is not None:
            self.tickets = Tickets(shortcut_path)
            self.handlers[METHOD] = self._show_shortcut
            await self._listen(shortcut_path, _AnsweringNeighbour)
        await self._listen(path, _Answering)
        reader, writer = await asyncio.open_unix_connection(self.context.control_path)
        registration = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{path}").to_bytes(),
            proto=[self.context.protocol],
            balanced=False,
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=registration)
        writer.write(length_prefixed(request.SerializeToString()))
        size = (await reader.readexactly(1))[0]
        response = p2pd_pb2.Response()
        response.ParseFromString(await reader.readexactly(size))
        writer.close()
        if response.type != p2pd_pb2.Response.OK:
            raise RuntimeError(f"p2pd refused to register {self.context.protocol}: {response.error.msg}")

    async def _listen(self, path: str, kind: type[_Answering]) -> None:
        server = await asyncio.get_running_loop().create_unix_server(lambda: kind(self), path)
        self._servers.append(server)
        let_go_in_children(server, server.sockets[0].fileno())

    async def _show_shortcut(
        self, caller: str, header: dict[str, Any], tensors: list[Tensor]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        return self.tickets.answer(caller, header), []

    def sweep(self) -> None:
        """To be called every `Limits.stall_s`: ends the streams that do not move."""
        for stream in list(self.streams):
            stream.check_progress()

    def close(self) -> None:
        """Stops listening and ends every stream, which cancels the handlers."""
        for server in self._servers:
            forget(server)
            server.close()
        for stream in list(self.streams):
            stream.abort()
