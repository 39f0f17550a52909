"""The calling side: a pool of kept-alive streams to each peer."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_swarm.swarm.codec import CODECS
from lightning_swarm.swarm.errors import CallerError, DeadlineExceeded, NodeClosed, unpack_error
from lightning_swarm.swarm.frames import FAILURE, REQUEST
from lightning_swarm.swarm.opening import CallingStream, Opener
from lightning_swarm.swarm.rpc import Context


class Caller:
    """Calls other peers, over a pool of kept-alive streams a peer.

    Args:
        context: The node's.
        shortcuts: Whether to leave libp2p out on the way to peers of the same machine.
        idle_streams: How many idle streams to a peer are kept.
    """

    def __init__(self, context: Context, shortcuts: bool, idle_streams: int = 32) -> None:
        self._context = context
        self._opener = Opener(context, shortcuts)
        self._idle_streams = idle_streams
        self._idle: dict[str, list[CallingStream]] = defaultdict(list)
        self._busy: set[CallingStream] = set()
        self._closed = False

    async def call(
        self,
        peer: str,
        method: str,
        header: dict[str, Any],
        tensors: Sequence[Tensor],
        deadline_s: float,
        codec: str,
    ) -> tuple[dict[str, Any], list[Tensor]]:
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
                stream = await self._opener.open(peer, until - loop.time())
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
        context.sent[method] += sum(map(len, frame))
        context.received[method] += stream.bytes_in
        stream.bytes_in = 0
        self._give_back(stream)
        if prefix.kind == FAILURE:
            raise unpack_error(reply, peer)
        return reply[0], await context.decode(slots)

    @staticmethod
    def _expire(stream: CallingStream, method: str, deadline_s: float) -> None:
        message = f"Peer {stream.peer} did not answer {method!r} within {deadline_s:.3g} s."
        stream.settle(error=DeadlineExceeded(message, stream.peer))

    def _take(self, peer: str) -> CallingStream | None:
        idle = self._idle.get(peer)
        while idle:
            stream = idle.pop()
            if stream.lost is None:
                return stream
        return None

    def _give_back(self, stream: CallingStream) -> None:
        idle = self._idle[stream.peer]
        if self._closed or not stream.is_clean or len(idle) >= self._idle_streams:
            stream.abort()
        else:
            stream.used = True
            idle.append(stream)

    def silent_s(self, peer: str) -> float:
        """For how long nothing has come from a peer that owes us an answer; infinite if it owes none."""
        heard_s = max((stream.heard_s for stream in self._busy if stream.peer == peer), default=-math.inf)
        return time.monotonic() - heard_s

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
                self._opener.forget(peer)

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
