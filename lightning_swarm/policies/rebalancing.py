"""Which workers should serve another stage, and where a new worker is needed most.

The pipeline is as fast as its weakest stage (:func:`~lightning_swarm.policies.utilization.throughput`), and every
worker that comes or goes unbalances it. Two rules with the same interface, ``decide(now, load) -> moves``:

* :class:`Rebalancer`, ours. It plans on the *future* allocation (downloads that are under way count where they lead,
  announced leavers do not count), moves as many workers at once as pays, and weighs the gain against the download.
* :class:`PaperRebalancer`, SWARM's rule (Ryabinin et al., ICML 2023, section 3.2 and algorithm 2): every T seconds the
  least loaded worker of the least loaded stage goes to the most loaded stage.

Both leave a stage's last worker where it is. A moving worker serves its old stage until it holds the state of the new
one.

What is expected of the allocation with stage capacities c, where X(c) = min c, over the time until it changes anyway::

    J(c) = X(c) - lost * sum_k p_k (X(c) - X(c without one worker of k))

``lost`` is the measured losses a second times the seconds until a loss is made good, p_k the chance that it hits stage
k. So a plan pays when it raises the weakest stage, and where machines vanish often also when it spreads the spare
workers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightning_swarm.policies.utilization import (
    LossRate,
    ServiceTime,
    SwarmLoad,
    WorkerLoad,
    capacities,
    effective_speeds,
    stage_costs,
)

__all__ = ["Move", "PaperRebalancer", "Rebalancer", "RebalancingPolicy", "assign_stage"]


@dataclass(frozen=True, slots=True)
class Move:
    """A worker's move, with the numbers that caused it.

    Args:
        peer: the worker.
        source: the stage it serves now.
        target: the stage whose state it shall download and then serve.
        before: the stages' planned capacities without the decision's moves, microbatches a second.
        after: the same with all the decision's moves.
        gain: microbatches that the whole decision is expected to win.
        cost: microbatches that its downloads cost.
    """

    peer: str
    source: int
    target: int
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    gain: float = 0.0
    cost: float = 0.0

    def __str__(self) -> str:
        before, after = (", ".join(f"{value:.3g}" for value in values) for values in (self.before, self.after))
        return (
            f"{self.peer} moves from stage {self.source} to {self.target}: planned microbatches/s "
            f"[{before}] -> [{after}], expected gain {self.gain:.3g}, cost {self.cost:.3g} microbatches"
        )


class RebalancingPolicy(Protocol):
    """What the swarm and the simulator ask for."""

    period_s: float

    def decide(self, now: float, load: SwarmLoad) -> tuple[Move, ...]:
        """Moves to begin now."""
        ...


def assign_stage(load: SwarmLoad, *, speed: float = 1.0, allowed: Collection[int] | None = None) -> int:
    """The stage that a new worker should serve: the one that will be weakest.

    Workers that are still joining or moving count where they will serve, so several that come at once are spread.

    Args:
        load: the current reading, with everybody who was assigned before.
        speed: the newcomer's declared speed, in the unit of ``WorkerLoad.speed``.
        allowed: stages that fit into its memory; None for all.

    Raises:
        ValueError: ``allowed`` is empty.
    """
    stages = range(load.stages) if allowed is None else sorted(allowed)
    if not stages:
        raise ValueError("There is no stage that the worker could serve.")
    serving, planned = capacities(load)
    costs = stage_costs(load)
    return min(stages, key=lambda stage: (planned[stage], planned[stage] + speed / costs[stage], serving[stage], stage))


@dataclass(slots=True)
class _Allocation:
    """Planned capacities while moves are tried on them.

    ``count`` workers will serve each stage, ``movable`` of them may go, none of those is slower than ``slowest``.
    """

    workers: Sequence[WorkerLoad]
    speeds: Sequence[float]
    capacity: list[float]
    count: list[int]
    movable: list[int]
    slowest: list[float]
    moved: set[int] = field(default_factory=set)

    def candidates(self, stage: int, target: int) -> Iterator[tuple[WorkerLoad, float, int]]:
        """Workers of the stage that may go to another one, each with its speed and index."""
        for index, worker in enumerate(self.workers):
            if (
                worker.stage == stage
                and not (worker.joining or worker.leaving)
                and worker.moving_to is None
                and index not in self.moved
                and (worker.allowed is None or target in worker.allowed)
            ):
                yield worker, self.speeds[index], index

    def expected(self, lost: float) -> float:
        """J of the module's docstring; a lost worker is one of its stage's average."""
        weakest = min(self.capacity)
        workers = sum(self.count)
        if lost <= 0 or not workers:
            return weakest
        dip = sum(
            count * (weakest - min(weakest, capacity - capacity / count))
            for capacity, count in zip(self.capacity, self.count)
            if count
        )
        return weakest - min(lost, 1.0) * dip / workers


class Rebalancer:
    """Our rule: see the module's docstring.

    Call :meth:`decide` with every reading (every few seconds, or when something changed): it limits itself. Moves are
    ordered at most once a period, and besides when workers have been lost since; and only to stages that two readings
    in a row found in need, so a single false reading moves nobody.

    Args:
        period_s: shortest time between two decisions that no loss has caused. Lower it when downloads take seconds.
        download_s: time to fetch the state of a stage.
        horizon_s: how long a better allocation is expected to pay. Raise it for stable machines.
        min_gain: least expected gain of a decision, as a share of the present throughput.
        margin: least gain of a move for its two stages, in capacities of the worker that moves. Raise it when measured
            speeds are noisy.
        disturbance: share of its capacity that a worker (and whom it downloads from) loses during the download.
        saturated: a stage whose workers are busy less than this share of the time is not what limits the swarm: nobody
            moves there.
        react_to_losses: False decides once a period only.
    """

    def __init__(
        self,
        period_s: float = 60.0,
        *,
        download_s: float = 60.0,
        horizon_s: float = 600.0,
        min_gain: float = 0.005,
        margin: float = 0.25,
        disturbance: float = 0.1,
        saturated: float = 0.5,
        react_to_losses: bool = True,
    ) -> None:
        if not (0 < period_s < math.inf and 0 < horizon_s < math.inf and 0 <= download_s < math.inf):
            raise ValueError(
                "period_s and horizon_s must be positive and download_s cannot be negative, "
                f"got {period_s}, {horizon_s} and {download_s}."
            )
        self.period_s = period_s
        self.download_s = download_s
        self.horizon_s = horizon_s
        self.min_gain = min_gain
        self.margin = margin
        self.disturbance = disturbance
        self.saturated = saturated
        self.react_to_losses = react_to_losses
        self.losses = LossRate()
        self._needy: frozenset[int] = frozenset()
        self._last_decision: float | None = None
        self._unanswered_loss = False
        self._ordered: dict[str, tuple[int, float]] = {}
        self._averages: dict[str, tuple[int, ServiceTime]] = {}

    def decide(self, now: float, load: SwarmLoad) -> tuple[Move, ...]:
        """Moves to begin now, the most useful first; empty when nothing pays or the need is not confirmed yet.

        Args:
            now: time of the reading, in seconds of any clock that does not jump.
            load: the reading. Workers that this rule has ordered to move count as moving even if they do not report it
                yet.
        """
        if self.losses.observe(now, [worker.peer for worker in load.workers]) and self.react_to_losses:
            self._unanswered_loss = True
        load = self._with_orders(now, self._smoothed(load))
        moves = self._plan(load)
        needy, self._needy = self._needy, frozenset(move.target for move in moves)
        moves = tuple(move for move in moves if move.target in needy)
        if not moves or not (
            self._unanswered_loss or self._last_decision is None or now - self._last_decision >= self.period_s
        ):
            return ()
        self._last_decision = now
        self._unanswered_loss = False
        for move in moves:
            self._ordered[move.peer] = move.target, now
        return moves

    def _smoothed(self, load: SwarmLoad) -> SwarmLoad:
        """Average each worker's service time over the readings: the noise of one must not look like an imbalance."""
        if not any(worker.service_s for worker in load.workers):
            return load
        averages, workers = {}, []
        for worker in load.workers:
            if worker.service_s:
                stage, average = self._averages.get(worker.peer, (worker.stage, ServiceTime(0.1)))
                if stage != worker.stage:
                    average = ServiceTime(0.1)
                averages[worker.peer] = worker.stage, average
                worker = replace(worker, service_s=average.update(worker.service_s))
            workers.append(worker)
        self._averages = averages
        return replace(load, workers=tuple(workers))

    def _with_orders(self, now: float, load: SwarmLoad) -> SwarmLoad:
        """Orders that are not visible in the reading yet are followed or forgotten within a period or two."""
        if not self._ordered:
            return load
        workers = list(load.workers)
        present = {}
        for index, worker in enumerate(workers):
            order = self._ordered.get(worker.peer)
            if order is None or worker.destination == order[0] or now - order[1] > max(self.period_s, 30.0):
                continue
            present[worker.peer] = order
            workers[index] = replace(worker, moving_to=order[0])
        self._ordered = present
        return replace(load, workers=tuple(workers)) if present else load

    def _plan(self, load: SwarmLoad) -> tuple[Move, ...]:
        costs = stage_costs(load)
        plan = self._allocation(load, costs)
        before = tuple(plan.capacity)
        lost = self.losses.per_worker_s * sum(plan.count) * (self.download_s + 5.0)
        start = plan.expected(lost)
        chosen: list[tuple[WorkerLoad, int]] = []
        best: tuple[float, int, float, float, tuple[float, ...]] | None = None
        spent = 0.0
        unloaded = self._unloaded(load)
        while (step := self._best_step(plan, costs, unloaded)) is not None:
            index, target = step
            worker, speed = load.workers[index], plan.speeds[index]
            source = worker.stage
            plan.moved.add(index)
            plan.capacity[source] -= speed / costs[source]
            plan.capacity[target] += speed / costs[target]
            plan.count[source] -= 1
            plan.count[target] += 1
            plan.movable[source] -= 1
            chosen.append((worker, target))
            spent += self.disturbance * speed / costs[source] * self.download_s
            gain = (plan.expected(lost) - start) * self.horizon_s
            if (
                gain > spent
                and gain > self.min_gain * start * self.horizon_s
                and (best is None or gain - spent > best[0])
            ):
                best = gain - spent, len(chosen), gain, spent, tuple(plan.capacity)
        if best is None:
            return ()
        _, number, gain, cost, after = best
        return tuple(
            Move(worker.peer, worker.stage, target, before, after, gain, cost) for worker, target in chosen[:number]
        )

    @staticmethod
    def _allocation(load: SwarmLoad, costs: Sequence[float]) -> _Allocation:
        speeds = effective_speeds(load, costs)
        capacity, count, movable = [0.0] * load.stages, [0] * load.stages, [0] * load.stages
        slowest = [math.inf] * load.stages
        for worker, speed in zip(load.workers, speeds):
            if worker.leaving:
                continue
            there = worker.moving_to
            if there is None:
                there = worker.stage
                if not worker.joining:
                    movable[there] += 1
                    slowest[there] = min(slowest[there], speed)
            capacity[there] += speed / costs[there]
            count[there] += 1
        return _Allocation(load.workers, speeds, capacity, count, movable, slowest)

    def _unloaded(self, load: SwarmLoad) -> frozenset[int]:
        """Stages that are not what limits the swarm, by their workers' own busy shares."""
        busy: list[list[float]] = [[] for _ in range(load.stages)]
        for worker in load.workers:
            if worker.busy_share is not None and not worker.joining:
                busy[worker.stage].append(worker.busy_share)
        return frozenset(stage for stage, shares in enumerate(busy) if shares and max(shares) < self.saturated)

    def _best_step(
        self, plan: _Allocation, costs: Sequence[float], unloaded: Collection[int]
    ) -> tuple[int, int] | None:
        """The move (worker's index, target) to the weakest stage that leaves the two stages as strong as possible."""
        stages = range(len(plan.capacity))
        target = min(stages, key=lambda stage: (plan.capacity[stage], plan.movable[stage], stage))
        if target in unloaded:
            return None
        weakest = plan.capacity[target]
        best: tuple[float, float, str] | None = None
        chosen = -1
        for source in sorted(stages, key=lambda stage: -plan.capacity[stage]):
            if plan.capacity[source] <= weakest or (best is not None and plan.capacity[source] <= -best[0]):
                break
            if plan.movable[source] < 2 or plan.capacity[source] - plan.slowest[source] / costs[source] <= weakest:
                continue
            for worker, speed, index in plan.candidates(source, target):
                value = min(
                    plan.capacity[source] - speed / costs[source], plan.capacity[target] + speed / costs[target]
                )
                rank = -value, worker.queue_s, worker.peer
                least = 0.999 * self.margin * speed / costs[target]
                if value - weakest > least and (best is None or rank < best):
                    best, chosen = rank, index
        return None if best is None else (chosen, target)


class PaperRebalancer:
    """SWARM's rule: every ``period_s`` one worker goes from the least to the most loaded stage, whatever that gains.

    A stage's load is the mean over its workers of the work that waits for each; without queue times, of the busy share;
    without either, the inverse of the stage's capacity.
    """

    def __init__(self, period_s: float = 300.0) -> None:
        if not 0 < period_s < math.inf:
            raise ValueError(f"period_s must be positive, got {period_s}")
        self.period_s = period_s
        self._last_decision: float | None = None

    def decide(self, now: float, load: SwarmLoad) -> tuple[Move, ...]:
        """At most one move, once a period."""
        if self._last_decision is not None and now - self._last_decision < self.period_s:
            return ()
        self._last_decision = now
        loads = self._stage_loads(load)
        free: list[list[WorkerLoad]] = [[] for _ in range(load.stages)]
        for worker in load.workers:
            if not worker.joining and worker.moving_to is None and not worker.leaving:
                free[worker.stage].append(worker)
        target = max(range(load.stages), key=lambda stage: loads[stage])
        sources = [stage for stage in range(load.stages) if len(free[stage]) > 1 and loads[stage] < loads[target]]
        if not sources:
            return ()
        source = min(sources, key=lambda stage: loads[stage])
        able = [worker for worker in free[source] if worker.allowed is None or target in worker.allowed]
        if not able:
            return ()
        idle = min(able, key=lambda worker: (worker.queue_s, worker.busy_share or 0.0, worker.peer))
        before = tuple(capacities(load)[0])
        return (Move(idle.peer, source, target, before, before),)

    @staticmethod
    def _stage_loads(load: SwarmLoad) -> list[float]:
        serving: list[list[WorkerLoad]] = [[] for _ in range(load.stages)]
        for worker in load.workers:
            if not worker.joining:
                serving[worker.stage].append(worker)
        queued = any(worker.queue_s > 0 for worker in load.workers)
        busy = any(worker.busy_share is not None for worker in load.workers)
        if queued or busy:
            return [
                sum(worker.queue_s if queued else worker.busy_share or 0.0 for worker in workers) / len(workers)
                if workers
                else float("inf")
                for workers in serving
            ]
        return [1.0 / capacity if capacity > 0 else float("inf") for capacity in capacities(load)[0]]
