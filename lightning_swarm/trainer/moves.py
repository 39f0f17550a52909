"""Moves of workers from one stage to another.

1. *Prepare*: the worker is told the new stage and who has its state. From then on it is a member of both stages'
   reductions, but contributes to those of its old stage only, which it goes on serving. This happens under the boundary
   lock, so it misses no commit of the new stage.
2. *Prepared*: it has downloaded the state (from the next donor if one dies) and tells so. If nobody could give it the
   state the move is called off.
3. *Switch*: after a commit, when it has nothing under way, the worker leaves the old stage. It builds the new one from
   what it holds and is admitted like one that joins.

The old stage has the worker until the switch; between the switch and the admission neither has, for as long as it takes
to build a stage and to apply the commits that came after the donor's capture.

A worker that dies on the way is given up like any other: until the switch what it has accumulated belongs to the old
stage, after it it has accumulated nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from lightning_swarm.policies.rebalancing import Move
from lightning_swarm.swarm.calls import Assignment, MoveRequest, PreparedRequest
from lightning_swarm.swarm.errors import PeerStale, SwarmError
from lightning_swarm.swarm.node import Node
from lightning_swarm.trainer.pipeline import Pipeline
from lightning_swarm.trainer.roster import Roster, Worker

log = logging.getLogger(__name__)

_CALL_DEADLINE_S = 5.0


class Moves:
    """Carries moves out, under one plan.

    Args:
        node: The trainer's peer.
        roster: Who serves what.
        pipeline: Gives workers up.
        boundary: Held while the members of the reductions must not change.
        assignment: What a worker of a stage, with so many bytes of memory, has to know; ``None`` while nobody has the
            stage's state.
    """

    def __init__(
        self,
        node: Node,
        roster: Roster,
        pipeline: Pipeline,
        boundary: asyncio.Lock,
        assignment: Callable[[int, int], Assignment | None],
    ) -> None:
        self._node = node
        self.roster = roster
        self._pipeline = pipeline
        self._boundary = boundary
        self._assignment = assignment
        self._began_s: dict[str, float] = {}

    def allowed(self, worker: Worker) -> frozenset[int] | None:
        """The stages that a worker's memory can hold; ``None``: all.

        What is prepared lies in the host's memory: a worker that computes there needs room for both stages.
        """
        if not worker.memory_bytes:
            return None
        taken = self.roster.state_bytes(worker.stage) if worker.device.startswith("cpu") else 0
        fitting = (s for s in range(self.roster.stages) if taken + self.roster.state_bytes(s) <= worker.memory_bytes)
        return frozenset(fitting) | {worker.stage}

    async def order(self, move: Move) -> bool:
        """Begin a move.

        Returns:
            Whether the worker prepares for it, or all workers are spread anew because nobody is at the new stage. The
            worker may have left, or be the last of its stage by now.
        """
        async with self._boundary:
            worker = self.roster.workers.get(move.peer)
            if worker is None or not worker.ready or worker.leaving or worker.stages != (move.source,):
                return False
            if not self._dispensable(worker):
                return False
            allowed = self.allowed(worker)
            if allowed is not None and move.target not in allowed:
                return False
            if not self.roster.at_stage(move.target, ready=False):
                # Nothing gets through the pipeline, so there will be no next step to switch at.
                self.roster.abandon(move.target)
                return True
            assignment = self._assignment(move.target, worker.memory_bytes)
            if assignment is None:
                return False
            request = MoveRequest(
                assignment.session,
                assignment.plan_version,
                move.target,
                "prepare",
                assignment.step,
                assignment.to_dict(),
            )
            try:
                await self._node.call(worker.peer, "move", request.to_dict(), deadline_s=_CALL_DEADLINE_S)
            except SwarmError as error:
                log.info("Worker %s cannot prepare for stage %d: %s", worker.peer[-6:], move.target, error)
                return False
            worker.moving_to, worker.prepared = move.target, False
            self._began_s[worker.peer] = time.monotonic()
        return True

    def relieve(self) -> None:
        """Do not let the pipeline wait for those who prepare for a stage that has lost its last worker meanwhile."""
        for worker in self.roster.workers.values():
            if worker.moving_to is not None and not self.roster.at_stage(worker.moving_to, ready=False):
                self.roster.abandon(worker.moving_to)

    def prepared(self, caller: str, request: PreparedRequest) -> None:
        """A worker holds the state of the stage that it is to move to, or could not get it.

        Raises:
            PeerStale: It is not to move there.
        """
        worker = self.roster.workers.get(caller)
        if worker is None or worker.moving_to != request.stage:
            raise PeerStale(f"this worker is not to move to stage {request.stage}")
        if request.problem:
            self._call_off(worker, request.problem)
        else:
            worker.prepared = True
            self.roster.downloaded(time.monotonic() - self._began_s.pop(caller, time.monotonic()))

    async def switch(self, session: int, plan_version: int, step: int) -> None:
        """Let those switch that are prepared; to be called after each commit, before anything of the next step."""
        if not any(worker.prepared and worker.moving_to is not None for worker in self.roster.workers.values()):
            return
        async with self._boundary:
            switching: list[Worker] = []
            for worker in list(self.roster.workers.values()):
                if worker.prepared and worker.moving_to is not None:
                    if self._dispensable(worker, switching):
                        switching.append(worker)
                    else:
                        self._call_off(worker, f"it is the last one of stage {worker.stage}")
            await asyncio.gather(*(self._switch(worker, session, plan_version, step) for worker in switching))

    async def _switch(self, worker: Worker, session: int, plan_version: int, step: int) -> None:
        assert worker.moving_to is not None
        request = MoveRequest(session, plan_version, worker.moving_to, "switch", step)
        try:
            await self._node.call(worker.peer, "move", request.to_dict(), deadline_s=_CALL_DEADLINE_S)
        except PeerStale as error:
            self._call_off(worker, str(error))
        except SwarmError as error:
            # It may have switched or not, so nobody can count on it: it will find out and join again.
            log.warning("Worker %s failed in its move: %s", worker.peer[-6:], error)
            self._pipeline.lose(worker.peer)
        else:
            log.info("Worker %s moves from stage %d to %d", worker.peer[-6:], worker.stage, worker.moving_to)
            self.roster.move(worker.peer)

    def _call_off(self, worker: Worker, why: str) -> None:
        log.warning("Worker %s stays at stage %d: %s", worker.peer[-6:], worker.stage, why)
        worker.moving_to, worker.prepared = None, False
        self.roster.counters["moves called off"] += 1

    def _dispensable(self, worker: Worker, also: list[Worker] | None = None) -> bool:
        """Whether somebody stays at the worker's stage when it leaves (and ``also`` those)."""
        others = [w for w in self.roster.at_stage(worker.stage) if w is not worker and not w.leaving]
        return any(other.moving_to is None if also is None else other not in also for other in others)
