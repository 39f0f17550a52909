"""The calls of a node that lives longer than what answers them.

A node serves its calls once; a session (one ``trainer.fit``) plugs in and unplugs. A call that comes while nobody is
plugged in is answered with :class:`~lightning_swarm.swarm.errors.PeerBusy`, which is nobody's fault.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_swarm.swarm.errors import PeerBusy
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.rpc import Handler

Reply = tuple[dict[str, Any], Sequence[Tensor]]

Interceptor = Callable[[str, str, dict[str, Any], list[Tensor], Handler], Awaitable[Reply]]
"""``async (call, caller's peer id, header, tensors, handler) -> (header, tensors)``: stands between a call and who
answers it."""


class Switchboard:
    """Connects the calls of a node with whoever answers them now.

    Args:
        node: The peer.
        calls: The names of all calls that will ever be answered.
        always: Who answers a call while nobody else is plugged in for it.
        around: Gets every call with its handler, to answer it in the handler's place; for injected faults.
    """

    def __init__(
        self,
        node: Node,
        calls: Sequence[str],
        always: Mapping[str, Handler] | None = None,
        around: Interceptor | None = None,
    ) -> None:
        self._always = dict(always or {})
        self._around = around
        self._handlers: Mapping[str, Handler] = {}
        node.serve({call: partial(self._answer, call) for call in calls})

    def plug(self, handlers: Mapping[str, Handler]) -> None:
        """From now on these answer."""
        self._handlers = handlers

    def unplug(self) -> None:
        """Nobody answers any more."""
        self._handlers = {}

    async def _answer(self, call: str, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        handler = self._handlers.get(call) or self._always.get(call)
        if handler is None:
            raise PeerBusy(f"nobody answers {call!r} at this peer now")
        if self._around is not None:
            return await self._around(call, caller, header, tensors, handler)
        return await handler(caller, header, tensors)
