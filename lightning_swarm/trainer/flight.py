"""A microbatch on its way through the stages."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lightning_swarm.slicing.batches import leaves_of
from lightning_swarm.slicing.plan import StepSignature
from lightning_swarm.swarm.calls import Context, Task
from lightning_swarm.swarm.tree import encode_tree
from lightning_swarm.trainer.microbatches import Microbatch


@dataclass(frozen=True)
class Job:
    """What the microbatches of one Lightning batch have in common."""

    session: int
    plan_version: int
    step: int
    kind: str
    signature: StepSignature
    signature_is_planned: bool
    """Whether every worker got the signature with its plan."""
    step_args: tuple[int, ...]
    context: Context

    @property
    def training(self) -> bool:
        """Whether a backward pass follows."""
        return self.kind == "training_step"


@dataclass(eq=False)
class Flight:
    """One microbatch of a :class:`Job`, and how far each stage has come with it."""

    job: Job
    name: str
    order: int
    first: int
    microbatch: Microbatch
    seed: int
    scale: float
    route: list[str] = field(default_factory=list)
    """The worker chosen at each stage."""
    hops: list[asyncio.Task[None] | None] = field(default_factory=list)
    """The coroutine that looks after each stage; finished ones have succeeded."""
    rerouted: list[asyncio.Event] = field(default_factory=list)
    """Set at a stage when a neighbour of it was replaced: its task has to be sent again with the new source."""
    effects: list[dict[str, Any]] = field(default_factory=list)
    """What each stage's step did besides computing (``worker/recorder.py``)."""

    allow_nan: bool = False
    """Whether NaN in it is the model's own, as far as anybody can tell."""
    suspects: dict[tuple[int, int], str] = field(default_factory=dict)
    """Who sent NaN, by the stage that got it and the stage that sent it, until another worker has sent the same."""
    raised_at: dict[int, str] = field(default_factory=dict)
    """By stage, the worker on which the user's code has raised."""

    def __post_init__(self) -> None:
        stages = len(self.job.signature.batch_leaves)
        self.hops = [None] * stages
        self.rerouted = [asyncio.Event() for _ in range(stages)]
        self.effects = [{} for _ in range(stages)]
        self._leaves = leaves_of(self.microbatch.batch)

    def done(self, stage: int) -> bool:
        """Whether the stage has accumulated (or evaluated) this microbatch."""
        hop = self.hops[stage]
        return hop is not None and hop.done() and not hop.cancelled() and hop.exception() is None

    @property
    def landed(self) -> bool:
        """Whether all stages have."""
        return all(self.done(stage) for stage in range(len(self.hops)))

    def task(
        self, stage: int, deadline_s: float, allow_nan: bool, remake: Literal["activation", "gradient"] | None = None
    ) -> tuple[Task, list[Tensor]]:
        """The task for one stage, as the route stands, and the leaves of the batch whose data the stage needs."""
        job, last = self.job, len(self.hops) - 1
        needed = {id(self._leaves[position]) for position in job.signature.batch_leaves[stage]}

        def stand_in(leaf: Tensor) -> Any:
            return None if id(leaf) in needed else [list(leaf.shape), str(leaf.dtype).removeprefix("torch.")]

        batch, tensors = encode_tree(self.microbatch.batch, replace=stand_in)
        task = Task(
            session=job.session,
            plan_version=job.plan_version,
            step=job.step,
            microbatch=self.name,
            order=self.order,
            first=self.first,
            samples=self.microbatch.samples,
            kind=job.kind,
            stage=stage,
            input_peer=self.route[stage - 1] if stage > 0 else None,
            gradient_peer=self.route[stage + 1] if job.training and stage < last else None,
            seed=self.seed,
            scale=self.scale,
            batch=batch,
            step_args=job.step_args,
            context=job.context.to_dict(),
            signature=None if job.signature_is_planned else job.signature.to_dict(),
            deadline_s=deadline_s,
            allow_nan=allow_nan or self.allow_nan,
            gradient_wanted=stage > 0 and not self.done(stage - 1),
            remake=remake,
        )
        return task, tensors
