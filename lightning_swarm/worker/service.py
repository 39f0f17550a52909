"""The calls that a worker answers.

A step ends in two phases. ``reduce``: the worker compares the microbatches it has accumulated with those that the
trainer's ledger gives it, sums gradients with its group and keeps the sum; nothing is applied. ``commit``: the
optimizer makes its step with the kept sum, and the worker is at the next step. A worker that is still loading its
state takes part in both, but queues the commits until the state is there. One that is moving to another stage takes
part for both stages: it applies the commits of the one that it serves and queues those of the other one.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_swarm.slicing.plan import Plan
from lightning_swarm.swarm.calls import (
    Assignment,
    CommitRequest,
    FinishRequest,
    Group,
    Holding,
    LoggedSums,
    LogRequest,
    ProbeReply,
    ProbeRequest,
    ReduceReply,
    ReduceRequest,
    StateRequest,
    Task,
    Wait,
    WorkerStats,
    buffers_group,
)
from lightning_swarm.swarm.errors import PeerStale, ProtocolError
from lightning_swarm.swarm.loop import unheard
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import Outbox, fetch
from lightning_swarm.swarm.parts import give, is_part
from lightning_swarm.swarm.tree import decode_tree
from lightning_swarm.worker.executor import Executor, Priority
from lightning_swarm.worker.incoming import Incoming
from lightning_swarm.worker.reduction import all_reduce
from lightning_swarm.worker.stage_server import StageServer
from lightning_swarm.worker.state import StageState, StateRejected
from lightning_swarm.worker.statistics import squared_norm

Reply = tuple[dict[str, Any], list[Tensor]]

_BEGIN_WITHIN_S = 10.0
_MOST_WAITS = 8


@dataclass(frozen=True)
class Reduced:
    """The summed gradients of a group, kept until the step's commit or, while the stage's state is not there yet,
    until that has come.
    """

    group: Group
    attempt: int
    held: frozenset[str]
    """The microbatches of this worker that are in the sum."""
    vector: Tensor | None
    """``None`` where the worker is alone and the sum stands in the accumulator."""


Commit = tuple[list[Reduced], CommitRequest]
"""What a stage makes a step with."""


class WorkerService:
    """Answers ``process``, ``fetch``, ``reduce``, ``commit``, ``state`` and ``log``.

    Args:
        node: This peer.
        executor: Its compute thread.
    """

    def __init__(self, node: Node, executor: Executor) -> None:
        self.node = node
        self.executor = executor
        self.outbox = Outbox()
        self.server: StageServer | None = None
        self.incoming: Incoming | None = None
        """The stage that this worker is moving to."""
        self.optimizer: Optimizer | None = None
        self.finished: asyncio.Future[FinishRequest] | None = None
        self.last_call_s = 0.0
        self.committed: CommitRequest | None = None
        """The last commit that was applied, for others to be told of it when the trainer cannot."""
        self._reduced: dict[str, Reduced] = {}
        """Of the step under way, by group."""
        self._queued: dict[int, Commit] = {}
        self._logged: tuple[LogRequest, dict[str, Any], list[Tensor]] | None = None
        """What the last step was made with, for the trainer to fetch."""
        self._fetches: dict[int, tuple[str, str, float]] = {}
        """Those under way: peer, key and when they began."""
        self._fetch_count = itertools.count()
        self._begun = asyncio.Event()
        self._commit_lock = asyncio.Lock()
        self._commits: set[asyncio.Future[None]] = set()
        self._stopped: list[StageServer] = []
        self._reduction_s = self._commit_s = 0.0
        self.downloads = 0
        """How often this worker has fetched a stage's state."""

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """By call."""
        return {
            "process": self.process,
            "fetch": self.outbox.answer_fetch,
            "probe": self.probe,
            "reduce": self.reduce,
            "commit": self.commit,
            "state": self.state,
            "log": self.log,
            "stats": self.stats,
        }

    def begin(self, server: StageServer, optimizer: Optimizer | None, incoming: Incoming | None = None) -> None:
        """Serve this stage from now on; its state is loaded later by :meth:`load`, with the commits that were queued
        while it was incoming.
        """
        self.server, self.optimizer = server, optimizer
        self.outbox.limit_bytes = server.assignment.outbox_bytes
        self._reduced, self._queued = {}, incoming.commits if incoming is not None else {}
        self._begun.set()

    def pause(self) -> None:
        """The trainer is gone: what this worker holds stays, but it is in no reduction before it begins again."""
        self._begun.clear()

    async def holding(self) -> Holding:
        """What this worker holds, after a commit that is under way."""
        async with self._commit_lock:
            server = self.server
        if server is None or server.version is None:
            return Holding()
        assignment, last = server.assignment, self.committed
        return Holding(
            stage=server.index,
            stages=len(server.plan.stages),
            fingerprint=server.plan.fingerprint,
            session=assignment.session,
            plan_version=assignment.plan_version,
            step=server.version,
            commit=last.to_dict() if last is not None and last.step == server.version - 1 else None,
        )

    async def held_state(self, assignment: Assignment) -> StageState | None:
        """The state that an assignment asks for, if this worker holds it; shares memory with the stage."""
        server = self.server
        if server is None or (server.index, server.version) != (assignment.stage, assignment.step):
            return None
        owned = server.plan.stages[server.index]
        wanted = Plan.from_dict(assignment.plan).stages[assignment.stage]
        if (owned.parameters, owned.buffers) != (wanted.parameters, wanted.buffers):
            return None
        return await self.executor.do(Priority.COMMIT, lambda: self._capture(server, copy=False))

    def end(self) -> None:
        """Serve no stage any more. The module is left by :meth:`leave_module`."""
        if self.server is not None:
            self.server.stop()
            self._stopped.append(self.server)
        for commit in self._commits:
            commit.cancel()
        self.server = self.incoming = self._logged = None
        self._begun.clear()
        self.outbox.drop(lambda key: not is_part(key))

    def leave_module(self) -> None:
        """On the compute thread: what it was at when the stage ended has ended, too."""
        while self._stopped:
            self._stopped.pop().close()

    def _serving(self, session: int) -> StageServer:
        self.last_call_s = asyncio.get_running_loop().time()
        if self.server is None or self.server.assignment.session != session:
            raise PeerStale(f"this worker serves no stage in session {session}")
        return self.server

    async def process(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """See :meth:`StageServer.process`."""
        task = Task.from_dict(header)
        server = self._serving(task.session)
        if (task.stage, task.plan_version) != (server.index, server.assignment.plan_version):
            raise PeerStale(f"this worker serves stage {server.index}, the task is for stage {task.stage}")
        return await server.process(task, tensors)

    async def reduce(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """First phase: agree on what is summed, and sum it."""
        request = ReduceRequest.from_dict(header)
        # The trainer counts on us from the moment when it has given us a stage, which takes us a moment longer.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._begun.wait(), _BEGIN_WITHIN_S)
        server = self._serving(request.session)
        async with self._commit_lock:  # The state may have come, and the steps that came after it are being applied.
            pass
        if server.version not in (None, request.step):
            raise PeerStale(f"this worker is at step {server.version}, not {request.step}")
        held = _of_step(server, request.step)
        if held != frozenset(request.expected):
            raise PeerStale(
                f"the ledger gives this worker {len(request.expected)} microbatches of step {request.step}, it has "
                f"accumulated {len(held)}; different: {sorted(held ^ frozenset(request.expected))[:4]}"
            )
        if server.strayed:
            raise PeerStale(f"this worker's running buffers have seen {sorted(server.strayed)[:4]}, others' too")
        for group in request.groups:
            self._drop_earlier(request, group)
        started = time.perf_counter()
        running = [asyncio.create_task(self._reduce_group(server, request, group)) for group in request.groups]
        try:
            results = await asyncio.gather(*running)
        finally:
            for reduction in running:
                reduction.cancel()
            self._reduction_s += time.perf_counter() - started
        norms, absent = {}, []
        for group, (vector, norm, missing) in zip(request.groups, results):
            self._reduced[group.name] = Reduced(group, request.attempt, held, vector)
            norms[group.name] = norm
            absent += missing
        return ReduceReply(norms, tuple(absent)).to_dict(), []

    def _drop_earlier(self, request: ReduceRequest, group: Group) -> None:
        """What earlier attempts of this group have left is of no use: who takes part in this one has given them up."""
        earlier = {f"reduce/{request.step}/{attempt}/{group.name}" for attempt in range(request.attempt)}
        self.outbox.drop(lambda key: str(key).rpartition("/")[0].rpartition("/")[0] in earlier)

    async def _reduce_group(
        self, server: StageServer, request: ReduceRequest, group: Group
    ) -> tuple[Tensor | None, float, list[str]]:
        part = self._part(server, group)
        accumulator = part.accumulator
        if not group.parameters:
            return await self._average(part, request, group), 0.0, []
        if len(group.members) == 1:
            norm, absent = await self.executor.do(
                Priority.COMMIT,
                lambda: (accumulator.squared_norm(group.parameters), accumulator.absent(group.parameters)),
            )
            return None, norm, absent
        vector, present = await self.executor.do(Priority.COMMIT, lambda: accumulator.flat(group.parameters))
        summed = await self._sum(
            vector, group, request, server.assignment.reduce_codec, accumulator.dtype(group.parameters)
        )
        norm = await asyncio.to_thread(squared_norm, summed)
        return summed, norm, [name for name, there in zip(group.parameters, present) if not there]

    def _part(self, server: StageServer, group: Group) -> StageServer | Incoming:
        """The stage as whose worker we are a member of the group; where both are, it is the one that we serve."""
        if _concerns(group, server):
            return server
        if self.incoming is not None and _concerns(group, self.incoming):
            return self.incoming
        raise PeerStale(f"this worker serves stage {server.index} and has no part in group {group.name!r}")

    async def _average(self, part: StageServer | Incoming, request: ReduceRequest, group: Group) -> Tensor | None:
        if len(group.members) == 1:
            return None
        sums = await self.executor.do(Priority.COMMIT, part.buffer_sums)
        return await self._sum(sums, group, request, "none", sums.dtype)

    async def _sum(
        self, vector: Tensor, group: Group, request: ReduceRequest, codec: str, dtype: torch.dtype
    ) -> Tensor:
        return await all_reduce(
            vector,
            group,
            step=request.step,
            attempt=request.attempt,
            me=self.node.peer_id,
            fetch=self._fetch_as_is,
            outbox=self.outbox,
            codec=codec,
            deadline_s=request.deadline_s,
            dtype=dtype,
            allow_nan=request.allow_nan,
        )

    async def commit(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """Second phase: apply the sum.

        What has begun is brought to its end, even if the trainer dies meanwhile: another one may finish the step.
        """
        request = CommitRequest.from_dict(header)
        commit = asyncio.ensure_future(self._commit(self._serving(request.session), request))
        self._commits.add(commit)
        commit.add_done_callback(self._commits.discard)
        unheard(commit)
        await asyncio.shield(commit)
        return {}, []

    async def _commit(self, server: StageServer, request: CommitRequest) -> None:
        async with self._commit_lock:
            if server.version is not None and server.version > request.step:
                return
            chosen = [r for name, r in self._reduced.items() if request.attempts.get(name) == r.attempt]
            reduced = _all_of(server, chosen)
            held = _of_step(server, request.step)
            if reduced is None or any(r.held != held for r in reduced):
                raise PeerStale(f"this worker has not reduced all of its gradients of step {request.step}")
            self._reduced, self._logged = {}, None
            if self.incoming is not None:
                self._queue_incoming(self.incoming, chosen, reduced, request)
            if server.version is None:
                self._queued[request.step] = (reduced, request)
            else:
                await self._apply(server, reduced, request)
            finished = f"reduce/{request.step}/"
            self.outbox.drop(lambda key: str(key).startswith(finished))

    def _queue_incoming(
        self, incoming: Incoming, chosen: list[Reduced], applied: list[Reduced], request: CommitRequest
    ) -> None:
        reduced = _all_of(incoming, chosen)
        if reduced is None:  # The trainer does not count on the move any more.
            self.incoming = None
            return
        # The sums of parameters that both stages share become gradients here, which clipping changes in place.
        kept = [
            replace(r, vector=r.vector.clone()) if r.vector is not None and any(r is a for a in applied) else r
            for r in reduced
        ]
        incoming.queue(request.step, kept, replace(request, logged=False))

    async def _apply(self, server: StageServer, reduced: list[Reduced], request: CommitRequest) -> None:
        hyperparameters = [decode_tree(group, []) for group in request.hyperparameters]
        await self.executor.do(Priority.COMMIT, lambda: self._step(server, reduced, request, hyperparameters))
        server.forget_step(request.step)
        self.committed = request

    def _step(
        self,
        server: StageServer,
        reduced: list[Reduced],
        request: CommitRequest,
        hyperparameters: list[dict[str, Any]],
    ) -> None:
        """On the compute thread."""
        started = time.perf_counter()
        accumulator = server.accumulator
        absent = frozenset(request.absent)
        if request.logged:
            reduced = self._log(server, reduced, request)
        for of_group in reduced:
            names, vector = of_group.group.parameters, of_group.vector
            if names:
                accumulator.install(names, vector, [name not in absent for name in names])
            elif vector is not None:
                server.average_buffers(vector)
        gradients = [p.grad for p in server.stage.owned_parameters().values() if p.grad is not None]
        if request.scale != 1.0:
            torch._foreach_mul_(gradients, request.scale)
        if request.clip_value is not None:
            torch._foreach_clamp_min_(gradients, -request.clip_value)
            torch._foreach_clamp_max_(gradients, request.clip_value)
        if self.optimizer is not None:
            for of_optimizer, values in zip(self.optimizer.param_groups, hyperparameters):
                of_optimizer.update(values)
            self.optimizer.step()
        server.arrive(request.step + 1)
        self._commit_s += time.perf_counter() - started

    def _log(self, server: StageServer, reduced: list[Reduced], request: CommitRequest) -> list[Reduced]:
        """Keep the sums for the trainer. On the compute thread.

        Returns:
            The same sums, all as vectors: what another worker makes this step with must not differ in a bit.
        """
        summed = []
        for of_group in reduced:
            vector, names = of_group.vector, of_group.group.parameters
            if vector is None and names:
                vector = server.accumulator.flat(names)[0].to(server.accumulator.dtype(names)).contiguous()
            elif vector is None:
                vector = server.buffer_sums()
            summed.append(replace(of_group, vector=vector))
        log = LoggedSums(replace(request, logged=False), tuple(r.group for r in summed))
        # Copies: the vectors become gradients, which clipping changes in place.
        copies = [r.vector.clone() for r in summed if r.vector is not None]
        assignment = server.assignment
        key = LogRequest(assignment.session, assignment.plan_version, server.index, request.step)
        self._logged = key, log.to_dict(), copies
        return summed

    async def log(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """What this worker made its last step with, if the commit said to keep it."""
        request, logged = LogRequest.from_dict(header), self._logged
        if logged is None or logged[0] != replace(request, key=""):
            raise PeerStale(f"the gradients of stage {request.stage} in step {request.step} are not here")
        return await give(self.outbox, "log", caller, request.key, logged[1], logged[2])

    async def state(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """The state of this worker's stage, as of its step."""
        request = StateRequest.from_dict(header)
        server = self._serving(request.session)
        if server.version is None or (request.stage, request.plan_version) != (
            server.index,
            server.assignment.plan_version,
        ):
            raise PeerStale(f"this worker holds no state of stage {request.stage}")
        captured = await self.executor.do(Priority.COMMIT, lambda: self._capture(server, copy=True))
        described, kept = await asyncio.to_thread(captured.to_wire)
        return await give(self.outbox, "state", caller, request.key, described, kept)

    def _capture(self, server: StageServer, copy: bool) -> StageState:
        """On the compute thread."""
        parameters, buffers = server.stage.owned_parameters(), server.buffers_of_version()
        return StageState.capture(
            server.version or 0, parameters, buffers, self.optimizer, copy=copy, progressed=self.executor.progressed
        )

    async def load(self, state: StageState, logged: Callable[[int], Awaitable[Commit]] | None = None) -> int:
        """Take over a stage's state, then apply the steps that came after it.

        Args:
            state: Of the assignment's step or later or, with ``logged``, of an earlier one.
            logged: Gives what the steps in between were made with, one at a time.

        Returns:
            The step that this worker is at now.

        Raises:
            StateRejected: A step is missing.
            SwarmError: What ``logged`` raised.
        """
        server = self.server
        assert server is not None
        async with self._commit_lock:
            await self.executor.do(Priority.COMMIT, lambda: self._load(server, state))
            until = max([server.assignment.step, *(step + 1 for step in self._queued)])
            for step in range(state.version, until):
                commit = self._queued.get(step)
                if commit is None and logged is None:
                    raise StateRejected(f"it is of step {state.version}, and step {step} is missing")
                await self._apply(server, *(commit or await logged(step)))  # type: ignore[misc]
            self._queued.clear()
        assert server.version is not None
        return server.version

    def _load(self, server: StageServer, state: StageState) -> None:
        """On the compute thread."""
        state.load(
            server.stage.owned_parameters(),
            server.stage.owned_buffers(),
            self.optimizer,
            take=True,
            progressed=self.executor.progressed,
        )
        server.arrive(state.version)

    async def probe(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """What this worker is doing: whether a silence is its own fault, or whose."""
        request = ProbeRequest.from_dict(header)
        prefix = "reduce/" if request.microbatch is None else f"{request.microbatch}/"
        now = time.monotonic()
        fetches = [fetch for fetch in self._fetches.values() if fetch[1].startswith(prefix)]
        if request.microbatch is None:
            # A reduction's chunks share the links, and over a slow one all of them are long under way.
            fetches = [(peer, key, max(began, now - self.node.silent_s(peer))) for peer, key, began in fetches]
        waits = sorted((Wait(peer, key, now - since) for peer, key, since in fetches), key=lambda wait: -wait.seconds)
        offered_s = None if request.key is None else self.outbox.offered_s(request.key)
        executor = self.executor
        reply = ProbeReply(
            executor.computing_s(), executor.queued, tuple(waits[:_MOST_WAITS]), offered_s, executor.usual_s
        )
        return reply.to_dict(), []

    async def stats(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """What this worker has done so far."""
        server = self.server
        sent, received = self.node.traffic
        stats = WorkerStats(
            queued=self.executor.queued,
            forward_s=server.forward_s if server is not None else 0.0,
            backward_s=server.backward_s if server is not None else 0.0,
            waiting_s=server.waiting_s if server is not None else 0.0,
            reduction_s=self._reduction_s,
            commit_s=self._commit_s,
            bytes_sent=sum(sent.values()),
            bytes_received=sum(received.values()),
            outbox_bytes=self.outbox.bytes,
            outbox_peak_bytes=self.outbox.evictable_peak_bytes,
            evicted=self.outbox.evictions,
            busy_s=sum(self.executor.busy_s.values()),
            queue_s=self.executor.queue_s,
            downloads=self.downloads,
        )
        return stats.to_dict(), []

    async def fetch_from(self, peer: str, key: str, deadline_s: float) -> tuple[list[Tensor], float]:
        """Tensors from another peer's outbox, and the seconds that they were under way."""
        codec = self.server.assignment.codec if self.server is not None else "none"
        started = time.perf_counter()
        with self._fetching(peer, key):
            entry = await fetch(self.node, peer, key, deadline_s=deadline_s, codec=codec)
        transfer_s = time.perf_counter() - started - entry.waited_s
        return list(entry.tensors), max(transfer_s, 0.0)

    async def _fetch_as_is(self, peer: str, key: str, deadline_s: float) -> list[Tensor]:
        with self._fetching(peer, key):
            return list((await fetch(self.node, peer, key, deadline_s=deadline_s)).tensors)

    @contextlib.contextmanager
    def _fetching(self, peer: str, key: str) -> Iterator[None]:
        number = next(self._fetch_count)
        self._fetches[number] = (peer, key, time.monotonic())
        try:
            yield
        finally:
            del self._fetches[number]


def logged_commit(header: dict[str, Any], tensors: Sequence[Tensor]) -> Commit:
    """What :meth:`WorkerService.log` has given.

    Raises:
        ProtocolError: It is malformed.
    """
    log = LoggedSums.from_dict(header)
    if len(tensors) != len(log.groups):
        raise ProtocolError(f"{len(tensors)} vectors came with the sums of {len(log.groups)} groups.")
    return [Reduced(g, 0, frozenset(), vector) for g, vector in zip(log.groups, tensors)], log.commit


def _of_step(server: StageServer, step: int) -> frozenset[str]:
    """The microbatches of a step that a stage has accumulated."""
    return frozenset(name for name in server.accumulator.accumulated if name.startswith(f"{step}:"))


def _concerns(group: Group, part: StageServer | Incoming) -> bool:
    """Whether a group sums what belongs to this stage."""
    if not group.parameters:
        return group.name == buffers_group(part.index)
    return part.owned_names().issuperset(group.parameters)


def _all_of(part: StageServer | Incoming, reduced: list[Reduced]) -> list[Reduced] | None:
    """What of these sums belongs to this stage; ``None`` if that is not all that the stage needs."""
    mine = [r for r in reduced if _concerns(r.group, part)]
    summed = {name for r in mine for name in r.group.parameters}
    return mine if summed >= part.owned_names() else None
