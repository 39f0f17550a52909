"""The trainer's place in the swarm: from the first Lightning call of a script to its end.

Between two sessions (``fit``, then ``test``) the workers wait here: their scripts return from the first call when the
second begins, and end when the trainer's script does.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from torch import Tensor

from lightning_swarm.swarm.calls import JoinReply, NextRequest, TrainerRecord, WorkerRecord
from lightning_swarm.swarm.errors import PeerBusy, SwarmError
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.switchboard import Switchboard
from lightning_swarm.trainer.recovery import Recovery
from lightning_swarm.trainer.session import Session

T = TypeVar("T")

_ANNOUNCE_EVERY_S = 10.0
ANNOUNCED_FOR_S = 3 * _ANNOUNCE_EVERY_S
_WAIT_S = 5.0

Reply = tuple[dict[str, Any], Sequence[Tensor]]


class TrainerPeer:
    """The trainer's node and the run's sessions.

    Args:
        node: The peer.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.session: Session | None = None
        self.count = -1
        """The current session's number."""
        self._over = -1  # The last session that has ended; the one after it may have been called but not opened yet.
        self._ended = False
        self._callers: set[str] = set()
        """Workers that have asked for work before there was any."""
        self.spares_holders = False
        """Whether workers are to go on holding a run when this trainer ends: it has not taken it up yet, or is to be
        started again.
        """
        self._speaking: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[dict[str, Any]] | None = None
        self._record = TrainerRecord(time.time())
        self._changed = asyncio.Event()
        calls = ["trainer", "join", "ready", "prepared", "leave", "ping", "state", "log", "fetch", "next", "report"]
        self._switchboard = Switchboard(node, calls)
        self._plug()
        node.run(node.directory.announce("trainer", self._record, ANNOUNCED_FOR_S))
        node.spawn(self._announce(), "announcing the trainer")
        node.spawn(self._watch(), "watching the workers' announcements")

    async def _announce(self) -> None:
        while True:
            await asyncio.sleep(_ANNOUNCE_EVERY_S)
            await self.node.directory.announce("trainer", self._record, ANNOUNCED_FOR_S)

    async def _watch(self) -> None:
        """Keep the session informed of who is in the DHT; what is malformed there is counted and ignored."""
        async for records in self.node.directory.watch("worker", WorkerRecord, _ANNOUNCE_EVERY_S):
            if self.session is not None:
                self.session.announced(records, self.node.directory.ignored["worker"])

    def _plug(self) -> None:
        handlers: dict[str, Callable[..., Any]] = {
            "trainer": self._who,
            "join": self._wait,
            "ping": self._alive,
            "next": self._next,
            "report": self._report,
        }
        if self.session is not None:
            handlers.update(self.session.handlers())
        self._switchboard.plug(handlers)

    async def _wait(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """``join`` while no session is open."""
        self._callers.add(caller)
        if self._ended:
            return JoinReply("end").to_dict(), []
        if self._is_over(header):
            return JoinReply("skip").to_dict(), []
        await self._change(_WAIT_S)
        return JoinReply("wait").to_dict(), []

    async def _who(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        return {"trainer": self.node.peer_id}, []

    async def _alive(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """``ping`` while no session is open. A worker that has not heard the end of its own learns it by a ``join``."""
        return {"member": not self._is_over(header), "session": self.count}, []

    def _is_over(self, header: dict[str, Any]) -> bool:
        """Whether the session that a worker speaks of has ended."""
        session = header.get("session", 0)
        return isinstance(session, int) and session <= self._over

    async def _report(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """Somebody looks at the swarm (``lightning-swarm status``)."""
        if self.session is None:
            raise PeerBusy("the trainer is between two calls of Lightning's")
        if self._reporting is None or self._reporting.done():
            # It asks every worker, so however many look at once see the same one.
            self._reporting = asyncio.create_task(self.session.report(), name="report")
        return await asyncio.shield(self._reporting), []

    async def _next(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """A worker whose session is over asks whether another one has begun."""
        request = NextRequest.from_dict(header)
        if request.after >= self.count and not self._ended:
            await self._change(_WAIT_S)
        return {"session": self.count, "ended": self._ended}, []

    async def _change(self, at_most_s: float) -> None:
        changed = self._changed
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), at_most_s)

    def recovery(self, wait_s: float) -> Recovery:
        """Asks workers what they hold of the run."""
        return Recovery(self.node, lambda: frozenset(self._callers), wait_s)

    def open(self, make: Callable[[], Session]) -> Session:
        """Begin a session; from any thread but the loop's."""

        async def begin() -> Session:
            self.session, self.spares_holders = make(), False
            self._plug()
            self._speaking = asyncio.create_task(self.session.speak(), name="a log line a minute")
            self._notify()
            return self.session

        return self.node.run(begin())

    def announce_session(self) -> None:
        """The script has called Lightning again: waiting workers return from their last call."""

        async def begin() -> None:
            self.count += 1
            self._notify()

        self.node.run(begin())

    def shut(self, failed: bool, outcome: Any) -> None:
        """End the session: its workers return too."""
        session, self.session = self.session, None
        if self.spares_holders:
            return

        async def end() -> None:
            if self._speaking is not None:
                self._speaking.cancel()
            self._over = self.count
            if session is not None:
                await session.finish(failed, outcome)
            self._plug()

        self.node.run(end())

    def end(self) -> None:
        """The script is over: workers exit."""
        self._ended = not self.spares_holders

        async def tell() -> None:
            self._notify()
            await self.node.directory.withdraw("trainer")
            await asyncio.sleep(0.1)

        with contextlib.suppress(SwarmError):
            self.node.run(tell(), timeout_s=3.0)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the node's loop; Ctrl-C interrupts."""
        return self.node.run(coroutine)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
