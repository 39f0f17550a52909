"""Drives microbatches through the stages, and repairs just what breaks.

Each microbatch gets a route and, for every stage at once, a *hop*: a coroutine that sends the stage's task to the
route's worker and waits for the reply. The data moves between the workers by itself. When a hop's worker fails, the
hop chooses another one and tells its neighbours, whose tasks are sent again with the new source; a worker that had
finished its part already keeps it. When a worker is given up, what it had accumulated in this step is repeated the
same way, at its stage alone: the neighbours' outboxes still hold the activations and gradients, or their producers make
them again (their *lineage*: a stage's output follows from its input and its seed, in the end from the batch).

Whose fault a silence is, the worker itself is asked (``probe``): one that waits for a neighbour is well, one that
computes far beyond its usual time or does not answer at all is given up.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

from torch import Tensor

from lightning_swarm.policies.banning import Cause, link
from lightning_swarm.swarm.calls import ProbeReply, ProbeRequest, TaskReply
from lightning_swarm.swarm.errors import (
    DeadlineExceeded,
    Evicted,
    NodeClosed,
    NotFinite,
    PeerBusy,
    PeerStale,
    PeerUnreachable,
    ProtocolError,
    RemoteError,
    SourceFailed,
    SwarmError,
)
from lightning_swarm.swarm.loop import unheard
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.tree import decode_tree
from lightning_swarm.trainer.flight import Flight
from lightning_swarm.trainer.ledger import Ledger
from lightning_swarm.trainer.roster import Roster, Worker

log = logging.getLogger(__name__)

_SOURCE_DEADLINE_S = 3600.0
_PROBE_DEADLINE_S = 5.0
_MOST_ATTEMPTS = 40
_BUSY_S = 0.1

_CAUSES: dict[type[SwarmError], Cause] = {
    PeerUnreachable: Cause.RESET,
    DeadlineExceeded: Cause.TIMEOUT,
    PeerStale: Cause.RESET,
    ProtocolError: Cause.PROTOCOL,
    NodeClosed: Cause.RESET,
    PeerBusy: Cause.BUSY,
    RemoteError: Cause.FAILED,
}


class Pipeline:
    """Sends microbatches through the swarm.

    Args:
        node: The trainer's peer.
        roster: Who serves what.
        in_flight: The largest number of microbatches under way at once; ``None``: as many as keep all workers busy.
    """

    def __init__(self, node: Node, roster: Roster, in_flight: int | None = None) -> None:
        self._node = node
        self._roster = roster
        self._in_flight = in_flight
        self._flying: dict[str, Flight] = {}
        self._stages_done: Callable[[Collection[int]], None] | None = None
        self._total = 0
        self._sealed = False
        self._allow_nan = False
        """Whether two workers have found NaN in the same place, so that it is the model's own."""
        self.ledger = Ledger(roster.stages)

    async def run(
        self, flights: Sequence[Flight], stages_done: Callable[[Collection[int]], None] | None = None
    ) -> None:
        """Bring all of these microbatches through all stages.

        Args:
            flights: The microbatches.
            stages_done: Given with the last ones of a step: called each time when another stage has accumulated all of
                the step's microbatches, with all such stages.

        Raises:
            RemoteError: The user's step raised on a worker.
            SwarmError: A stage stayed without workers, or a microbatch failed everywhere.
        """
        started: list[asyncio.Task[None]] = []
        self._stages_done = stages_done
        if any(flight.job.training for flight in flights):
            self._total = len(self._flying) + len(flights)
        try:
            for flight in flights:
                await self._await_slot(started)
                await self._start(flight)
                started.append(asyncio.create_task(self._settle(flight), name=f"microbatch {flight.name}"))
            await _all_or_first_error(started)
        except BaseException:
            for flight in flights:
                if not flight.landed:
                    self._abandon(flight)
            raise
        finally:
            self._stages_done = None
            for task in started:
                task.cancel()
            # Training's stay: a worker that is given up now, or later in the step, leaves parts of them to be repeated.
            for flight in flights:
                if not flight.job.training:
                    self._abandon(flight)

    async def _await_slot(self, started: list[asyncio.Task[None]]) -> None:
        while True:
            under_way = [task for task in started if not task.done()]
            limit = self._in_flight or self._roster.in_flight_target()
            if len(under_way) < limit:
                break
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        for task in started:
            if task.done():
                task.result()

    async def _start(self, flight: Flight) -> None:
        flight.route = list(await self._roster.route())
        self._flying[flight.name] = flight
        for stage in range(len(flight.route)):
            self._drive(flight, stage)

    def _drive(self, flight: Flight, stage: int) -> None:
        flight.hops[stage] = asyncio.create_task(self._hop(flight, stage), name=f"{flight.name} at stage {stage}")

    async def _settle(self, flight: Flight) -> None:
        """Until all hops have succeeded, those that were driven anew included."""
        while not flight.landed:
            await _all_or_first_error([hop for hop in flight.hops if hop is not None])

    def _abandon(self, flight: Flight) -> None:
        self._flying.pop(flight.name, None)
        for hop in flight.hops:
            if hop is not None:
                hop.cancel()

    async def _hop(self, flight: Flight, stage: int) -> None:
        """One stage of one microbatch, until a worker has done it."""
        retried = False
        problem: SwarmError | None = None
        for attempt in range(_MOST_ATTEMPTS):
            worker = flight.route[stage]
            membership = self._roster.workers.get(worker)
            if membership is None:
                await self._reroute(flight, stage, excluding=worker)
                continue
            flight.rerouted[stage].clear()
            if retried:
                log.info("Microbatch %s is sent again to worker %s of stage %d", flight.name, worker[-6:], stage)
                self._roster.tally.count("retried", stage, worker)
            retried = True
            try:
                header, tensors = await self._process(flight, stage, worker)
                reply, effects = TaskReply.from_dict(header), decode_tree(header["effects"], tensors)
                if self._roster.workers.get(worker) is not membership:
                    # Given up while its answer was on its way: what it holds is in nobody's sum.
                    raise _Rerouted
            except _Rerouted:
                continue
            except SourceFailed as error:
                problem, retried = error, error.cause != Evicted.__name__
                await self._blame_source(flight, stage, worker, error, attempt)
                continue
            except tuple(_CAUSES) as error:
                if self._concerns_all(flight, stage, worker, error):
                    raise
                problem = error
                self._blame(flight, stage, membership, error)
                if flight.route[stage] == worker:
                    await self._reroute(flight, stage, excluding=worker)
                await asyncio.sleep(min(0.05 * attempt, 1.0))
                continue
            flight.effects[stage] = effects
            self._roster.completed(worker, stage, reply.compute_s, reply.held_bytes)
            for source, seconds in reply.transfers.items():
                self._roster.transferred(source, worker, seconds)
            self._roster.tally.count("processed", stage, worker)
            if reply.duplicate:
                self._roster.tally.count("duplicate", stage, worker)
            self._roster.tally.done(flight.name, stage)
            if flight.job.training:
                self.ledger.record(flight.name, stage, worker)
                self._tell_stages_done(stage)
            self._judge(flight, stage)
            return
        why = problem or "each time its worker was replaced"
        raise SwarmError(
            f"Microbatch {flight.name} failed {_MOST_ATTEMPTS} times at stage {stage}; the last time: {why}"
        )

    async def _remake(self, flight: Flight, stage: int, output: Literal["activation", "gradient"]) -> None:
        """Have a worker make again what its outbox has evicted; whose sources were evicted, too, comes back here.

        When this returns, whoever needs it asks again: the worker may have been replaced instead.
        """
        for attempt in range(_MOST_ATTEMPTS):
            worker = flight.route[stage]
            membership = self._roster.workers.get(worker)
            if membership is None:
                return
            flight.rerouted[stage].clear()
            try:
                await self._process(flight, stage, worker, output)
            except _Rerouted:
                continue
            except SourceFailed as error:
                await self._blame_source(flight, stage, worker, error, attempt)
                continue
            except PeerBusy:
                self._roster.counters[f"failed: {Cause.BUSY.value}"] += 1
                await asyncio.sleep(busy_pause_s(attempt))
                continue
            except tuple(_CAUSES) as error:
                if self._concerns_all(flight, stage, worker, error):
                    raise
                self._blame(flight, stage, membership, error)
                return
            log.info("Worker %s has made the %s of %s at stage %d again", worker[-6:], output, flight.name, stage)
            self._roster.tally.count("replayed", stage, worker)
            return
        raise SwarmError(f"The {output} of microbatch {flight.name} at stage {stage} could not be made again.")

    def _concerns_all(self, flight: Flight, stage: int, worker: str, error: SwarmError) -> bool:
        """Whether another worker would not help: our own peer has ended, or the user's step raised, and here is nobody
        else to try it, or it raised on two workers. One alone may be out of memory, or have a broken device.
        """
        if isinstance(error, RemoteError):
            first = flight.raised_at.setdefault(stage, worker)
            return first != worker or self._alone(worker, stage)
        return isinstance(error, NodeClosed) and error.peer is None

    def _blame(self, flight: Flight, stage: int, worker: Worker, error: SwarmError) -> None:
        """A call to a worker failed through its own fault."""
        log.debug("Microbatch %s: %s failed at stage %d: %s", flight.name, worker.peer[-6:], stage, error)
        if self._roster.workers.get(worker.peer) is worker:
            # Else it has left, was given up, or has joined again, perhaps elsewhere: nobody's fault any more.
            self._roster.failed(worker.peer, stage, _CAUSES[type(error)], str(error))
            if not isinstance(error, PeerBusy):
                self.lose(worker.peer)

    def _tell_stages_done(self, stage: int) -> None:
        if self._stages_done is not None and self.ledger.count(stage) == self._total:
            self._stages_done([s for s in range(self.ledger.stages) if self.ledger.count(s) == self._total])

    async def _process(
        self, flight: Flight, stage: int, worker: str, remake: Literal["activation", "gradient"] | None = None
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Call ``process``; probe the worker when it takes long; stop when a neighbour was replaced."""
        task, tensors = flight.task(stage, _SOURCE_DEADLINE_S, self._allow_nan, remake)
        call = asyncio.ensure_future(
            self._node.call(worker, "process", task.to_dict(), tensors, deadline_s=_SOURCE_DEADLINE_S)
        )
        unheard(call)  # It may fail at the moment when its answer is not wanted any more.
        changed = asyncio.ensure_future(flight.rerouted[stage].wait())
        try:
            while True:
                patience_s = self._roster.deadline_s(worker, stage)
                await asyncio.wait({call, changed}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    return call.result()
                if changed.done():
                    raise _Rerouted
                await self._probe(worker, stage, flight.name, patience_s)
        finally:
            changed.cancel()
            call.cancel()

    async def _probe(self, worker: str, stage: int, microbatch: str, patience_s: float) -> None:
        """Ask a silent worker what it does.

        Raises:
            DeadlineExceeded: It is to blame for the silence.
            SourceFailed: It waits for what another worker has offered for long.
        """
        status = await probe(self._node, worker, ProbeRequest(microbatch))
        allowed_s = max(patience_s, self._roster.first_s(worker, stage))
        if status.computing_s > allowed_s and not self._roster.waits_for(worker, stage):
            raise DeadlineExceeded(
                f"{worker} has computed for {status.computing_s:.1f} s, its usual time allows {allowed_s:.1f} s",
                worker,
            )
        await check_links(self._node, self._roster, worker, status, patience_s)

    async def _blame_source(self, flight: Flight, stage: int, worker: str, error: SourceFailed, attempt: int) -> None:
        """A worker could not get something from its neighbour, not for the first time if ``attempt`` is more than 0."""
        neighbour = next(
            (s for s in (stage - 1, stage + 1) if 0 <= s < len(flight.route) and flight.route[s] == error.peer), None
        )
        if neighbour is None or error.peer is None:
            return  # Replaced meanwhile: the task is sent again with the new source.
        if error.cause == Evicted.__name__:
            await self._remake(flight, neighbour, "activation" if neighbour < stage else "gradient")
            return
        log.debug("Microbatch %s: %s cannot reach %s: %s", flight.name, worker[-6:], error.peer[-6:], error)
        if error.cause == PeerBusy.__name__:
            self._roster.counters[f"failed: {Cause.BUSY.value}"] += 1
            await asyncio.sleep(busy_pause_s(attempt))
            return
        if error.cause == NotFinite.__name__:
            await self._doubt(flight, stage, neighbour, error)
            return
        if error.cause == ProtocolError.__name__:
            await self._replace(flight, neighbour, error, Cause.PROTOCOL)
            return
        try:
            with contextlib.suppress(PeerBusy):  # That is an answer.
                await probe(self._node, error.peer, ProbeRequest(flight.name))
            reachable = error.cause in ("PeerUnreachable", "DeadlineExceeded")
        except SwarmError:
            reachable = False
        if reachable:
            self._roster.ban_link(link(error.peer, worker))
            if flight.done(stage):
                # It was to make something again, and what it has accumulated must not be accumulated elsewhere, too.
                self.lose(worker)
                return
            if self._alone(worker, stage) and not self._alone(error.peer, neighbour):
                await self._replace(flight, neighbour, error, None)
                return
            self._roster.withdraw(worker, stage)
            await self._reroute(flight, stage, excluding=worker)
        else:
            await self._replace(flight, neighbour, error, Cause.RESET)

    def _alone(self, worker: str, stage: int) -> bool:
        """Whether nobody else could do a worker's work."""
        return all(other.peer == worker for other in self._roster.at_stage(stage))

    async def _replace(self, flight: Flight, stage: int, error: SourceFailed, cause: Cause | None) -> None:
        """Give a worker up that another one complains about; without a cause it is only suspected."""
        culprit = error.peer
        assert culprit is not None
        if flight.route[stage] != culprit:
            return
        if cause is not None and culprit in self._roster.workers:
            self._roster.failed(culprit, stage, cause, str(error))
        self.lose(culprit)
        if flight.route[stage] == culprit:
            await self._reroute(flight, stage, excluding=culprit)

    async def _doubt(self, flight: Flight, stage: int, neighbour: int, error: SourceFailed) -> None:
        """A worker sent NaN. Whether that is its fault shows when another one does the same work."""
        assert error.peer is not None
        if self._allow_nan or flight.allow_nan:
            return  # It was accepted meanwhile.
        suspect = flight.suspects.get((stage, neighbour))
        others = [worker for worker in self._roster.at_stage(neighbour) if worker.peer != error.peer]
        if suspect is not None and suspect != error.peer:
            log.warning("Two workers find NaN at stage %d: from now on it is taken for the model's own.", neighbour)
            self._allow_nan = True
            self._roster.counters["NaN accepted"] += 1
        elif others:
            log.warning("Worker %s of stage %d sent NaN; another one does its work again.", error.peer[-6:], neighbour)
            flight.suspects[stage, neighbour] = error.peer
            await self._replace(flight, neighbour, error, None)
        else:
            flight.allow_nan = True
            self._roster.counters["NaN accepted"] += 1

    def _judge(self, flight: Flight, stage: int) -> None:
        """A stage has got from another worker what it doubted: if that had no NaN, the first one was wrong."""
        for pair in [pair for pair in flight.suspects if pair[0] == stage]:
            suspect = flight.suspects.pop(pair)
            if self._allow_nan or flight.allow_nan:
                continue
            self._roster.ban(suspect, pair[1], Cause.WRONG_RESULT, "it sent NaN where another worker has none")
            if suspect in self._roster.workers:
                self.lose(suspect)

    async def _reroute(self, flight: Flight, stage: int, excluding: str) -> None:
        """Another worker for one hop; its neighbours are told."""
        last = len(flight.route) - 1
        chosen = await self._roster.pick(
            stage,
            excluding,
            previous=flight.route[stage - 1] if stage > 0 else None,
            following=flight.route[stage + 1] if stage < last else None,
        )
        if flight.route[stage] != excluding:
            self._roster.withdraw(chosen, stage)
            return
        flight.route[stage] = chosen
        if flight.done(stage):
            self._drive(flight, stage)
        for concerned in (stage - 1, stage, stage + 1):
            if 0 <= concerned < len(flight.route):
                flight.rerouted[concerned].set()

    def lose(self, worker: str) -> None:
        """Give a worker up: it is out of the swarm, and what it had accumulated in this step is repeated by others."""
        self._roster.remove(worker)
        if self._sealed:
            return
        lost = self.ledger.lose(worker)
        for microbatch, stage in lost:
            if microbatch in self._flying:
                self._drive(self._flying[microbatch], stage)
        missing = []
        for flight in self._flying.values():
            for stage, chosen in enumerate(flight.route):
                if chosen == worker:
                    flight.rerouted[stage].set()
                    if not flight.done(stage):
                        missing.append((flight.name, stage))
        for _, stage in lost:
            self._roster.tally.count("lost", stage, worker)
        if missing:
            log.info(
                "%d microbatches that worker %s had accumulated and %d that it was at are given to others",
                len(lost),
                worker[-6:],
                len(missing) - len(lost),
            )
        self._roster.tally.missing(missing)

    async def repair(self) -> None:
        """Wait until every microbatch of the step is accumulated again at every stage."""
        for flight in list(self._flying.values()):
            await self._settle(flight)

    @contextlib.contextmanager
    def sealed(self) -> Iterator[None]:
        """While the step is committed: what a worker has accumulated is in the sum, even if it is given up now."""
        self._sealed = True
        try:
            yield
        finally:
            self._sealed = False

    @property
    def complete(self) -> bool:
        """Whether every microbatch of the step is accumulated at every stage, by somebody who takes part still."""
        known = len(self._flying) == self._total and not self.ledger.missing(self._flying)
        return known and self.ledger.holders() <= self._roster.workers.keys()

    def forget(self) -> None:
        """The step is committed."""
        for flight in list(self._flying.values()):
            self._abandon(flight)
        self.ledger.clear()
        self._total = 0


async def probe(node: Node, worker: str, request: ProbeRequest) -> ProbeReply:
    """Ask a worker what it does; a short call, as one that lives answers at once."""
    header, _ = await node.call(worker, "probe", request.to_dict(), deadline_s=_PROBE_DEADLINE_S)
    return ProbeReply.from_dict(header)


async def check_links(node: Node, roster: Roster, worker: str, status: ProbeReply, patience_s: float) -> None:
    """Whether something that a worker waits for has been offered for long: then no transfer is on its way, although
    both ends live.

    Raises:
        SourceFailed: Blames the other end.
    """
    for wait in status.waits:
        allowed_s = max(patience_s, roster.patience_s(wait.peer, worker))
        if wait.seconds <= allowed_s:
            continue
        try:
            offered_s = (await probe(node, wait.peer, ProbeRequest(key=wait.key))).offered_s
        except SwarmError as error:
            raise SourceFailed(f"{wait.peer} does not answer: {error}", wait.peer, type(error).__name__) from error
        if offered_s is not None and offered_s > allowed_s:
            raise SourceFailed(
                f"{worker} has waited {wait.seconds:.1f} s for {wait.key!r}, which {wait.peer} has offered for "
                f"{offered_s:.1f} s",
                wait.peer,
                DeadlineExceeded.__name__,
            )


def busy_pause_s(attempt: int) -> float:
    """How long to leave a worker alone that has refused so often."""
    return _BUSY_S * 2 ** min(attempt, 5)


class _Rerouted(Exception):
    """A neighbour was replaced while this stage worked."""


async def _all_or_first_error(tasks: Sequence[asyncio.Future[Any]]) -> None:
    if not tasks:
        return
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        if not task.cancelled():
            task.result()
