"""Who serves which stage: joins, leaves, and the policies that choose among the workers.

The roster is the only place where the policies meet the swarm: it hands them the time and what happened, and acts on
what they decide. Everything here runs on the node's event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_swarm.policies.banning import BanList, Cause
from lightning_swarm.policies.deadlines import Deadlines
from lightning_swarm.policies.routing import LinkCosts, StageEmpty, StochasticWiring
from lightning_swarm.policies.utilization import ServiceTime
from lightning_swarm.swarm.errors import SwarmError
from lightning_swarm.trainer.tally import Tally

log = logging.getLogger(__name__)

_NEWCOMER_S = 30.0
"""How long a stage may wait for a new worker where another stage could spare one; longer than a local one's start."""
OUTBOX_SHARE = 0.25
"""What a worker's outbox may take of the memory that its stage leaves; the rest is for microbatches under way."""


@dataclass
class Worker:
    """A worker as the trainer knows it."""

    peer: str
    stage: int
    device: str
    local_index: int
    memory_bytes: int = 0
    """What it can hold at all; 0: it does not say."""
    ready: bool = False
    """Whether it holds the current step's state and gets tasks."""
    moving_to: int | None = None
    """The stage that it prepares for; it takes part in that stage's reductions, without contributing."""
    prepared: bool = False
    """Whether it has that stage's state."""
    rebuilds: bool = False
    """Whether it takes a stage over that nobody serves, from the trainer's copy and the gradients since then."""
    leaving: bool = False
    """Whether it has announced that it will be gone soon; it serves until then."""
    joined_s: float = field(default_factory=time.monotonic)
    processed: int = 0
    compute_s: float = 0.0

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages in whose reductions it takes part."""
        return (self.stage,) if self.moving_to is None else (self.stage, self.moving_to)


class StartupTimeout(SwarmError):
    """A stage had no worker within ``startup_timeout``."""


class StageLost(SwarmError):
    """Nobody serves a stage any more; the workers have to be spread anew."""

    def __init__(self, stage: int) -> None:
        super().__init__(f"Stage {stage} has lost its last worker.")
        self.stage = stage


class Roster:
    """The workers of a run under one plan.

    Args:
        stages: How many stages the plan has.
        tally: Where events are counted.
        startup_timeout_s: How long a stage may stay without any worker.
        check: Called while waiting; raises what makes waiting pointless (a local worker that died at its start).
        replaceable: Whether somebody besides a stage's workers has its current state, or is about to.
        state_bytes: What a stage's state takes of a worker's memory.
        bans: Whom to leave alone.
    """

    def __init__(
        self,
        stages: int,
        tally: Tally,
        startup_timeout_s: float,
        check: Callable[[], None],
        replaceable: Callable[[int], bool],
        state_bytes: Callable[[int], int],
        bans: BanList | None = None,
    ) -> None:
        self.stages = stages
        self.tally = tally
        self.counters = tally.counters
        self._replaceable = replaceable
        self.state_bytes = state_bytes
        self.workers: dict[str, Worker] = {}
        self._startup_timeout_s = startup_timeout_s
        self._check = check
        self._links = LinkCosts(microbatch_bytes=0.0)
        self._wiring = StochasticWiring(stages, edge_cost=self._links)
        self.bans = bans or BanList()
        self._cut_links: set[str] = set()
        self._deadlines = Deadlines()
        self._downloads = ServiceTime()
        self._abandoned: set[int] = set()
        self._turns: Counter[int] = Counter()
        self._changed = asyncio.Event()

    # Membership

    def join(self, peer: str, device: str, local_index: int, stage: int, memory_bytes: int = 0) -> Worker:
        """A worker was assigned a stage and fetches its state; it has so much memory (0: enough)."""
        self.remove(peer)
        self.workers[peer] = Worker(peer, stage, device, local_index, memory_bytes)
        self.tally.count("joins", stage, peer)
        return self.workers[peer]

    def admit(self, peer: str) -> None:
        """A worker holds the current state: it gets tasks from now on."""
        worker = self.workers[peer]
        if not worker.ready:
            worker.ready = True
            if not worker.prepared:
                self.downloaded(time.monotonic() - worker.joined_s)
            worker.prepared = False
            # It may be the same process, which joins again because it was given up: that refutes that it cannot be
            # reached, not that it hangs or sends what is wrong.
            self.bans.announced(peer, time.monotonic())
            self._wiring.add(worker.stage, peer)
            self._notify()

    def move(self, peer: str) -> None:
        """A worker has left its stage for the one that it has prepared for, and will be admitted there."""
        worker = self.workers[peer]
        assert worker.moving_to is not None
        self._wiring.remove(peer)
        self._deadlines.forget(peer)
        worker.stage, worker.moving_to, worker.ready = worker.moving_to, None, False
        worker.processed, worker.compute_s = 0, 0.0
        self.counters["moves"] += 1
        self._notify()

    def remove(self, peer: str) -> None:
        """A worker has left or was given up."""
        worker = self.workers.pop(peer, None)
        if worker is not None:
            self._wiring.remove(peer)
            self._deadlines.forget(peer)
            self._links.forget(peer)
            self.tally.count("leaves", worker.stage, peer)
            log.info("Worker %s of stage %d (%s) is out", peer[-6:], worker.stage, worker.device)
            self._notify()

    def at_stage(self, stage: int, *, ready: bool = True) -> list[Worker]:
        """The workers of a stage, by peer id; with ``ready=False`` also those that fetch their state still."""
        found = (w for w in self.workers.values() if w.stage == stage and (w.ready or not ready))
        return sorted(found, key=lambda w: w.peer)

    def donors(self, stage: int) -> tuple[list[Worker], list[Worker]]:
        """Who has a stage's state, best first, and those among them whom only need makes one believe: who is banned may
        have computed what is wrong.

        Each call begins with the next worker, so that newcomers spread over them; who leaves soon is asked last.
        """
        banned, workers = self._banned(), self.at_stage(stage)
        turn = self._turns[stage] % max(1, len(workers))
        self._turns[stage] += 1
        rotated = sorted(workers[turn:] + workers[:turn], key=lambda worker: worker.leaving)
        return [w for w in rotated if w.peer not in banned], [w for w in rotated if w.peer in banned]

    def neediest_stage(self, possible: Sequence[int]) -> int:
        """Where the next worker should go: of the possible stages the one with the fewest workers, the first of
        them; workers that move count where they will be, and those that leave do not count.
        """
        counts = Counter(worker.stages[-1] for worker in self.workers.values() if not worker.leaving)
        return min(possible, key=lambda stage: (counts[stage], stage))

    def leaves(self, peer: str) -> None:
        """A worker has announced that it will be gone soon."""
        worker = self.workers.get(peer)
        if worker is not None and not worker.leaving:
            worker.leaving = True
            self.counters["departures announced"] += 1
            log.info("Worker %s of stage %d will leave soon", peer[-6:], worker.stage)

    def abandon(self, stage: int) -> None:
        """Wait no longer for a new worker of a stage that has none: it counts as lost, and all are spread anew."""
        self._abandoned.add(stage)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_all_stages(self) -> None:
        """Until every stage has a worker that is ready.

        Raises:
            StageLost: A stage has no worker, and its state is nowhere or others can spare one.
            StartupTimeout: Names the stages that had none for ``startup_timeout``.
        """
        started = said = time.monotonic()
        while True:
            empty = [s for s in range(self.stages) if not self.at_stage(s)]
            if not empty:
                return
            self._check()
            now = time.monotonic()
            newcomer_s = min(_NEWCOMER_S, self._startup_timeout_s / 2)
            others_can = now - started > newcomer_s and any(len(self.at_stage(s)) > 1 for s in range(self.stages))
            for stage in empty:
                if self.at_stage(stage, ready=False):
                    self._abandoned.discard(stage)
                elif others_can or stage in self._abandoned or not self._replaceable(stage):
                    raise StageLost(stage)
            names = ", ".join(map(str, empty))
            seen = "; ".join(f"{w.peer[-6:]} at stage {w.stage}" for w in self.workers.values()) or "none"
            if now - started > self._startup_timeout_s:
                raise StartupTimeout(
                    f"No worker serves stage {names} after {now - started:.0f} s (startup_timeout). Workers seen: "
                    f"{seen}. "
                    "Start more workers with the join line, or use fewer stages."
                )
            if now - said > 10:
                said = now
                log.warning("Waiting for a worker of stage %s. Workers seen: %s.", names, seen)
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), 0.2)
            except asyncio.TimeoutError:
                continue

    # Choices

    async def route(self) -> tuple[str, ...]:
        """One ready worker a stage for a new microbatch; waits while a stage has none."""
        while True:
            await self._await_release(range(self.stages))
            self._reopen_links()
            try:
                route = self._wiring.route(time.monotonic(), self._banned())
            except StageEmpty:
                await self.wait_for_all_stages()
                continue
            for peer in route:
                self.bans.dispatched(time.monotonic(), peer)
            return route

    async def pick(self, stage: int, excluding: str, previous: str | None = None, following: str | None = None) -> str:
        """Another worker of a stage, the excluded one only if there is no other; waits while there is none.

        Args:
            stage: Which.
            excluding: Who failed.
            previous: The worker in front, to which it should have a link.
            following: The worker behind.
        """
        while True:
            await self._await_release([stage])
            self._reopen_links()
            try:
                chosen = self._wiring.pick(
                    stage,
                    time.monotonic(),
                    banned=self._banned() | {excluding},
                    previous=previous,
                    following=following,
                )
            except StageEmpty:
                await self.wait_for_all_stages()
                continue
            self.bans.dispatched(time.monotonic(), chosen)
            return chosen

    async def _await_release(self, stages: Iterable[int]) -> None:
        """Where all of a stage are banned and their bans count all the same: until the first of them is free."""
        while self.bans.when_all_banned == "wait":
            now = time.monotonic()
            ends = [
                self.bans.next_release_s(now, [w.peer for w in at_stage])
                for stage in stages
                if (at_stage := self.at_stage(stage))
            ]
            latest_s = max((end for end in ends if end is not None), default=None)
            if latest_s is None:
                return
            self._check()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(latest_s - now, 1.0))

    def _reopen_links(self) -> None:
        """Dead links whose ban is over may be tried again; each time they fail their ban is longer."""
        now = time.monotonic()
        for name in [name for name in self._cut_links if not self.bans.is_banned(now, name)]:
            self._cut_links.discard(name)
            source, _, target = name.partition(">")
            log.info("The link from %s to %s is tried again", source[-6:], target[-6:])
            self._links.restore(source, target)

    def _banned(self) -> frozenset[str]:
        return self.bans.banned(time.monotonic())

    def in_flight_target(self) -> int:
        """How many microbatches under way keep all workers busy."""
        try:
            return self._wiring.in_flight_target()
        except StageEmpty:
            return 1

    def deadline_s(self, peer: str, stage: int, call: str = "process") -> float:
        """How long a call may take a worker before it is asked what it does."""
        ahead = self._wiring.outstanding(peer) if call == "process" else 0
        return self._deadlines.deadline_s(peer, stage, call, ahead=ahead)

    def first_s(self, peer: str, stage: int) -> float:
        """How long a worker may compute for its first microbatch, as others needed for theirs; 0 after that."""
        return self._deadlines.first_s(peer, stage, "process")

    def waits_for(self, peer: str, stage: int, call: str = "process") -> bool:
        """Whether to go on waiting for a worker that computes for longer than its usual time allows.

        Nobody else can do the work of a stage's only worker: it may have become slow, and is given up to 64 times the
        usual time.
        """
        if any(worker.peer != peer for worker in self.at_stage(stage)):
            return False
        waits = self._deadlines.extend(peer, stage, call)
        if waits:
            log.warning("Worker %s computes for long, but nobody else serves stage %d: it gets time", peer[-6:], stage)
        return waits

    def service_s(self, peer: str) -> float | None:
        """Measured seconds that a worker computes for a microbatch."""
        return self._wiring.measured_s(peer) if self._wiring.stage_of(peer) is not None else None

    @property
    def download_s(self) -> float | None:
        """How long it takes to get a stage's state, as measured; ``None`` before the first."""
        return self._downloads.seconds

    # What happened

    def downloaded(self, seconds: float) -> None:
        """A worker has got a stage's state."""
        self._downloads.update(seconds)

    def completed(self, peer: str, stage: int, compute_s: float, held_bytes: int = 0) -> None:
        """A worker has done a microbatch in so many seconds of computing, and held so many bytes for its backward pass.

        The bytes and the memory that it has declared say how many microbatches it can hold.
        """
        now = time.monotonic()
        self._wiring.complete(stage, peer, compute_s, now=now)
        self._deadlines.completed(peer, stage, "process", compute_s)
        self.bans.succeeded(now, peer)
        worker = self.workers.get(peer)
        if worker is not None:
            worker.processed += 1
            worker.compute_s += compute_s
            if worker.memory_bytes and held_bytes:
                free_bytes = worker.memory_bytes - self.state_bytes(worker.stage)
                if worker.device.startswith("cpu"):
                    free_bytes = int((1 - OUTBOX_SHARE) * free_bytes)
                self._wiring.limit(peer, max(1, free_bytes // held_bytes))

    def transferred(self, source: str, target: str, seconds: float) -> None:
        """A microbatch's tensors took so long from one worker to another."""
        if {source, target} <= self.workers.keys():  # Of one that has gone since, nobody asks any more.
            self._links.observed(source, target, seconds)

    def took(self, peer: str, stage: int, call: str, seconds: float) -> None:
        """A worker has answered a call other than ``process``."""
        if peer in self.workers:
            self._deadlines.completed(peer, stage, call, seconds)

    def withdraw(self, peer: str, stage: int) -> None:
        """A worker was picked but not used."""
        self._wiring.withdraw(stage, peer)

    def failed(self, peer: str, stage: int, cause: Cause, why: str) -> None:
        """A call to a worker failed through its own fault."""
        now = time.monotonic()
        if cause is Cause.TIMEOUT:
            self._wiring.timed_out(stage, peer, self.deadline_s(peer, stage), now=now)
            self._deadlines.timed_out(peer, stage, "process")
        else:
            self._wiring.failed(stage, peer)
        self.ban(peer, stage, cause, why)

    def ban(self, peer: str, stage: int, cause: Cause, why: str) -> None:
        """Leave a worker alone for a while, whether or not it is in the swarm now."""
        now = time.monotonic()
        ban = self.bans.report(now, peer, cause)
        self.counters[f"failed: {cause.value}"] += 1
        if ban is not None:
            self.tally.banned(peer, stage, cause.value, ban.until_s - now)
            log.warning(
                "Worker %s of stage %d is banned for %.0f s: %s (%s)",
                peer[-6:],
                stage,
                ban.until_s - now,
                cause.value,
                why,
            )

    def patience_s(self, source: str, target: str) -> float:
        """How long a transfer between two workers may take before their link counts as dead."""
        return self._links.patience_s(source, target)

    def ban_link(self, name: str) -> None:
        """Two workers cannot reach each other, though the trainer reaches both."""
        now = time.monotonic()
        ban = self.bans.report(now, name, Cause.LINK)
        source, _, target = name.partition(">")
        if ban is not None:
            fetcher = self.workers.get(target)
            self.tally.link_banned(name, fetcher.stage if fetcher is not None else -1, ban.until_s - now)
            log.warning("The link from %s to %s is left for %.0f s", source[-6:], target[-6:], ban.until_s - now)
        self._links.cut(source, target)
        self._cut_links.add(name)

    def report(self) -> list[dict[str, Any]]:
        """One row a worker."""
        banned = self._banned()
        by_stage: Counter[int] = Counter()
        for worker in self.workers.values():
            by_stage[worker.stage] += worker.processed
        return [
            {
                "stage": worker.stage,
                "peer": worker.peer,
                "local_index": worker.local_index,
                "device": worker.device,
                "ready": worker.ready,
                "moving_to": worker.moving_to,
                "leaving": worker.leaving,
                "banned": worker.peer in banned,
                "microbatches": worker.processed,
                "share": worker.processed / max(1, by_stage[worker.stage]),
                "microbatches_per_s": worker.processed / worker.compute_s if worker.compute_s else 0.0,
                "outstanding": self._wiring.outstanding(worker.peer),
                "compute_s": worker.compute_s,
            }
            for worker in sorted(self.workers.values(), key=lambda w: (w.stage, w.peer))
        ]
