"""A worker's place in the swarm: from the first Lightning call of its script to the end of the trainer's."""

import asyncio
import concurrent.futures
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_swarm.swarm.calls import FinishRequest, NextRequest, WorkerRecord
from lightning_swarm.swarm.errors import SwarmError
from lightning_swarm.swarm.finding import announced_trainer, told_trainer
from lightning_swarm.swarm.loop import result_of
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.rpc import Handler
from lightning_swarm.swarm.switchboard import Reply, Switchboard
from lightning_swarm.worker.member import Hosted, Member, TrainerGone
from lightning_swarm.worker.service import WorkerService

log = logging.getLogger(__name__)

_CALLS = ["trainer", "process", "fetch", "probe", "reduce", "commit", "state", "log", "hold", "move", "finish", "stats"]
_NEXT_DEADLINE_S = 30.0
_ANNOUNCE_EVERY_S = 10.0
_LOOK_FOR_NOTICE_EVERY_S = 1.0
ANNOUNCED_FOR_S = 3 * _ANNOUNCE_EVERY_S

Around = Callable[["WorkerPeer", str, str, dict[str, Any], list[Tensor], Handler], Awaitable[Reply]]
"""As :data:`~lightning_swarm.swarm.switchboard.Interceptor`, told whose call it is."""


class WorkerPeer:
    """A worker's node and its sessions.

    Args:
        node: The peer.
        initial_peers: Addresses of peers to ask who the trainer is, besides the DHT.
        trainer_timeout_s: How long to wait for a trainer that does not answer.
        around: Stands between every call and its handler; for injected faults.
        notice: A file that appears when this machine is about to be taken back.
    """

    def __init__(
        self,
        node: Node,
        initial_peers: Sequence[str],
        trainer_timeout_s: float,
        around: Around | None = None,
        notice: Path | None = None,
    ) -> None:
        self.node = node
        self._initial_peers = list(initial_peers)
        self.count = -1
        """The current session's number."""
        self._trainer_timeout_s = trainer_timeout_s
        self._notice = notice
        self._switchboard = Switchboard(
            node, _CALLS, {"trainer": self._tell_trainer}, None if around is None else partial(around, self)
        )
        self._trainer: str | None = None
        self._member: Member | None = None
        self._leaving = False
        self._waiting: concurrent.futures.Future[bool] | None = None

    @property
    def trainer(self) -> str | None:
        """The trainer's peer id, once it is known."""
        return self._member.trainer if self._member is not None else self._trainer

    @property
    def service(self) -> WorkerService | None:
        """What answers the calls of the current session."""
        return self._member.service if self._member is not None else None

    def serve(self, hosted: Hosted) -> FinishRequest:
        """Serve one session on the calling thread.

        Raises:
            TrainerGone: There is no trainer.
            MisconfigurationException: The trainer refuses this worker.
            NodeClosed: The node is of no use any more.
        """
        self._trainer = self.node.run(self.node.while_alive(self._find_trainer()))
        hosted = replace(hosted, request=replace(hosted.request, session=self.count))
        self._member = Member(
            self.node, self._switchboard, hosted, self._trainer, self._find_another, self._trainer_timeout_s
        )
        beside = [
            self.node.spawn(self._announce(self._member, hosted), "announcing this worker"),
            self.node.spawn(self._heed_notice(self._member), "heeding the spot notice"),
        ]
        try:
            return self._member.serve()
        finally:
            for task in beside:
                task.cancel()
            self._trainer, self._member = self._member.trainer, None

    async def _announce(self, member: Member, hosted: Hosted) -> None:
        """Tell the DHT who we are, until we sign off."""
        try:
            while True:
                server = member.service.server
                compute_s = server.forward_s + server.backward_s if server is not None else 0.0
                record = WorkerRecord(
                    session=self.count,
                    stage=server.index if server is not None else -1,
                    step=(server.version or 0) if server is not None else 0,
                    device=hosted.request.device,
                    microbatches_per_s=server.processed / compute_s if server is not None and compute_s else 0.0,
                    memory_bytes=hosted.request.memory_bytes,
                    addresses=tuple(self.node.maddrs),
                    versions=hosted.request.versions,
                )
                await self.node.directory.announce("worker", record, ANNOUNCED_FOR_S)
                await asyncio.sleep(_ANNOUNCE_EVERY_S)
        finally:
            await self.node.directory.withdraw("worker")

    async def _heed_notice(self, member: Member) -> None:
        """Say that this worker will leave, again and again, as there may be another trainer, or another stage."""
        while True:
            if self._notice is not None and self._notice.exists():
                await member.leave_soon()
            await asyncio.sleep(_LOOK_FOR_NOTICE_EVERY_S)

    def drain(self) -> bool:
        """Leave the swarm at once: the trainer gives what is under way to others. Safe in a signal handler.

        Returns:
            Whether there is anything to leave; if not, the process may end.
        """
        self._leaving = True
        if self._member is not None:
            self._member.drain()
        if self._waiting is not None:
            self._waiting.cancel()
        return self._member is not None or self._waiting is not None

    def await_next(self) -> bool:
        """Wait until the trainer's script calls Lightning again.

        Returns:
            Whether it did; otherwise its script has ended, or this worker leaves.

        Raises:
            NodeClosed: The node is of no use any more.
        """
        if self._trainer is None or self._leaving:
            return False
        self._waiting = self.node.spawn(self.node.while_alive(self._next(self._trainer)), "waiting for the next call")
        try:
            return result_of(self._waiting)
        except concurrent.futures.CancelledError:
            return False
        finally:
            self._waiting = None

    async def _next(self, trainer: str) -> bool:
        while True:
            try:
                request = NextRequest(self.count).to_dict()
                answer, _ = await self.node.call(trainer, "next", request, deadline_s=_NEXT_DEADLINE_S)
            except SwarmError as error:
                log.info("The trainer is gone: %s", error)
                return False
            if answer["ended"]:
                return False
            if answer["session"] > self.count:
                return True

    async def _tell_trainer(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Any:
        return {"trainer": self.trainer}, []

    async def _find_another(self, trainer: str) -> str | None:
        """The DHT knows of a trainer that was started again; where it does not reach, other peers do."""
        for found in (await announced_trainer(self.node), await told_trainer(self.node, self._initial_peers)):
            if found not in (None, trainer):
                return found
        return None

    async def _find_trainer(self) -> str:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._trainer_timeout_s
        while loop.time() < deadline:
            # The initial peers are quicker than the DHT, which is for when these are gone.
            found = await told_trainer(self.node, self._initial_peers) or await announced_trainer(self.node)
            if found is not None:
                return found
            await asyncio.sleep(0.3)
        raise TrainerGone(
            f"No trainer of run {self.node.run_id!r} was found within {self._trainer_timeout_s:.0f} s "
            f"(trainer_timeout). Start "
            "the script on the trainer's machine first, and give its address as initial_peers."
        )
