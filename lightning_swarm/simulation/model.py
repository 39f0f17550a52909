"""What a simulated swarm consists of: its costs, its workers, the tasks they are given, and the report on a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_swarm.policies.rebalancing import Move

__all__ = ["Microbatch", "SimulatedWorker", "SwarmReport", "SwarmSettings", "Task"]


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    """The swarm's costs.

    Args:
        stages: number of stages.
        forward_s: seconds of a forward pass a microbatch at speed 1, one for all stages or one a stage.
        backward_ratio: seconds of a backward pass over those of the forward pass.
        overhead_s: seconds that each pass occupies the worker besides, whatever its speed (calls, serialization).
        noise: standard deviation of the logarithm of a pass's seconds.
        activation_bytes: what crosses a boundary a microbatch; gradients are as large.
        microbatches: microbatches a step; None for one endless step.
        sync_s: reduction and commit of a step.
        download_s: fetching the state of a stage.
        in_flight: fixed number of microbatches in flight; None asks the wiring.
        slack: see :meth:`StochasticWiring.in_flight_target`.
        reading_s: seconds between two readings of the load for the rebalancing policy.
        trainer_region: where the trainer is.
        near_first: let the wiring know the links, so that it prefers near peers.
    """

    stages: int
    forward_s: float | tuple[float, ...] = 0.1
    backward_ratio: float = 2.0
    overhead_s: float = 0.0
    noise: float = 0.0
    activation_bytes: float = 0.0
    microbatches: int | None = None
    sync_s: float = 0.0
    download_s: float = 0.0
    in_flight: int | None = None
    slack: float = 5.0
    reading_s: float = 5.0
    trainer_region: str = ""
    near_first: bool = True

    def forward_of(self, stage: int) -> float:
        """Seconds of a forward pass at speed 1."""
        return self.forward_s[stage] if isinstance(self.forward_s, tuple) else self.forward_s


@dataclass(slots=True, eq=False)
class Task:
    """One microbatch at one stage; ``attempt`` changes with each worker that is asked for it."""

    microbatch: Microbatch
    stage: int
    worker: SimulatedWorker
    attempt: int = 0
    has_input: bool = False
    has_gradient: bool = False
    forward_done: bool = False
    done: bool = False
    replied: bool = False
    sent_s: float = 0.0
    computed_s: float = 0.0


@dataclass(slots=True, eq=False)
class Microbatch:
    number: int
    tasks: list[Task] = field(default_factory=list)
    missing: int = 0


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """A worker: its speed (1 is the settings' pace), its place, and what it is at."""

    name: str
    stage: int
    speed: float = 1.0
    region: str = ""
    capacity: int | None = None
    alive: bool = True
    hung: bool = False
    serving: bool = True
    moving_to: int | None = None
    current: Task | None = None
    forwards: list[tuple[int, int, Task]] = field(default_factory=list)
    backwards: list[tuple[int, int, Task]] = field(default_factory=list)
    held: dict[Task, None] = field(default_factory=dict)
    uplink_free_s: float = 0.0
    busy_s: float = 0.0
    busy_read_s: float = 0.0
    done: int = 0
    tasks: int = 0


@dataclass(frozen=True, slots=True)
class SwarmReport:
    """What happened in a simulated time.

    ``share`` is each worker's share of its stage's microbatches, ``busy`` the share of the time that it computed.
    """

    seconds: float
    microbatches: int
    steps: int
    repeated: int
    moves: tuple[tuple[float, Move], ...]
    share: dict[str, float]
    busy: dict[str, float]
    events: int

    @property
    def throughput(self) -> float:
        """Microbatches a second."""
        return self.microbatches / self.seconds if self.seconds > 0 else 0.0
