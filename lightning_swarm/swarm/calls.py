"""The calls of the protocol and what they carry.

============ ========  ===================================================================================
All are idempotent: a repeated call finds its work done and answers the same.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from lightning_swarm.swarm.messages import Message


def _check_measured(*values: float) -> None:
    """Durations and counts are finite and not negative; whoever computes with them relies on it."""
    for value in values:
        if not 0 <= value < math.inf:
            raise ValueError(f"{value} was never measured")


@dataclass(frozen=True)
class JoinRequest(Message):
    """A worker asks for work."""

    session: int
    """The how-many-eth ``trainer.fit``, ``validate``, ``test`` or ``predict`` of its script this is, from 0."""
    function: str
    """Which of the four."""
    device: str
    memory_bytes: int
    """What it can hold; 0: it does not say."""
    versions: dict[str, str]
    """Versions of everything that has to agree."""
    parameters: dict[str, str]
    """Shape and dtype of every parameter of its module, by name."""
    local_index: int
    """Which of the trainer's own local workers it is; -1: none of them."""


@dataclass(frozen=True)
class JoinReply(Message):
    """The trainer's answer to :class:`JoinRequest`."""

    action: str
    """``serve``, ``wait`` (ask again), ``skip`` (that session is over) or ``end`` (the run is over)."""
    assignment: dict[str, Any] | None = None


@dataclass(frozen=True)
class Assignment(Message):
    """What a worker is to serve."""

    session: int
    plan: dict[str, Any]
    plan_version: int
    stage: int
    step: int
    """From this step on the worker takes part in reduce and commit."""
    donors: tuple[str, ...]
    """Peers that have the stage's state, best first."""
    codec: str
    """How activations and their gradients travel."""
    reduce_codec: str
    """How parameters' gradients travel in reductions."""
    reproducible: bool
    outbox_bytes: int | None = None
    """What the worker's outbox may hold besides what is awaited; ``None``: as much as comes."""


@dataclass(frozen=True)
class Context(Message):
    """The trainer's side of a step, mirrored before a worker runs it."""

    epoch: int
    global_step: int
    running_stage: str
    """Lightning's ``RunningStage`` value."""
    modes: tuple[str, ...]
    """Submodules whose train/eval flag differs from the step's usual one."""
    attributes: dict[str, Any]
    """Plain attributes of the LightningModule that hooks changed (``swarm/tree.py``, no tensors)."""


@dataclass(frozen=True)
class Task(Message):
    """One microbatch at one stage."""

    session: int
    plan_version: int
    step: int
    microbatch: str
    """Its name, unique in the run: ``step:index`` in training, ``step:e:index`` in evaluation."""
    order: int
    """Smaller goes first."""
    first: int
    """The ``order`` of its Lightning batch's first microbatch: in evaluation, all before that are over."""
    samples: int
    kind: str
    """The name of the user's step function."""
    stage: int
    input_peer: str | None
    """Whose outbox has the input activation; ``None`` for stage 0."""
    gradient_peer: str | None
    """Whose outbox will have the gradient of the output; ``None`` for the last stage and in evaluation."""
    seed: int
    scale: float
    """What the loss is multiplied with before the backward pass; 0 in evaluation."""
    batch: Any
    """The batch (``swarm/tree.py``); tensors that the stage does not need are stand-ins of shape and dtype."""
    step_args: tuple[int, ...]
    """What follows the batch in the step's arguments."""
    context: dict[str, Any]
    signature: dict[str, Any] | None
    """The step's signature, where the plan that the worker holds lacks it."""
    deadline_s: float
    allow_nan: bool = False
    """Whether NaN from another worker is to be taken as it is: others have found the same."""
    gradient_wanted: bool = True
    """Whether the stage in front waits for its gradient; it does not where it has accumulated the microbatch."""
    remake: Literal["activation", "gradient"] | None = None
    """Only make this output again, which was evicted, and accumulate nothing."""

    @property
    def training(self) -> bool:
        """Whether a backward pass follows."""
        return self.kind == "training_step"


@dataclass(frozen=True)
class TaskReply(Message):
    """A stage is done with a microbatch."""

    effects: Any
    """What the step did besides computing (``worker/recorder.py``), as ``swarm/tree.py`` encodes it."""
    compute_s: float
    held_bytes: int
    """What a microbatch holds for its backward pass; 0 where that was not measured."""
    transfers: dict[str, float]
    """Seconds that tensors were under way, by the worker that they came from."""
    duplicate: bool
    """Whether the microbatch was done before the task came."""

    def __post_init__(self) -> None:
        _check_measured(self.compute_s, self.held_bytes, *self.transfers.values())


@dataclass(frozen=True)
class GroupMember(Message):
    """A worker in a reduction."""

    peer: str
    weight: float
    """Its share of the summing, proportional to its bandwidth."""
    contributes: bool


@dataclass(frozen=True)
class Group(Message):
    """Workers that sum the gradients of the same parameters, in this order."""

    name: str
    parameters: tuple[str, ...]
    """Whose gradients are summed; none: it is the stage's running buffers that are averaged."""
    members: tuple[GroupMember, ...]


def buffers_group(stage: int) -> str:
    """The name of the group that averages a stage's running buffers."""
    return f"buffers{stage}"


@dataclass(frozen=True)
class ReduceRequest(Message):
    """First phase of a step's end."""

    session: int
    step: int
    attempt: int
    groups: tuple[Group, ...]
    expected: tuple[str, ...]
    """The microbatches that the ledger says this worker has accumulated."""
    deadline_s: float
    allow_nan: bool = False
    """Whether NaN from another member is to be taken as it is."""


@dataclass(frozen=True)
class ProbeRequest(Message):
    """Asks a silent worker what it does."""

    microbatch: str | None = None
    """About this one; without it, about reductions."""
    key: str | None = None
    """Whether this entry of its outbox is there."""


@dataclass(frozen=True)
class Wait(Message):
    """A fetch that has not been answered; ``seconds``: since when or, in a reduction, since when nothing has come."""

    peer: str
    key: str
    seconds: float

    def __post_init__(self) -> None:
        _check_measured(self.seconds)


@dataclass(frozen=True)
class ProbeReply(Message):
    """What a worker does."""

    computing_s: float
    """For how long the closure that runs now has got no further; 0 between closures."""
    queued: int = 0
    waits: tuple[Wait, ...] = ()
    """What it fetches, longest first."""
    offered_s: float | None = None
    """Since when the entry asked about is there; ``None``: it is not."""
    usual_s: float = 0.0
    """How long the slowest kind of closures took on average so far."""

    def __post_init__(self) -> None:
        _check_measured(self.computing_s, self.queued, self.offered_s or 0.0, self.usual_s)


@dataclass(frozen=True)
class ReduceReply(Message):
    """What the trainer needs to know of the reduced gradients."""

    squared_norms: dict[str, float]
    """By group, of the summed gradients; not finite if these are not."""
    absent: tuple[str, ...]
    """Parameters that got no gradient at this worker (an optimizer skips what nobody has a gradient for)."""

    def __post_init__(self) -> None:
        if any(norm < 0 for norm in self.squared_norms.values()):
            raise ValueError(f"a squared norm is not negative: {self.squared_norms}")


@dataclass(frozen=True)
class CommitRequest(Message):
    """Second phase of a step's end."""

    session: int
    step: int
    attempts: dict[str, int]
    """By group, the attempt whose sum counts."""
    hyperparameters: tuple[Any, ...]
    """Of every parameter group of the optimizer, without its parameters (``swarm/tree.py``, no tensors)."""
    scale: float
    """The reduced gradients are multiplied with this (clipping by the global norm)."""
    clip_value: float | None
    """Then clamped to plus and minus this."""
    absent: tuple[str, ...]
    """Parameters that got no gradient anywhere."""
    position: bytes = b""
    """For a trainer that is started again, as is ``effects``; see ``trainer/position.py``."""
    effects: tuple[bytes, ...] = ()
    logged: bool = False
    """Whether the worker keeps the sums for the trainer, until the next commit."""


@dataclass(frozen=True)
class LoggedSums(Message):
    """What a stage has made a step with; one vector a group goes with it."""

    commit: CommitRequest
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Holding(Message):
    """What a worker tells a trainer that was started again: the state that it holds."""

    stage: int = -1
    """-1: it holds none."""
    stages: int = 0
    """How many there are."""
    fingerprint: str = ""
    """Of the plan."""
    session: int = -1
    plan_version: int = -1
    step: int = -1
    commit: dict[str, Any] | None = None
    """The last :class:`CommitRequest` that it has applied."""


@dataclass(frozen=True)
class ReadyRequest(Message):
    """A worker reports how far it is with an assignment."""

    session: int
    plan_version: int
    stage: int
    version: int
    """The step whose parameters it holds."""


@dataclass(frozen=True)
class LeaveRequest(Message):
    """A worker goes."""

    soon: bool = False
    """It serves still, and says so that others can take its place in time; otherwise it goes now."""


@dataclass(frozen=True)
class MoveRequest(Message):
    """A worker is to serve another stage."""

    session: int
    plan_version: int
    stage: int
    """The other one."""
    action: Literal["prepare", "switch"]
    """``prepare``: get ready for it while you serve yours. ``switch``: leave yours, this is the beginning of a step."""
    step: int
    """The step that is under way; with ``switch`` the one that begins."""
    assignment: dict[str, Any] | None = None
    """With ``prepare``."""


@dataclass(frozen=True)
class PreparedRequest(Message):
    """A worker that is to move holds the other stage's state."""

    session: int
    plan_version: int
    stage: int
    problem: str = ""
    """Why it does not and will not; empty: it does."""


@dataclass(frozen=True)
class NextRequest(Message):
    """A worker whose session is over asks whether another one has begun."""

    after: int = -1
    """The number of the one that is over."""


@dataclass(frozen=True)
class StateRequest(Message):
    """Asks for the state of a stage."""

    session: int
    plan_version: int
    stage: int
    key: str = ""
    """Names the parts in which it is given, see ``swarm/parts.py``."""


@dataclass(frozen=True)
class LogRequest(Message):
    """Asks for the :class:`LoggedSums` of a step of a stage."""

    session: int
    plan_version: int
    stage: int
    step: int
    key: str = ""
    """As in :class:`StateRequest`."""


@dataclass(frozen=True)
class FinishRequest(Message):
    """The trainer's session is over, or this worker should ask anew for a stage."""

    session: int
    reassign: bool
    failed: bool
    outcome: Any
    """``results`` of the Lightning call and what callbacks learnt (``swarm/tree.py``, no tensors)."""


@dataclass(frozen=True)
class WorkerRecord(Message):
    """What a worker announces in the DHT."""

    session: int
    stage: int
    """-1 while it has none."""
    step: int
    device: str
    microbatches_per_s: float
    """By its own measurement; 0 while it has none."""
    memory_bytes: int
    addresses: tuple[str, ...]
    versions: dict[str, str]

    def __post_init__(self) -> None:
        if not (0 <= self.microbatches_per_s < 1e9 and self.memory_bytes >= 0 and self.stage >= -1):
            raise ValueError(
                f"an impossible announcement: {self.microbatches_per_s} microbatches/s at stage {self.stage}"
            )


@dataclass(frozen=True)
class WorkerStats(Message):
    """What a worker has done since it took its stage; seconds are those of its own clock."""

    queued: int
    """Closures that wait for its compute thread now."""
    forward_s: float
    backward_s: float
    waiting_s: float
    """Of all microbatches together: for inputs and gradients from other workers."""
    reduction_s: float
    commit_s: float
    bytes_sent: int
    bytes_received: int
    outbox_bytes: int
    outbox_peak_bytes: int
    """The most that there ever were of activations and gradients."""
    evicted: int
    """Entries that its outbox had no room for."""
    busy_s: float
    """For which its compute thread computed since it came."""
    queue_s: float
    """Of computing that wait for it now."""
    downloads: int = 0
    """How often it has fetched a stage's state since it came."""


@dataclass(frozen=True)
class StageLoad(Message):
    """How much there is to do at a stage; means over its workers."""

    workers: int
    busy_share: float
    """Of the time since the last reading, 0 to 1."""
    queue_s: float
    """Seconds of computing that wait for a worker."""
    microbatches_per_s: float
    """What all of them together can do, as measured; workers that have done none yet are not in it."""

    def __str__(self) -> str:
        return (
            f"{self.workers} workers, {self.busy_share:.0%} busy, {self.queue_s:.3g} s queued, "
            f"{self.microbatches_per_s:.3g} microbatches/s"
        )


@dataclass(frozen=True)
class LoadRecord(Message):
    """What the trainer announces of the stages' loads, each time when it reads them."""

    session: int
    step: int
    stages: tuple[StageLoad, ...]


@dataclass(frozen=True)
class TrainerRecord(Message):
    """What a trainer announces in the DHT."""

    started_s: float
    """Wall-clock time; of two trainers of one run the newer one counts."""
