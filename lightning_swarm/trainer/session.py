"""One ``trainer.fit``, ``validate``, ``test`` or ``predict`` on the trainer, as the swarm sees it.

A session begins without a plan: workers that join are asked to wait. The first batch makes the plan (the dry run needs
one), the workers get their stages and fetch their state from the trainer, and microbatches flow. A step function that
comes later (``validation_step`` after ``training_step``) is fitted to the same split points; where it uses parameters
at a stage that does not hold them, or cannot be cut there while no step has been made yet, there is a new plan and
the workers join again.
"""

import asyncio
import concurrent.futures
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_swarm.policies.banning import BanList, Cause
from lightning_swarm.policies.rebalancing import RebalancingPolicy
from lightning_swarm.slicing.plan import Plan, StepSignature
from lightning_swarm.slicing.seeds import replay_seed
from lightning_swarm.swarm.calls import (
    Assignment,
    Context,
    FinishRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LogRequest,
    PreparedRequest,
    ReadyRequest,
    StateRequest,
    WorkerRecord,
    WorkerStats,
)
from lightning_swarm.swarm.errors import (
    CallerError,
    DeadlineExceeded,
    PeerStale,
    PeerUnreachable,
    ProtocolError,
    SwarmError,
)
from lightning_swarm.swarm.loop import together
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import Outbox
from lightning_swarm.swarm.parts import give
from lightning_swarm.swarm.watched import ask
from lightning_swarm.trainer.balancer import Balancer
from lightning_swarm.trainer.commit import Clipping, StepEnd
from lightning_swarm.trainer.flight import Flight, Job
from lightning_swarm.trainer.gradient_log import GradientLog
from lightning_swarm.trainer.microbatches import Microbatch
from lightning_swarm.trainer.moves import Moves
from lightning_swarm.trainer.origin import Origin
from lightning_swarm.trainer.pipeline import Pipeline
from lightning_swarm.trainer.position import StepRecord, pack_effects
from lightning_swarm.trainer.recovery import Kept
from lightning_swarm.trainer.redo import LoggedBatch, RedoLog, StepEnding
from lightning_swarm.trainer.roster import OUTBOX_SHARE, Roster, StageLost, Worker
from lightning_swarm.trainer.tally import Tally
from lightning_swarm.worker.state import StageState, fetch_state

log = logging.getLogger(__name__)

_JOIN_WAIT_S = 5.0
_FINISH_DEADLINE_S = 5.0
_STATS_DEADLINE_S = 5.0
_SPEAK_EVERY_S = 60.0
_LOOK_AFTER_NEWCOMERS_S = 3.0
_MOST_SILENCES = 3
_MOST_LOSSES = 20
"""Of stages, without a step being made in between."""

Reply = tuple[dict[str, Any], Sequence[Tensor]]


@dataclass(frozen=True)
class Settings:
    """What of :class:`~lightning_swarm.SwarmStrategy`'s arguments a session needs."""

    in_flight: int | None
    snapshot_every_n_steps: int
    startup_timeout_s: float
    codec: str
    reduce_codec: str
    reproducible: bool
    run_seed: int
    outbox_bytes: int | None = None
    log_gradients: bool = False


@dataclass(frozen=True)
class Identity:
    """What a worker must have in common with the trainer."""

    session: int
    function: str
    versions: dict[str, str]
    parameters: dict[str, str]

    def differences(self, request: JoinRequest) -> list[str]:
        """What differs at a worker, in words."""
        found = []
        if request.function != self.function:
            found.append(f"it runs trainer.{request.function}, the trainer runs trainer.{self.function}")
        for name, version in self.versions.items():
            theirs = request.versions.get(name)
            if theirs != version:
                found.append(f"it has {name} {theirs}, the trainer has {version}")
        mine, its = self.parameters, request.parameters
        for name in [*mine, *(n for n in its if n not in mine)]:
            if mine.get(name) != its.get(name):
                found.append(
                    f"its parameter {name!r} is {its.get(name, 'missing')}, the trainer's is "
                    f"{mine.get(name, 'missing')}"
                )
        return found[:5]


class Session:
    """The trainer's side of a session.

    Args:
        node: The trainer's peer.
        identity: What workers must agree on.
        origin: The whole model.
        settings: The strategy's.
        check: Raises what makes waiting for workers pointless.
        joined: Called with the local index and the stage of each worker that has joined: it holds its stage's state.
        write_snapshot: Puts the origin on disk, called on a thread with its step and Lightning's position there.
        kept: Which workers hold what the origin holds, when this trainer was started again.
    """

    def __init__(
        self,
        node: Node,
        identity: Identity,
        origin: Origin,
        settings: Settings,
        check: Callable[[], None],
        joined: Callable[[int, int], None],
        write_snapshot: Callable[[int, bytes], None] | None = None,
        kept: Kept | None = None,
    ) -> None:
        self._node = node
        self._identity = identity
        self.origin = origin
        self._settings = settings
        self._check = check
        self._joined = joined
        self.step = origin.version
        self.plan: Plan | None = None
        self._plan_version = 0
        self._planned: frozenset[str] = frozenset()
        self.roster: Roster | None = None
        self.pipeline: Pipeline | None = None
        self.moves: Moves | None = None
        self._balancing: concurrent.futures.Future[None] | None = None
        self._step_end: StepEnd | None = None
        self._count = 0
        self._evaluated = 0
        self._planned_event = asyncio.Event()
        self._boundary = asyncio.Lock()
        self._origin_lock = asyncio.Lock()
        self._outbox = Outbox()
        self._redo = RedoLog(self.step)
        self._gradient_log = GradientLog(node)
        self._snapshot: asyncio.Task[None] | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._write_snapshot = write_snapshot
        self._written = self.step
        """The step of the last snapshot on disk."""
        self._kept = kept
        self._position = b""
        """Where Lightning stood at the beginning of the step under way."""
        self._effects: list[bytes] = []
        """What the step's batches gave, if the position is known."""
        self._said_record_stays = False
        self._furthest = 0
        """The most steps that were ever made; those that are repeated are behind it."""
        self._losses = 0
        """How often a stage has been lost since then."""
        self._bans = BanList()
        self.tally = Tally()
        self.counters = self.tally.counters
        self.in_directory: dict[str, WorkerRecord] = {}
        self._samples = 0
        self._began_s = time.monotonic()

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """The calls that the trainer answers."""
        return {
            "join": self.join,
            "ready": self.ready,
            "prepared": self.prepared,
            "leave": self.leave,
            "ping": self.ping,
            "state": self.state,
            "log": self.log,
            "fetch": self._outbox.answer_fetch,
        }

    # Calls of workers

    async def join(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """A worker asks for work."""
        request = JoinRequest.from_dict(header)
        identity = self._identity
        if request.session < identity.session:
            return JoinReply("skip").to_dict(), []
        if request.session > identity.session:
            await asyncio.sleep(_JOIN_WAIT_S / 10)
            return JoinReply("wait").to_dict(), []
        if differences := identity.differences(request):
            raise CallerError(
                f"The trainer refuses worker {caller}: {'; '.join(differences)}. "
                "Every peer has to run the same script with the same packages."
            )
        try:
            await asyncio.wait_for(self._planned_event.wait(), _JOIN_WAIT_S)
        except asyncio.TimeoutError:
            return JoinReply("wait").to_dict(), []
        async with self._boundary:
            assert self.plan is not None and self.roster is not None and self.pipeline is not None
            if (known := self.roster.workers.get(caller)) is not None:
                if known.rebuilds and not known.ready:
                    self._gradient_log.failed(known.stage)
                self.pipeline.lose(caller)
            stage = self._kept_stage(caller)
            keeps = stage is not None
            if stage is None:
                stage = self.roster.neediest_stage(self._stages_that_fit(caller, request.memory_bytes))
            assignment = self._assignment(stage, request.memory_bytes)
            if assignment is None:
                return JoinReply("wait").to_dict(), []
            if keeps:
                assignment = replace(assignment, donors=(caller, *assignment.donors))
            worker = self.roster.join(caller, request.device, request.local_index, stage, request.memory_bytes)
            worker.rebuilds = assignment.donors == (self._node.peer_id,) and self.origin.version < self.step
            self._watches = {watch for watch in self._watches if not watch.done()}
            self._watches.add(asyncio.create_task(self._watch(worker, self.roster, self.pipeline), name="newcomer"))
        log.info("Worker %s (%s) joins stage %d", caller[-6:], request.device, stage)
        return JoinReply("serve", assignment.to_dict()).to_dict(), []

    async def _watch(self, worker: Worker, roster: Roster, pipeline: Pipeline) -> None:
        """Give a newcomer up that falls silent before it is ready: no call of a step would find that out."""
        silences = 0
        while True:
            await asyncio.sleep(_LOOK_AFTER_NEWCOMERS_S)
            if roster is not self.roster or roster.workers.get(worker.peer) is not worker or worker.ready:
                return  # Where all were spread anew, it joins anew.
            try:
                await ask(self._node, worker.peer)
                silences = 0
            except SwarmError as error:
                silences += 1 if isinstance(error, DeadlineExceeded) else _MOST_SILENCES
                if silences < _MOST_SILENCES or roster.workers.get(worker.peer) is not worker or worker.ready:
                    continue
                log.warning("Worker %s has gone before it served stage %d: %s", worker.peer[-6:], worker.stage, error)
                pipeline.lose(worker.peer)

    def _kept_stage(self, worker: str) -> int | None:
        """The stage whose state of now this worker holds since before the trainer was started again."""
        kept, plan = self._kept, self.plan
        if kept is None or plan is None or (kept.step, kept.fingerprint) != (self.step, plan.fingerprint):
            return None
        return kept.stages.pop(worker, None)

    def _assignment(self, stage: int, memory_bytes: int) -> Assignment | None:
        """What a worker of this stage, with so much memory, has to know; ``None`` while nobody could give it the state
        of the stage.
        """
        assert self.plan is not None
        donors = self._donors(stage)
        if not donors:
            return None
        return Assignment(
            session=self._identity.session,
            plan=self.plan.to_dict(),
            plan_version=self._plan_version,
            stage=stage,
            step=self.step,
            donors=donors,
            codec=self._settings.codec,
            reduce_codec=self._settings.reduce_codec,
            reproducible=self._settings.reproducible,
            outbox_bytes=self._outbox_bytes(stage, memory_bytes),
        )

    def _donors(self, stage: int) -> tuple[str, ...]:
        """Who can give a stage's state, best first.

        The trainer's copy spares nobody a download, so workers come before it, but banned ones do so only where it is
        an old one that the gradients of many steps have to be applied to.
        """
        assert self.roster is not None
        trusted, banned = ([worker.peer for worker in workers] for workers in self.roster.donors(stage))
        copy = [self._node.peer_id] if self._can_give(stage) else []
        if trusted or self.origin.version == self.step:
            return (*trusted, *copy, *banned)
        return (*banned, *copy)

    def _can_give(self, stage: int, soon: bool = False) -> bool:
        """Whether the trainer's copy, with the gradients since then, is the stage as it is now; or will be soon.

        A copy that was taken before the swarm went back is ahead of it for a while.
        """
        covers = self._gradient_log.may_cover if soon else self._gradient_log.covers
        return self.origin.version <= self.step and covers(stage, range(self.origin.version, self.step))

    def _outbox_bytes(self, stage: int, memory_bytes: int) -> int | None:
        """What a worker with so much memory (0: it does not say) may keep for its neighbours."""
        if self._settings.outbox_bytes is not None or not memory_bytes:
            return self._settings.outbox_bytes
        return max(0, int(OUTBOX_SHARE * (memory_bytes - self._state_bytes(stage))))

    def _stages_that_fit(self, worker: str, memory_bytes: int) -> list[int]:
        """The stages that a worker's memory can hold.

        Raises:
            CallerError: It can hold none.
        """
        assert self.plan is not None
        needs = [self._state_bytes(stage.index) for stage in self.plan.stages]
        fitting = [stage for stage, need in enumerate(needs) if not memory_bytes or need <= memory_bytes]
        if not fitting:
            raise CallerError(
                f"The trainer refuses worker {worker}: it has {memory_bytes:,} bytes of memory, and the smallest "
                f"stage, "
                f"{needs.index(min(needs))}, needs {min(needs):,}. Use more stages, so that each is smaller."
            )
        if len(fitting) < len(needs):
            log.info("Worker %s has %s bytes of memory: it can serve stages %s", worker[-6:], memory_bytes, fitting)
        return fitting

    def _state_bytes(self, stage: int) -> int:
        """What a stage's state takes: training holds gradients and, with Adam, two more values a parameter."""
        assert self.plan is not None
        copies = 4 if self._identity.function == "fit" else 1
        return copies * self.plan.stages[stage].parameter_bytes

    async def ready(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """A worker holds its stage's state."""
        request = ReadyRequest.from_dict(header)
        async with self._boundary:
            worker = self.roster.workers.get(caller) if self.roster is not None else None
            if worker is None or (request.plan_version, request.stage) != (self._plan_version, worker.stage):
                raise PeerStale("the trainer expects something else of this worker: join again")
            if request.version != self.step:
                raise PeerStale(f"the swarm is at step {self.step}, this worker at {request.version}")
            assert self.roster is not None
            self._joined(worker.local_index, worker.stage)
            self.roster.admit(caller)
            if worker.rebuilds:
                self.counters["stages rebuilt"] += 1
                worker.rebuilds = False
        return {}, []

    async def prepared(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """A worker holds the state of the stage that it is to move to."""
        request = PreparedRequest.from_dict(header)
        if self.moves is None or request.plan_version != self._plan_version:
            raise PeerStale("there is another plan by now")
        self.moves.prepared(caller, request)
        return {}, []

    async def leave(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """A worker goes, and what it holds is repeated by others; or it will, and others can take its place before."""
        if LeaveRequest.from_dict(header).soon:
            if self.roster is not None:
                self.roster.leaves(caller)
        elif self.pipeline is not None:
            self.pipeline.lose(caller)
        return {}, []

    async def ping(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """Whether the trainer lives and counts on this worker."""
        member = self.roster is not None and caller in self.roster.workers
        return {"member": member, "session": self._identity.session}, []

    async def state(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """A slice of the whole model, while that is of the current step or can be brought there."""
        request = StateRequest.from_dict(header)
        if (
            self.plan is None
            or (request.session, request.plan_version) != (self._identity.session, self._plan_version)
            or request.stage not in range(len(self.plan.stages))
        ):
            raise PeerStale("there is another plan by now")
        async with self._origin_lock:
            if not self._can_give(request.stage):
                raise PeerStale("the trainer's copy of the model is not of this step")
            state = self.origin.stage_state(self.plan, request.stage)
        described, kept = await asyncio.to_thread(state.to_wire)
        return await give(self._outbox, "state", caller, request.key, described, kept)

    async def log(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """What a stage made a step with that the trainer's copy of the model lacks."""
        request = LogRequest.from_dict(header)
        logged = self._gradient_log.step(request.stage, request.step)
        if logged is None or request.plan_version != self._plan_version:
            raise PeerStale(f"the gradients of stage {request.stage} in step {request.step} are not here")
        return await give(self._outbox, "log", caller, request.key, dict(logged.header), logged.tensors)

    # The strategy's wishes; coroutines of the node's loop

    async def adopt(self, plan: Plan) -> None:
        """Work under this plan from now on."""
        replaced, self.plan = self.plan, plan
        self._plan_version += 1
        self._planned = frozenset(plan.signatures)
        old = self.roster
        if self._step_end is not None:
            self._step_end.close()
        if self.pipeline is not None:
            self.pipeline.forget()  # Nobody waits for what is under way, and it would find fault with the workers.
        self.roster = Roster(
            len(plan.stages),
            self.tally,
            self._settings.startup_timeout_s,
            self._check,
            replaceable=lambda stage: self._can_give(stage, soon=True),
            state_bytes=self._state_bytes,
            bans=self._bans,
        )
        self.pipeline = Pipeline(self._node, self.roster, self._settings.in_flight)
        self._gradient_log.clear()
        self._step_end = StepEnd(
            self._node, self.roster, self.pipeline, plan, self._identity.session, self._settings.log_gradients
        )
        self.moves = Moves(self._node, self.roster, self.pipeline, self._boundary, self._assignment)
        self._planned_event.set()
        if replaced is not None and old is not None:
            await self._tell(list(old.workers), FinishRequest(self._identity.session, True, False, None))

    def signature(self, kind: str) -> StepSignature | None:
        """What is known of a step function."""
        return self.plan.signatures.get(kind) if self.plan is not None else None

    async def learn(self, plan: Plan) -> None:
        """The same plan, which knows another step function now; new ownership makes the workers join again."""
        assert self.plan is not None
        held = [[(stage.parameters, stage.buffers) for stage in p.stages] for p in (plan, self.plan)]
        new = plan.signatures.keys() - self.plan.signatures.keys()
        changes_buffers = any(written for kind in new for written in plan.signatures[kind].written)
        if held[0] != held[1] or changes_buffers:
            await self.gather()
            await self.adopt(plan)
        else:
            self.plan = plan

    @property
    def untouched(self) -> bool:
        """Whether no step has been made under the plan, so that another one costs nothing but a new join."""
        return self.origin.version == self.step and self._count == 0

    async def run(
        self,
        kind: str,
        microbatches: Sequence[Microbatch],
        step_args: tuple[int, ...],
        context: Context,
        scale: float,
        last: bool = False,
    ) -> list[list[dict[str, Any]]]:
        """Run one batch's microbatches through all stages; steps that were lost with a stage are done again.

        Args:
            kind: Which step function.
            microbatches: The parts of the batch.
            step_args: What follows the batch in the step function's arguments.
            context: The trainer's side of the step.
            scale: What the loss is multiplied with.
            last: Whether :meth:`finish_step` follows, with no other batch before it.

        Returns:
            By microbatch and stage, the effects of the step (``worker/recorder.py``).
        """
        batch = LoggedBatch(kind, tuple(microbatches), step_args, context, scale)
        evaluated = self._evaluated
        while True:
            self._evaluated = evaluated  # A batch that is evaluated again draws the same random numbers.
            try:
                effects = await self._run(batch, last)
            except StageLost as lost:
                await self._recover(lost)
                continue
            if kind == "training_step":
                self._redo.add(batch)
                if self._position:
                    self._effects.append(pack_effects(effects))
            return effects

    async def _recover(self, lost: StageLost) -> None:
        """All stages go back to the trainer's copy of the model, and what was done since is done again."""
        since_s = time.monotonic()
        self.tally.spread_anew()
        while True:
            log.warning(
                "%s Going back from step %d to step %d and doing the steps since then again.",
                lost,
                self.step,
                self.origin.version,
            )
            self.counters["stages lost"] += 1
            self._losses += 1
            if self._losses > _MOST_LOSSES:
                raise SwarmError(
                    f"{lost} That is the {self._losses}th time that a stage was lost since step {self._furthest} "
                    "began, so its workers may die of what they do there: see what they printed last. More memory, "
                    "more stages or smaller microbatches help if that is it."
                )
            self.counters["steps repeated"] += max(0, self.step - self.origin.version)
            assert self.plan is not None
            self.step, self._count = self.origin.version, 0
            await self.adopt(self.plan)
            try:
                for step in self._redo.steps:
                    for batch in step.batches:
                        await self._run(batch)
                    if step.ending is not None and step is not self._redo.steps[-1]:
                        await self._finish(step.ending)
                self.tally.recovered(time.monotonic() - since_s)
                return
            except StageLost as again:
                lost = again

    async def _run(self, batch: LoggedBatch, last: bool = False) -> list[list[dict[str, Any]]]:
        assert self.plan is not None and self.roster is not None and self.pipeline is not None
        assert self._step_end is not None
        await self.roster.wait_for_all_stages()
        job = Job(
            session=self._identity.session,
            plan_version=self._plan_version,
            step=self.step,
            kind=batch.kind,
            signature=self.plan.signatures[batch.kind],
            signature_is_planned=batch.kind in self._planned,
            step_args=batch.step_args,
            context=batch.context,
        )
        flights = []
        first = self._count if job.training else self._evaluated
        for microbatch in batch.microbatches:
            if job.training:
                order, name = self._count, f"{self.step}:{self._count}"
                self._count += 1
            else:
                order, name = self._evaluated, f"{self.step}:e{self._evaluated}"
                self._evaluated += 1
            flights.append(
                Flight(
                    job=job,
                    name=name,
                    order=order,
                    first=first,
                    microbatch=microbatch,
                    seed=replay_seed(self._settings.run_seed, self.step, order),
                    scale=batch.scale * microbatch.share if job.training else 0.0,
                )
            )
        step_end, step = self._step_end, self.step
        await self.pipeline.run(flights, (lambda done: step_end.overlap(step, done)) if last else None)
        self._samples += sum(microbatch.samples for microbatch in batch.microbatches)
        return [flight.effects for flight in flights]

    @property
    def between_steps(self) -> bool:
        """Whether the next batch is the first one of its step."""
        return self._count == 0

    @property
    def snapshot_is_due(self) -> bool:
        """Whether the trainer's copy, and the one on disk if there is to be one, has become too old."""
        newest = self._written if self._write_snapshot is not None else self.origin.version
        due = self.step - newest >= self._settings.snapshot_every_n_steps or self._gradient_log.has_gaps
        return due and (self._snapshot is None or self._snapshot.done())

    async def begin_step(self, position: bytes) -> None:
        """The next batch is the first one of its step.

        Args:
            position: Where Lightning stands now, if that is to be kept with the weights.
        """
        self._position = position
        if self.snapshot_is_due:
            self._snapshot = asyncio.create_task(self._take_snapshot(position), name="snapshot")

    async def finish_step(self, hyperparameters: list[dict[str, Any]], clipping: Clipping) -> None:
        """Reduce and commit: the swarm is at the next step then."""
        record = StepRecord(self._position, tuple(self._effects))
        if not record.travels:
            if not self._said_record_stays:
                self._said_record_stays = True
                log.warning(
                    "The states of callbacks, loops and data are %d MiB, too much to go to the workers with each step. "
                    "A trainer that is killed can go on from its snapshot_dir, but not from the workers.",
                    len(record.position) >> 20,
                )
            record = StepRecord()
        ending = StepEnding(tuple(hyperparameters), clipping, record)
        self._position, self._effects = b"", []
        self._redo.end(ending)
        while True:
            try:
                await self._finish(ending)
                break
            except StageLost as lost:
                await self._recover(lost)
        self._redo.begin(self.step)

    async def _finish(self, ending: StepEnding) -> None:
        assert self._step_end is not None and self.moves is not None
        await self._gradient_log.settle()  # A worker keeps one step's.
        step = self.step
        keepers = await self._step_end.finish(
            step, list(ending.hyperparameters), ending.clipping, ending.record, self._boundary, self._committed
        )
        self._gradient_log.fetch(self._identity.session, self._plan_version, step, keepers)
        await self.moves.switch(self._identity.session, self._plan_version, self.step)

    def _committed(self) -> None:
        self.step += 1
        self._count = self._evaluated = 0
        if self.step > self._furthest:
            self._furthest, self._losses = self.step, 0

    async def banning(self, bans: BanList) -> None:
        """From now on this list decides whom to leave alone, with what is known of the workers so far."""
        bans.take_over(self._bans)
        self._bans = bans
        if self.roster is not None:
            self.roster.bans = bans

    async def rebalance(self, policy: RebalancingPolicy) -> None:
        """From now on this policy decides which workers move between the stages, in place of an earlier one."""
        if self._balancing is not None:
            self._balancing.cancel()
        self.counters["moves"] += 0
        balancer = Balancer(
            self._node,
            policy,
            lambda: self.moves,
            lambda: tuple(stage.flops for stage in self.plan.stages) if self.plan is not None else (),
            lambda: (self._identity.session, self.step),
        )
        self._balancing = self._node.spawn(balancer.run(), "rebalancing")

    async def _take_snapshot(self, position: bytes) -> None:
        """Bring the trainer's copy up to date while training goes on, and put it on disk if that is wanted."""
        step = self.step
        try:
            await self._update_origin()
        except SwarmError as error:
            log.info("No snapshot this time: %s", error)
            return
        self.counters["snapshots"] += 1
        async with self._origin_lock:
            if self._write_snapshot is not None and position and self.origin.version == step:
                writing = asyncio.ensure_future(asyncio.to_thread(self._write_snapshot, step, position))
                try:
                    await asyncio.shield(writing)
                finally:
                    # At the end of the session too, nobody may change the origin while it is written.
                    await asyncio.wait({writing})
                self._written = step

    async def gather(self, recover: bool = True) -> None:
        """Bring the trainer's copy of the model up to the current step.

        Args:
            recover: Whether to do again what goes with a stage that is lost meanwhile.

        Raises:
            SwarmError: A stage's state is nowhere.
        """
        while recover and self.plan is not None and self.origin.version != self.step:
            assert self.roster is not None
            try:
                await self.roster.wait_for_all_stages()
                workers = set(self.roster.workers)
                try:
                    await self._update_origin()
                except SwarmError:
                    if workers <= self.roster.workers.keys():
                        raise
            except StageLost as lost:
                await self._recover(lost)
        await self._update_origin()

    async def _update_origin(self) -> None:
        if self.origin.version == self.step or self.plan is None:
            return
        # Each worker captures its state at once, before it can be at the next step; the transfers take their time.
        states = await together([self._stage_state(stage.index, self.step) for stage in self.plan.stages])
        async with self._origin_lock:
            if states[0].version > self.origin.version:
                await asyncio.to_thread(self.origin.update, list(states))
                self._redo.forget(self.origin.version)
                self._gradient_log.forget(self.origin.version)

    async def _stage_state(self, stage: int, step: int) -> StageState:
        assert self.roster is not None and self.pipeline is not None
        request = StateRequest(self._identity.session, self._plan_version, stage)
        problems: list[str] = []
        damaged: dict[str, StageState] = {}
        for worker in itertools.chain(*self.roster.donors(stage)):
            try:
                state = await fetch_state(self._node, worker.peer, request)
                if state.version != step:
                    raise PeerStale(f"state of step {state.version} instead of {step}", worker.peer)
                if await asyncio.to_thread(state.is_finite):
                    for liar in damaged:
                        self.roster.ban(liar, stage, Cause.WRONG_RESULT, "its state has NaN where another one has none")
                        self.pipeline.lose(liar)
                    return state
                damaged[worker.peer] = state
            except SwarmError as error:
                problems.append(f"{worker.peer[-6:]}: {error}")
                if isinstance(error, ProtocolError):
                    self.roster.ban(worker.peer, stage, Cause.PROTOCOL, str(error))
                gone = isinstance(error, PeerUnreachable | DeadlineExceeded | ProtocolError)
                if gone and self.roster.workers.get(worker.peer) is worker:
                    self.pipeline.lose(worker.peer)
        if damaged and not problems:
            return next(iter(damaged.values()))  # All say the same, so it is what training has come to.
        problems += [f"{peer[-6:]}: its parameters are not finite" for peer in damaged]
        raise SwarmError(f"No worker could give the state of stage {stage}: {'; '.join(problems) or 'there is none'}")

    async def finish(self, failed: bool, outcome: Any) -> None:
        """The session is over: workers return from their Lightning call."""
        self._gradient_log.clear()
        for watch in self._watches:
            watch.cancel()
        if self._snapshot is not None:
            self._snapshot.cancel()
            await asyncio.wait({self._snapshot})
        if self._balancing is not None:
            self._balancing.cancel()
        if self.roster is not None:
            await self._tell(list(self.roster.workers), FinishRequest(self._identity.session, False, failed, outcome))

    async def _tell(self, workers: list[str], request: FinishRequest) -> None:
        async def tell(worker: str) -> None:
            try:
                await self._node.call(worker, "finish", request.to_dict(), deadline_s=_FINISH_DEADLINE_S)
            except SwarmError as error:
                log.info("Worker %s did not hear that the session is over: %s", worker[-6:], error)

        await asyncio.gather(*(tell(worker) for worker in workers))

    def announced(self, records: dict[str, WorkerRecord], malformed: int) -> None:
        """Workers that the DHT knows; those that claim what cannot be are ignored and counted."""
        impossible = 0
        self.in_directory = {}
        for peer, record in records.items():
            if self.plan is not None and record.stage >= len(self.plan.stages):
                impossible += 1
            else:
                self.in_directory[peer] = record
        if malformed + impossible:
            self.counters["announcements ignored"] = malformed + impossible

    async def report(self) -> dict[str, Any]:
        """What the swarm did so far; see ``SwarmStrategy.report``."""
        rows = self.roster.report() if self.roster is not None else []
        await asyncio.gather(*(self._add_stats(row) for row in rows))
        sent, received = self._node.traffic
        return {
            "step": self.step,
            "elapsed_s": time.monotonic() - self._began_s,
            "samples": self._samples,
            "counters": dict(self.counters),
            "by_stage": self.tally.by_stage(len(self.plan.stages) if self.plan is not None else 0),
            "by_worker": self.tally.by_worker(),
            "bans": list(self.tally.bans),
            "recoveries_s": list(self.tally.recoveries_s),
            "trainer": {"bytes_sent": sum(sent.values()), "bytes_received": sum(received.values())},
            "workers": rows,
        }

    async def _add_stats(self, row: dict[str, Any]) -> None:
        try:
            header, _ = await self._node.call(row["peer"], "stats", {}, deadline_s=_STATS_DEADLINE_S)
            row.update(WorkerStats.from_dict(header).to_dict())
        except SwarmError as error:
            row["unreachable"] = str(error)

    async def speak(self) -> None:
        """One log line a minute."""
        before = 0
        while True:
            await asyncio.sleep(_SPEAK_EVERY_S)
            if self.roster is None:
                continue
            counts = "+".join(str(len(self.roster.at_stage(stage))) for stage in range(self.roster.stages))
            rate = (self._samples - before) / _SPEAK_EVERY_S
            before = self._samples
            events = ", ".join(f"{name} {count}" for name, count in sorted(self.counters.items())) or "no events"
            log.info("Step %d, %s workers, %.1f samples/s; %s", self.step, counts, rate, events)
