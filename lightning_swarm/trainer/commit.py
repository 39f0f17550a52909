"""The end of a step, in two phases: nobody steps unless all do.

1. *Reduce*: every worker gets the microbatches that the ledger gives it, agrees or is given up, and sums its
   gradients with the group. If anyone fails, what it held is repeated by others and the reduction starts again under
   the next attempt number. Nothing is applied meanwhile.
2. *Commit*: the global norm is known now; every worker applies the same sum with the same hyperparameters and scale.
   A worker that misses the commit is stale and is given up.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lightning_swarm.policies.banning import Cause
from lightning_swarm.slicing.plan import Plan
from lightning_swarm.swarm.calls import CommitRequest, Group, GroupMember, ReduceReply, ReduceRequest
from lightning_swarm.swarm.errors import CallerError, NodeClosed, RemoteError, SourceFailed, SwarmError
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.tree import encode_tree
from lightning_swarm.trainer.pipeline import Pipeline
from lightning_swarm.trainer.roster import Roster, Worker

log = logging.getLogger(__name__)

_REDUCE_DEADLINE_S = 120.0
_MOST_ATTEMPTS = 20


@dataclass(frozen=True)
class Clipping:
    """How Lightning was told to clip gradients; ``None``: not at all."""

    norm: float | None = None
    value: float | None = None


class StepEnd:
    """Ends the steps of a session.

    Args:
        node: The trainer's peer.
        roster: Who serves what.
        pipeline: Repeats what is lost.
        plan: Which parameters each stage holds.
        session: The session's number.
    """

    def __init__(self, node: Node, roster: Roster, pipeline: Pipeline, plan: Plan, session: int) -> None:
        self._node = node
        self._roster = roster
        self._pipeline = pipeline
        self._plan = plan
        self._session = session

    async def finish(
        self,
        step: int,
        hyperparameters: list[dict[str, Any]],
        clipping: Clipping,
        boundary: asyncio.Lock,
        committed: Callable[[], None],
    ) -> None:
        """Reduce and commit one step.

        Args:
            step: Its number.
            hyperparameters: Of each parameter group, as the trainer's optimizer and schedulers have them now.
            clipping: How to clip.
            boundary: Held while the group is fixed: nobody joins between a reduction and its commit.
            committed: Called before the boundary is free again.

        Raises:
            SwarmError: The reduction failed again and again.
        """
        for attempt in range(_MOST_ATTEMPTS):
            await self._pipeline.repair()
            async with boundary:
                if not self._pipeline.complete:
                    continue  # Somebody left while we waited for the boundary.
                if await self._try(step, attempt, hyperparameters, clipping):
                    self._pipeline.forget()
                    committed()
                    return
        raise SwarmError(f"Step {step} could not be reduced in {_MOST_ATTEMPTS} attempts.")

    async def _try(self, step: int, attempt: int, hyperparameters: list[dict[str, Any]], clipping: Clipping) -> bool:
        workers = list(self._roster.workers.values())
        groups = self._groups(workers)
        replies = await asyncio.gather(
            *(self._reduce_one(worker, step, attempt, groups) for worker in workers), return_exceptions=True
        )
        good: dict[str, ReduceReply] = {}
        bad: dict[str, SwarmError] = {}
        for worker, reply in zip(workers, replies):
            if isinstance(reply, ReduceReply):
                good[worker.peer] = reply
            elif not isinstance(reply, SwarmError) or isinstance(reply, (RemoteError, CallerError, NodeClosed)):
                raise reply
            else:
                bad[worker.peer] = reply
        if bad:
            for peer, error in _culprits(bad, {worker.peer for worker in workers}).items():
                self._blame(peer, error)
            return False
        squared = {name: value for reply in good.values() for name, value in reply.squared_norms.items()}
        norm = math.sqrt(sum(squared.values()))
        scale = 1.0
        if clipping.norm is not None:
            # As torch.nn.utils.clip_grad_norm_, whose coefficient is clamped to 1 (and stays nan for a nan norm).
            coefficient = clipping.norm / (norm + 1e-6)
            scale = coefficient if not coefficient >= 1.0 else 1.0
        request = CommitRequest(
            session=self._session,
            step=step,
            attempt=attempt,
            hyperparameters=tuple(encode_tree(group)[0] for group in hyperparameters),
            scale=scale,
            clip_value=clipping.value,
            absent=self._absent_everywhere(groups, good),
        )
        await self._commit(workers, request)
        return True

    async def _reduce_one(self, worker: Worker, step: int, attempt: int, groups: list[Group]) -> ReduceReply:
        mine = tuple(group for group in groups if any(member.peer == worker.peer for member in group.members))
        expected = tuple(sorted(self._pipeline.ledger.held_by(worker.peer)))
        request = ReduceRequest(self._session, step, attempt, mine, expected, _REDUCE_DEADLINE_S)
        header, _ = await self._node.call(worker.peer, "reduce", request.to_dict(), deadline_s=2 * _REDUCE_DEADLINE_S)
        return ReduceReply.from_dict(header)

    def _blame(self, culprit: str, error: SwarmError) -> None:
        known = self._roster.workers.get(culprit)
        if known is None:
            return
        log.warning("Worker %s of stage %d failed in reduce: %s", culprit[-6:], known.stage, error)
        if known.ready:
            self._roster.failed(culprit, known.stage, Cause.RESET, str(error))
        self._pipeline.lose(culprit)

    def _groups(self, workers: list[Worker]) -> list[Group]:
        """One group a stage for its own parameters, one for each set of stages that share parameters."""
        contributors = self._pipeline.ledger.contributors()
        by_stages: dict[tuple[int, ...], list[str]] = {}
        for stage in self._plan.stages:
            for name in stage.parameters:
                holders = tuple(self._plan.shared.get(name, (stage.index,)))
                if holders[0] == stage.index:
                    by_stages.setdefault(holders, []).append(name)
        groups = []
        for holders, names in by_stages.items():
            members = self._members(holders, workers, contributors)
            groups.append(Group("stage" + "+".join(map(str, holders)), tuple(names), members))
        training = self._plan.signatures.get("training_step")
        for index, written in enumerate(training.written if training is not None else ()):
            if written:
                groups.append(Group(f"buffers{index}", (), self._members((index,), workers, contributors)))
        return groups

    @staticmethod
    def _members(
        stages: tuple[int, ...], workers: list[Worker], contributors: dict[int, set[str]]
    ) -> tuple[GroupMember, ...]:
        return tuple(
            GroupMember(worker.peer, 1.0, worker.peer in contributors.get(stage, ()))
            for stage in stages
            for worker in sorted(workers, key=lambda w: w.peer)
            if worker.stage == stage
        )

    @staticmethod
    def _absent_everywhere(groups: list[Group], replies: dict[str, ReduceReply]) -> tuple[str, ...]:
        """Parameters for which no worker that holds them has a gradient."""
        absent_at = {peer: frozenset(reply.absent) for peer, reply in replies.items()}
        return tuple(
            name
            for group in groups
            for name in group.parameters
            if all(name in absent_at[member.peer] for member in group.members)
        )

    async def _commit(self, workers: list[Worker], request: CommitRequest) -> None:
        async def commit(worker: Worker) -> None:
            try:
                await self._node.call(worker.peer, "commit", request.to_dict(), deadline_s=_REDUCE_DEADLINE_S)
            except (RemoteError, CallerError, NodeClosed):
                raise
            except SwarmError as error:
                log.warning("Worker %s of stage %d missed a commit: %s", worker.peer[-6:], worker.stage, error)
                if worker.ready:
                    self._roster.failed(worker.peer, worker.stage, Cause.RESET, str(error))
                self._roster.remove(worker.peer)

        await asyncio.gather(*(commit(worker) for worker in workers))


def _culprits(errors: dict[str, SwarmError], members: Collection[str]) -> dict[str, SwarmError]:
    """Those who made a reduction fail, out of what the members say.

    Whoever did not answer the trainer, or could not take part, is to blame, and complaints about others follow from
    that. If all answer and complain, the one that most complain about goes.
    """
    direct = {peer: error for peer, error in errors.items() if not isinstance(error, SourceFailed)}
    if direct:
        return direct
    accused: dict[str, list[SwarmError]] = {}
    for peer, error in errors.items():
        accused.setdefault(error.peer if error.peer in members else peer, []).append(error)  # type: ignore[arg-type]
    culprit = max(sorted(accused), key=lambda peer: len(accused[peer]))
    return {culprit: accused[culprit][0]}
