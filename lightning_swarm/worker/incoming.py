"""The stage that a worker is moving to, held beside the one that it serves.

A module is one stage of itself at a time, so the new stage is not built before the old one is left. Until then the
worker holds what makes it: the state that it has downloaded and, from the moment of the order on, every commit of the
new stage with the sums that go with it, which it gets as a member of the stage's reductions that contributes nothing.
At the switch the stage is built, the state is assigned and the commits are applied in their order, so the result is the
replicas' state bit for bit, and nothing is fetched while nobody is served.

The price is memory for the new stage's state, and for one vector of its gradients a step between the donor's capture
and the switch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_swarm.slicing.ghost import buffer_entries, parameter_entries
from lightning_swarm.slicing.plan import Plan
from lightning_swarm.swarm.calls import Assignment, CommitRequest
from lightning_swarm.worker.accumulator import Accumulator
from lightning_swarm.worker.state import StageState

if TYPE_CHECKING:
    from lightning_swarm.worker.service import Commit, Reduced


@dataclass(frozen=True)
class Shapes:
    """What all of a module's tensors look like, those that this peer does not hold included.

    Args:
        parameters: By name, without storage.
        buffers: How many real values each has.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, int]

    @classmethod
    def of(cls, module: nn.Module) -> "Shapes":
        """Of a module that no thread computes with at the moment."""
        parameters = {}
        for name, entry in parameter_entries(module).items():
            empty = torch.empty(tuple(entry.tensor.shape), dtype=entry.tensor.dtype, device="meta")
            parameters[name] = nn.Parameter(empty, requires_grad=entry.tensor.requires_grad)
        buffers = {
            name: entry.tensor.numel() * (2 if entry.tensor.is_complex() else 1)
            for name, entry in buffer_entries(module).items()
        }
        return cls(parameters, buffers)


class Incoming:
    """See the module's docstring.

    Args:
        assignment: The new stage.
        shapes: Of the worker's module.
    """

    def __init__(self, assignment: Assignment, shapes: Shapes) -> None:
        self.assignment = assignment
        plan = Plan.from_dict(assignment.plan)
        self.index = assignment.stage
        self.parameters = {name: shapes.parameters[name] for name in plan.stages[self.index].parameters}
        self.accumulator = Accumulator(self.parameters, reproducible=assignment.reproducible)
        """Stays empty: it knows how the stage's gradients lie in a vector."""
        training = plan.signatures.get("training_step")
        written = training.written[self.index] if training is not None else frozenset()
        averaged = written & set(plan.stages[self.index].buffers)
        self._values = sum(shapes.buffers.get(name, 0) for name in averaged)
        self.state: StageState | None = None
        self.commits: dict[int, Commit] = {}
        """By step; of the step of the order and all later ones."""

    def owned_names(self) -> frozenset[str]:
        """The parameters of the stage."""
        return frozenset(self.parameters)

    def buffer_sums(self) -> Tensor:
        """What the worker adds to the average of the stage's running buffers: nothing."""
        return torch.zeros(1, dtype=torch.float64).expand(self._values + 1)

    def arrived(self, state: StageState) -> None:
        """The download has ended: commits that are in it already need not be kept."""
        self.state = state
        for step in [step for step in self.commits if step < state.version]:
            del self.commits[step]

    def queue(self, step: int, reduced: "list[Reduced]", request: CommitRequest) -> None:
        """The stage's other workers are at the next step now."""
        if self.state is None or step >= self.state.version:
            self.commits[step] = reduced, request

    def is_of(self, step: int) -> bool:
        """Whether the state and the commits together are the stage as of a step."""
        return self.state is not None and all(s in self.commits for s in range(self.state.version, step))
