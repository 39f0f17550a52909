"""Runs the stages of a plan in turn, in one process, and compares with the whole step."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_swarm.slicing.batches import replace_leaves
from lightning_swarm.slicing.plan import Plan, StepSignature, make_plan
from lightning_swarm.slicing.stage import GhostLeaf, Stage, StageOutput, replay_seed

CPU = torch.device("cpu")
SEED = replay_seed(11, step=0, microbatch=0)


class Pipeline:
    """All stages of a module, each on its own copy of it."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.plan = Plan.from_dict(plan.to_dict())
        assert self.plan == plan
        self.stages = [Stage(copy.deepcopy(module), self.plan, index, CPU) for index in range(len(plan.stages))]

    def step(
        self,
        batch: Any,
        step: str = "training_step",
        signature: StepSignature | None = None,
        args: tuple[Any, ...] = (0,),
        seed: int = SEED,
    ) -> Any:
        """One microbatch forward, and backward if it is a training step; gives what the last stage returns."""
        signature = signature or self.plan.signatures[step]
        outputs: list[StageOutput] = []
        received: list[Tensor] = []
        for stage in self.stages:
            needed = only(batch, signature.batch_leaves[stage.index])
            outputs.append(stage.run(step, needed, args, signature, received, seed))
            received = [tensor.detach() for tensor in outputs[-1].tensors]
            assert not stage.active
        result = outputs[-1].result
        if step == "training_step":
            gradients: Any = outputs[-1].backward(1.0)
            for output in reversed(outputs[:-1]):
                gradients = output.backward(gradients)
        return result

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients by parameter, summed over the stages that hold it."""
        found: dict[str, Tensor | None] = {}
        for stage in self.stages:
            for name, parameter in stage.owned_parameters().items():
                gradient = parameter.grad
                before = found.get(name)
                found[name] = before if gradient is None else gradient if before is None else before + gradient
        return found


@dataclass
class Comparison:
    """How far the stages were from the whole step."""

    plan: Plan
    pipeline: Pipeline
    result: Any
    loss_difference: float
    gradient_difference: float


def only(batch: Any, positions: Sequence[int]) -> Any:
    """The batch as a stage gets it: the tensors that it does not need are ghosts."""

    def hide(position: int, leaf: Any) -> Any:
        hidden = isinstance(leaf, Tensor) and position not in positions
        return GhostLeaf(tuple(leaf.shape), leaf.dtype) if hidden else leaf

    return replace_leaves(batch, hide)


def reseed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def loss_of(result: Any) -> Tensor:
    return result["loss"] if isinstance(result, dict) else result


def compare(
    module: nn.Module,
    batch: Any,
    stages: int | Sequence[str],
    *,
    runs: int = 2,
    plan_batch: Any = None,
    tolerance: float = 0.0,
) -> Comparison:
    """Cuts the module, runs the stages and the whole step on the same microbatches and compares loss and gradients.

    ``batch`` may be a function that gives another one every time.
    """
    draw = batch if callable(batch) else lambda: batch
    plan = make_plan(module, draw() if plan_batch is None else plan_batch, stages)
    pipeline = Pipeline(module, plan)
    whole = copy.deepcopy(module)
    if "log" not in whole.__dict__:
        for part in [whole, *(stage.module for stage in pipeline.stages)]:
            part.__dict__["log"] = lambda *args, **kwargs: None
    difference = 0.0
    for _ in range(runs):
        microbatch = draw()
        result = pipeline.step(microbatch)
        reseed(SEED)
        expected = whole.training_step(microbatch, 0)
        loss_of(expected).backward()
        difference = max(difference, (loss_of(result) - loss_of(expected)).abs().item())
    gradients = pipeline.gradients()
    assert set(gradients) == {name for name, _ in whole.named_parameters()}
    gradient_difference = 0.0
    for name, parameter in whole.named_parameters():
        gradient = gradients[name]
        if parameter.grad is None:
            assert gradient is None or not gradient.any(), name
            continue
        assert gradient is not None, name
        gradient_difference = max(gradient_difference, (gradient - parameter.grad).abs().max().item())
    assert difference <= tolerance, f"loss differs by {difference}"
    assert gradient_difference <= tolerance, f"gradients differ by {gradient_difference}"
    return Comparison(plan, pipeline, result, difference, gradient_difference)
