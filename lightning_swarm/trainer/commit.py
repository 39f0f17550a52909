"""The end of a step, in two phases: nobody steps unless all do.

1. *Reduce*: every worker gets the microbatches that the ledger gives it, agrees or is given up, and sums its
   gradients with the group. If anyone fails, what it held is repeated by others and the reduction starts again under
   the next attempt number. Nothing is applied meanwhile. Stages whose microbatches are all accumulated begin while the
   stages in front of them are in their backward passes still; what they have summed counts as long as nobody of the
   group comes, goes or gets another microbatch.
2. *Commit*: the global norm is known now; every worker applies the same sum with the same hyperparameters and scale.
   A worker that misses the commit is stale and is given up.

Nobody waits for a worker that is silent because it hangs: while calls are out, the silent ones are asked what they do.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_swarm.policies.banning import Cause
from lightning_swarm.slicing.plan import Plan
from lightning_swarm.swarm.calls import (
    CommitRequest,
    Group,
    GroupMember,
    ProbeRequest,
    ReduceReply,
    ReduceRequest,
    buffers_group,
)
from lightning_swarm.swarm.errors import (
    CallerError,
    DeadlineExceeded,
    NodeClosed,
    NotFinite,
    PeerBusy,
    ProtocolError,
    RemoteError,
    SourceFailed,
    SwarmError,
)
from lightning_swarm.swarm.loop import unheard
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.tree import encode_tree
from lightning_swarm.trainer.pipeline import Pipeline, busy_pause_s, check_links, probe
from lightning_swarm.trainer.position import StepRecord
from lightning_swarm.trainer.roster import Roster, Worker

log = logging.getLogger(__name__)

_CALL_DEADLINE_S = 3600.0
_ASK_AFTER_S = 2.0
_MOST_ATTEMPTS = 20
_MOST_REFUSALS = 50
_CAUSES = {
    DeadlineExceeded.__name__: Cause.TIMEOUT,
    PeerBusy.__name__: Cause.BUSY,
    ProtocolError.__name__: Cause.PROTOCOL,
    RemoteError.__name__: Cause.FAILED,
}


@dataclass(frozen=True)
class Clipping:
    """How Lightning was told to clip gradients; ``None``: not at all."""

    norm: float | None = None
    value: float | None = None


@dataclass(frozen=True)
class _Reduced:
    """A group whose members hold the sum of exactly these microbatches."""

    group: Group
    held: dict[str, frozenset[str]]
    """By member."""
    attempt: int
    squared_norm: float
    absent: frozenset[str]
    """Parameters for which no member has a gradient."""


@dataclass
class _Step:
    """What has been reduced of the step under way."""

    number: int
    attempts: int = 0
    reduced: dict[str, _Reduced] = field(default_factory=dict)
    """By group."""
    early: set[asyncio.Task[bool]] = field(default_factory=set)
    doubted: bool = False
    """Whether somebody sent NaN, so that the next attempts take it as it is, and their norm says whose it was."""
    suspect: tuple[str, int] | None = None
    """Who sent it, given up since, and its stage."""
    problem: SwarmError | None = None
    """Why the last attempt failed."""


class StepEnd:
    """Ends the steps of a session.

    Args:
        node: The trainer's peer.
        roster: Who serves what.
        pipeline: Repeats what is lost.
        plan: Which parameters each stage holds.
        session: The session's number.
        logged: Whether a worker of each stage is to keep what it made the last step with, for the trainer to fetch.
    """

    def __init__(
        self, node: Node, roster: Roster, pipeline: Pipeline, plan: Plan, session: int, logged: bool = False
    ) -> None:
        self._node = node
        self._roster = roster
        self._pipeline = pipeline
        self._plan = plan
        self._session = session
        self._logged = logged
        self._step = _Step(-1)
        self._allow_nan = False
        """Whether gradients had NaN without a suspect, so that it is the model's own."""

    def overlap(self, step: int, stages: Collection[int]) -> None:
        """Begin with the gradients of these stages, which have accumulated all of the step's microbatches."""
        self._begin(step)
        groups = [group for group in self._open_groups() if self._stages_of(group) <= set(stages)]
        busy = {name for task in self._step.early if not task.done() for name in task.get_name().split()}
        groups = [group for group in groups if group.name not in busy]
        if groups:
            names = " ".join(group.name for group in groups)
            self._step.early.add(asyncio.create_task(self._reduce(step, groups), name=names))

    def close(self) -> None:
        """Let go of what is under way."""
        for task in self._step.early:
            task.cancel()

    async def finish(
        self,
        step: int,
        hyperparameters: list[dict[str, Any]],
        clipping: Clipping,
        record: StepRecord,
        boundary: asyncio.Lock,
        committed: Callable[[], None],
    ) -> dict[int, str]:
        """Reduce and commit one step.

        Args:
            step: Its number.
            hyperparameters: Of each parameter group, as the trainer's optimizer and schedulers have them now.
            clipping: How to clip.
            record: What workers are to keep for a trainer that is started again.
            boundary: Held while the group is fixed: nobody joins between a reduction and its commit.
            committed: Called before the boundary is free again.

        Returns:
            By stage, who keeps what it made the step with; nobody, if that is not wanted.

        Raises:
            SwarmError: The reduction failed again and again.
        """
        self._begin(step)
        for early in list(self._step.early):
            await early
        for _ in range(_MOST_ATTEMPTS):
            await self._pipeline.repair()
            async with boundary:
                # Somebody may have left while we waited for the boundary, or in the reduction after his answer.
                reduced = self._pipeline.complete and await self._reduce(step, self._open_groups())
                if reduced and not self._open_groups():
                    self._judge()
                    with self._pipeline.sealed():
                        keepers = await self._commit(step, hyperparameters, clipping, record)
                    self._pipeline.forget()
                    committed()
                    return keepers
        why = self._step.problem or "each time somebody had to do again what another one had lost"
        raise SwarmError(f"Step {step} could not be reduced in {_MOST_ATTEMPTS} attempts; the last time: {why}")

    def _judge(self) -> None:
        """All is reduced: if the gradients of a step in which somebody sent NaN have none without it, it was wrong."""
        if not self._step.doubted:
            return
        if not math.isfinite(sum(reduced.squared_norm for reduced in self._step.reduced.values())):
            log.warning("Nor are the gradients finite without it: from now on that is taken for the model's own.")
            self._allow_nan = True
            self._roster.counters["NaN accepted"] += 1
        elif self._step.suspect is not None:
            suspect, stage = self._step.suspect
            self._roster.ban(suspect, stage, Cause.WRONG_RESULT, "it sent NaN in a reduction that has none without it")
            if suspect in self._roster.workers:
                self._roster.remove(suspect)
        self._step.doubted, self._step.suspect = False, None

    def _begin(self, step: int) -> None:
        if self._step.number != step:
            self._step = _Step(step)

    def _open_groups(self) -> list[Group]:
        """The groups of now that have not summed what their members hold now."""
        groups = self._groups(list(self._roster.workers.values()))
        current = {group.name: group for group in groups}
        holdings = self._pipeline.ledger.holdings()
        self._step.reduced = {
            name: reduced
            for name, reduced in self._step.reduced.items()
            if current.get(name) == reduced.group and _held(reduced.group, holdings) == reduced.held
        }
        return [group for group in groups if group.name not in self._step.reduced]

    async def _reduce(self, step: int, groups: list[Group]) -> bool:
        """Sum the gradients of these groups.

        Returns:
            Whether all members did; otherwise those to blame are out.
        """
        attempt = self._step.attempts
        self._step.attempts += 1
        doubted = self._step.doubted
        holdings = self._pipeline.ledger.holdings()
        members = {member.peer for group in groups for member in group.members}
        workers = [worker for peer, worker in self._roster.workers.items() if peer in members]

        async def reduce(worker: Worker) -> ReduceReply:
            mine = tuple(group for group in groups if any(member.peer == worker.peer for member in group.members))
            expected = tuple(sorted(holdings.get(worker.peer, ())))
            request = ReduceRequest(
                self._session, step, attempt, mine, expected, _CALL_DEADLINE_S / 2, self._allow_nan or doubted
            )
            header, _ = await self._node.call(worker.peer, "reduce", request.to_dict(), deadline_s=_CALL_DEADLINE_S)
            reply = ReduceReply.from_dict(header)
            if reply.squared_norms.keys() != {group.name for group in mine}:
                raise ProtocolError(f"{worker.peer} answers for other groups than it was asked for.", worker.peer)
            return reply

        replies, errors = await self._call_all(workers, reduce, "reduce")
        if errors:
            for peer, error in _culprits(errors, members).items():
                self._step.problem = error
                if isinstance(error, SourceFailed) and error.cause == NotFinite.__name__:
                    self._doubt(peer, error)
                elif isinstance(error, PeerBusy) or getattr(error, "cause", None) == PeerBusy.__name__:
                    self._roster.counters[f"failed: {Cause.BUSY.value}"] += 1
                    await asyncio.sleep(busy_pause_s(attempt))
                else:
                    self._give_up(peer, "reduce", error)
        if len(replies) < len(members):
            return False
        for group in groups:
            of_group = [replies[member.peer] for member in group.members]
            self._step.reduced[group.name] = _Reduced(
                group,
                _held(group, holdings),
                attempt,
                of_group[0].squared_norms[group.name],
                frozenset(name for name in group.parameters if all(name in reply.absent for reply in of_group)),
            )
        return True

    async def _call_all(
        self, workers: Sequence[Worker], call: Callable[[Worker], Awaitable[Any]], what: str
    ) -> tuple[dict[str, Any], dict[str, SwarmError]]:
        """Call all workers, and ask the silent ones what they do.

        In a reduction the others are not waited for when one has failed, as they cannot do without it.

        Returns:
            Replies and errors, by worker.

        Raises:
            RemoteError: The code raised on all workers of a stage; as do mistakes of our own.
        """
        started = time.monotonic()
        tasks = {worker.peer: asyncio.ensure_future(call(worker)) for worker in workers}
        for task in tasks.values():
            unheard(task)  # When one has failed, all of them begin again, whatever becomes of the others.
        stages = {worker.peer: worker.stage for worker in workers}
        replies: dict[str, Any] = {}
        errors: dict[str, SwarmError] = {}
        try:
            while tasks:
                await asyncio.wait(tasks.values(), timeout=_ASK_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
                ended = [peer for peer, task in tasks.items() if task.done()]
                for peer in ended:
                    try:
                        replies[peer] = tasks.pop(peer).result()
                        self._roster.took(peer, stages[peer], what, time.monotonic() - started)
                    except (CallerError, NodeClosed):
                        raise
                    except SwarmError as error:
                        errors[peer] = error
                        if isinstance(error, RemoteError) and not self._others_of(stages[peer], errors):
                            raise
                if not ended:
                    errors.update(await self._hung({peer: stages[peer] for peer in tasks}, what))
                    for peer in errors.keys() & tasks.keys():
                        tasks.pop(peer).cancel()
                if what == "reduce" and any(not isinstance(error, SourceFailed) for error in errors.values()):
                    break
        finally:
            for task in tasks.values():
                task.cancel()
        return replies, errors

    def _others_of(self, stage: int, failed: Collection[str]) -> bool:
        """Whether a stage has workers besides those that have failed."""
        return any(worker.peer not in failed for worker in self._roster.at_stage(stage))

    async def _hung(self, silent: dict[str, int], what: str) -> dict[str, SwarmError]:
        """Those among silent workers (and their stages) who do not answer or compute for too long."""

        async def ask(peer: str, stage: int) -> None:
            status = await probe(self._node, peer, ProbeRequest())
            patience_s = self._roster.deadline_s(peer, stage)
            if what == "reduce":
                await check_links(self._node, self._roster, peer, status, patience_s)
            patience_s = max(patience_s, self._roster.deadline_s(peer, stage, what))
            if status.computing_s > patience_s and not self._roster.waits_for(peer, stage, what):
                raise DeadlineExceeded(f"{peer} has computed for {status.computing_s:.1f} s in {what}.", peer)

        answers = await asyncio.gather(*(ask(*item) for item in silent.items()), return_exceptions=True)
        return {peer: answer for peer, answer in zip(silent, answers) if isinstance(answer, SwarmError)}

    def _give_up(self, culprit: str, what: str, error: SwarmError) -> None:
        known = self._roster.workers.get(culprit)
        if known is None:
            return
        log.warning("Worker %s of stage %d failed in %s: %s", culprit[-6:], known.stage, what, error)
        if known.ready:
            name = error.cause if isinstance(error, SourceFailed) else type(error).__name__
            self._roster.failed(culprit, known.stage, _CAUSES.get(name, Cause.RESET), str(error))
        self._pipeline.lose(culprit)

    def _doubt(self, culprit: str, error: SwarmError) -> None:
        """Somebody sent NaN: the step goes on without it, if its stage has others."""
        self._step.doubted = True
        known = self._roster.workers.get(culprit)
        if known is None or all(worker.peer == culprit for worker in self._roster.at_stage(known.stage)):
            return
        log.warning("Worker %s of stage %d sent NaN in a reduction: %s", culprit[-6:], known.stage, error)
        self._step.suspect = (culprit, known.stage)
        self._pipeline.lose(culprit)

    async def _commit(
        self, step: int, hyperparameters: list[dict[str, Any]], clipping: Clipping, record: StepRecord
    ) -> dict[int, str]:
        """Apply what was reduced; after this the step is made, whoever missed it.

        Returns:
            As :meth:`finish`.
        """
        reduced = self._step.reduced.values()
        scale = 1.0
        if clipping.norm is not None:
            # As torch.nn.utils.clip_grad_norm_, whose coefficient is clamped to 1 (and stays nan for a nan norm).
            norm = math.sqrt(sum(group.squared_norm for group in reduced))
            coefficient = clipping.norm / (norm + 1e-6)
            scale = coefficient if not coefficient >= 1.0 else 1.0
        request = CommitRequest(
            session=self._session,
            step=step,
            attempts={group.group.name: group.attempt for group in reduced},
            hyperparameters=tuple(encode_tree(group)[0] for group in hyperparameters),
            scale=scale,
            clip_value=clipping.value,
            absent=tuple(name for group in reduced for name in sorted(group.absent)),
            position=record.position,
            effects=record.effects,
        ).to_dict()
        stages = range(self._roster.stages) if self._logged else ()
        keepers = {stage: _keeper(workers, step) for stage in stages if (workers := self._roster.at_stage(stage))}

        async def commit(worker: Worker) -> None:
            header = {**request, "logged": True} if worker.peer in keepers.values() else request
            for refusal in range(_MOST_REFUSALS):
                try:
                    await self._node.call(worker.peer, "commit", header, deadline_s=_CALL_DEADLINE_S)
                    return
                except PeerBusy:
                    self._roster.counters[f"failed: {Cause.BUSY.value}"] += 1
                    if refusal == _MOST_REFUSALS - 1:
                        raise
                    await asyncio.sleep(busy_pause_s(refusal))

        _, errors = await self._call_all(list(self._roster.workers.values()), commit, "commit")
        for peer, error in errors.items():
            self._give_up(peer, "commit", error)
        return {stage: peer for stage, peer in keepers.items() if peer not in errors}

    def _stages_of(self, group: Group) -> set[int]:
        return {self._roster.workers[member.peer].stage for member in group.members}

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
                groups.append(Group(buffers_group(index), (), self._members((index,), workers, contributors)))
        return groups

    @staticmethod
    def _members(
        stages: tuple[int, ...], workers: list[Worker], contributors: dict[int, set[str]]
    ) -> tuple[GroupMember, ...]:
        """A worker that moves to another stage is a member there, too, and contributes where it serves."""
        members = {
            worker.peer: GroupMember(
                worker.peer, 1.0, worker.stage in stages and worker.peer in contributors.get(worker.stage, ())
            )
            for stage in stages
            for worker in sorted(workers, key=lambda w: w.peer)
            if stage in worker.stages
        }
        return tuple(members.values())


def _keeper(workers: Sequence[Worker], step: int) -> str:
    """Who of a stage's workers keeps what it makes a step with: another one each time, and none that moves away."""
    staying = [worker for worker in workers if worker.moving_to is None] or workers
    return staying[step % len(staying)].peer


def _held(group: Group, holdings: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    return {member.peer: holdings.get(member.peer, frozenset()) for member in group.members}


def _culprits(errors: dict[str, SwarmError], members: Collection[str]) -> dict[str, SwarmError]:
    """Those who made a reduction fail, out of what the members say.

    Whoever did not answer the trainer, or could not take part, is to blame, and complaints about others follow from
    that. If all answer and complain, the one that most complain about goes. Where a member has broken off one of its
    sums only because another one had failed, that says nothing of it.
    """
    direct = {peer: error for peer, error in errors.items() if not isinstance(error, SourceFailed)}
    if direct:
        return direct
    broken_off = asyncio.CancelledError.__name__
    telling = {peer: e for peer, e in errors.items() if getattr(e, "cause", None) != broken_off} or errors
    accused: dict[str, list[SwarmError]] = {}
    for peer, error in telling.items():
        accused.setdefault(error.peer if error.peer in members else peer, []).append(error)  # type: ignore[arg-type]
    culprit = max(sorted(accused), key=lambda peer: len(accused[peer]))
    return {culprit: accused[culprit][0]}
