"""What loads a stage: service times, busy shares and the capacity that follows from them.

The other policies share these measures. They are plain data and arithmetic: a reading (:class:`SwarmLoad`) is taken by
whoever does the I/O (the trainer, the simulator), and everything here follows from it.

Capacity is counted in microbatches a second, forward and backward together. A pipeline runs at the capacity of its
weakest stage, so :func:`throughput` is the least of :func:`capacities`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = [
    "LossRate",
    "ServiceTime",
    "SwarmLoad",
    "WorkerLoad",
    "capacities",
    "effective_speeds",
    "stage_costs",
    "throughput",
]


class ServiceTime:
    """Exponential moving average of seconds a microbatch, with bias correction.

    The correction is that of Adam (Kingma and Ba, 2015, section 3): the average of the first observations is divided
    by the weight that they have so far, so the first one counts in full instead of being mixed with a made-up start.

    Args:
        smoothing: weight of a new observation. Lower it when single microbatches vary widely, raise it when workers
            change their speed often.
    """

    __slots__ = ("_sum", "_weight", "count", "smoothing")

    def __init__(self, smoothing: float = 0.2) -> None:
        if not 0.0 < smoothing <= 1.0:
            raise ValueError(f"smoothing must lie in (0, 1], got {smoothing}")
        self.smoothing = smoothing
        self.count = 0
        self._sum = 0.0
        self._weight = 0.0

    def update(self, seconds: float) -> float:
        """Take one observation in and return the new average."""
        self._sum += self.smoothing * (seconds - self._sum)
        self._weight += self.smoothing * (1.0 - self._weight)
        self.count += 1
        return self._sum / self._weight

    @property
    def seconds(self) -> float | None:
        """The average, or None before the first observation."""
        return self._sum / self._weight if self.count else None


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker in one reading.

    Args:
        peer: the worker's peer id.
        stage: the stage it serves; with ``joining`` the stage whose state it downloads.
        service_s: measured seconds a microbatch at this stage, forward and backward; None while unknown.
        speed: declared speed relative to other workers, in any unit that all share.
        busy_share: share of the last interval that it computed, 0 to 1; None while unknown.
        queue_s: seconds of work that wait in its queue.
        moving_to: the stage whose state it downloads while it still serves ``stage``.
        joining: it downloads its first state and serves nothing yet.
        leaving: it has announced that it will be gone (a spot notice) but still serves.
        allowed: the stages that fit into its memory; None for all.
    """

    peer: str
    stage: int
    service_s: float | None = None
    speed: float = 1.0
    busy_share: float | None = None
    queue_s: float = 0.0
    moving_to: int | None = None
    joining: bool = False
    leaving: bool = False
    allowed: frozenset[int] | None = None

    @property
    def destination(self) -> int:
        """The stage that it will serve once nothing is under way any more."""
        return self.stage if self.moving_to is None else self.moving_to


@dataclass(frozen=True, slots=True)
class SwarmLoad:
    """One reading of the whole swarm.

    Args:
        stages: number of stages.
        workers: all workers seen in this reading.
        stage_costs: relative work of a microbatch at each stage (the plan's FLOPs), used where nothing was measured.
    """

    stages: int
    workers: tuple[WorkerLoad, ...]
    stage_costs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.stage_costs is not None and len(self.stage_costs) != self.stages:
            raise ValueError(f"{len(self.stage_costs)} stage costs for {self.stages} stages")


def stage_costs(load: SwarmLoad) -> list[float]:
    """Seconds that a worker of speed 1 needs for a microbatch at each stage.

    Measured where the stage has measured workers (the median of service time x declared speed), otherwise the plan's
    relative cost scaled by the measured stages, otherwise 1.
    """
    samples: list[list[float]] = [[] for _ in range(load.stages)]
    for worker in load.workers:
        if worker.service_s and not worker.joining:
            samples[worker.stage].append(worker.service_s * worker.speed)
    plan = load.stage_costs or (1.0,) * load.stages
    measured = [median(values) if values else None for values in samples]
    scales = [cost / share for cost, share in zip(measured, plan) if cost is not None and share > 0]
    scale = median(scales) if scales else 1.0
    return [cost if cost is not None else max(share * scale, 1e-9) for cost, share in zip(measured, plan)]


def effective_speeds(load: SwarmLoad, costs: Sequence[float]) -> list[float]:
    """Speed of each worker, in the order of ``load.workers``: measured against its stage's cost, else as declared."""
    return [
        worker.speed if not worker.service_s or worker.joining else costs[worker.stage] / worker.service_s
        for worker in load.workers
    ]


def capacities(load: SwarmLoad) -> tuple[list[float], list[float]]:
    """Microbatches a second that each stage can do: (now, planned).

    The first counts who serves now, the second everybody where it will serve when all downloads have ended and all who
    announced their leaving are gone.
    """
    costs = stage_costs(load)
    now, planned = [0.0] * load.stages, [0.0] * load.stages
    for worker, speed in zip(load.workers, effective_speeds(load, costs)):
        stage = worker.stage
        if not worker.joining:
            now[stage] += speed / costs[stage]
        if not worker.leaving:
            if worker.moving_to is not None:
                stage = worker.moving_to
            planned[stage] += speed / costs[stage]
    return now, planned


def throughput(load: SwarmLoad) -> float:
    """Microbatches a second of the whole pipeline: the capacity of its weakest stage."""
    return min(capacities(load)[0])


class LossRate:
    """How often workers vanish, from the readings alone.

    A peer counts as lost when two readings in a row miss it, so that one false reading counts nobody; one that
    announced its leaving counts as well, since its place becomes empty all the same.

    Args:
        memory_s: how long the past counts. Shorten it when the market for spot machines changes within minutes.
    """

    def __init__(self, memory_s: float = 3600.0) -> None:
        self.memory_s = memory_s
        self._present: frozenset[str] = frozenset()
        self._missing: frozenset[str] = frozenset()
        self._last: float | None = None
        self._losses = 0.0
        self._worker_seconds = 0.0

    def observe(self, now: float, peers: Collection[str] | Iterable[str]) -> frozenset[str]:
        """Take the peers of one reading in; returns those that are confirmed as lost by it."""
        current = frozenset(peers)
        lost = self._missing - current
        if self._last is not None and now > self._last:
            kept = max(0.0, 1.0 - (now - self._last) / self.memory_s)
            self._losses *= kept
            self._worker_seconds = self._worker_seconds * kept + len(self._present) * (now - self._last)
        self._losses += len(lost)
        self._missing = self._present - current
        self._present = current
        self._last = now
        return lost

    @property
    def per_worker_s(self) -> float:
        """Losses a second and worker."""
        return self._losses / self._worker_seconds if self._worker_seconds > 0 else 0.0
