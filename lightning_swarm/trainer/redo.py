"""What has to be done again when a stage has lost its last worker.

The trainer's copy of the model is that of some step (``Origin.version``). The redo log holds every batch since then,
as the workers got it, and how each step ended. Microbatches are named and seeded by step and index, so doing it all
again gives the same gradients, and the same weights.
"""

from dataclasses import dataclass, field
from typing import Any

from lightning_swarm.swarm.calls import Context
from lightning_swarm.trainer.commit import Clipping
from lightning_swarm.trainer.microbatches import Microbatch
from lightning_swarm.trainer.position import StepRecord


@dataclass(frozen=True)
class LoggedBatch:
    """One Lightning batch, as it was sent through the stages."""

    kind: str
    microbatches: tuple[Microbatch, ...]
    step_args: tuple[int, ...]
    context: Context
    scale: float


@dataclass(frozen=True)
class StepEnding:
    """What a step was committed with."""

    hyperparameters: tuple[dict[str, Any], ...]
    clipping: Clipping
    record: StepRecord


@dataclass
class LoggedStep:
    """The batches of one step, and how it ended; ``None`` while it has not."""

    number: int
    batches: list[LoggedBatch] = field(default_factory=list)
    ending: StepEnding | None = None


class RedoLog:
    """The steps since the trainer's copy of the model, the one under way included.

    Args:
        step: The number of the step under way.
    """

    def __init__(self, step: int) -> None:
        self.steps = [LoggedStep(step)]

    def add(self, batch: LoggedBatch) -> None:
        """A batch of the step under way is about to be sent."""
        self.steps[-1].batches.append(batch)

    def end(self, ending: StepEnding) -> None:
        """The step under way is about to be committed."""
        self.steps[-1].ending = ending

    def begin(self, step: int) -> None:
        """The next step is under way."""
        self.steps.append(LoggedStep(step))

    def forget(self, version: int) -> None:
        """The trainer's copy of the model is that of step ``version`` now."""
        self.steps = [step for step in self.steps if step.number >= version]
