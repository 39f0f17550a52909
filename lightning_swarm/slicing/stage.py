"""A stage at work: the user's own step, real between two split points and a ghost in front of them.

The step is called with the whole batch on every stage. In front of the stage's split point parameters are ghosts, so
code computes shapes; what depends on the batch alone is real. At the split point the arguments that came from
parameters are replaced by the tensors received; from there on everything is real. At the next stage's split point the
arguments that must cross are taken and the step is left by an exception. The last stage returns what the step
returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.slicing.batches import GhostLeaf, replace_leaves
from lightning_swarm.slicing.bind import reseed_if_repeated, unbound
from lightning_swarm.slicing.dryrun import Context
from lightning_swarm.slicing.ghost import Ghosts, buffer_entries, is_ghost
from lightning_swarm.slicing.holdings import settle
from lightning_swarm.slicing.output import StageOutput
from lightning_swarm.slicing.plan import Plan, SplitPoint, StepSignature
from lightning_swarm.slicing.prefix import Prefix
from lightning_swarm.slicing.seeds import replay_seed, seed_everything, stage_seed
from lightning_swarm.slicing.splice import flatten, splice, take
from lightning_swarm.slicing.step import call_step, trains

__all__ = ["GhostLeaf", "SliceError", "Stage", "StageOutput", "replay_seed"]


class SliceError(RuntimeError):
    """The step did not go the way that the plan was made for."""


class _StageExit(BaseException):
    """Leaves the step at the end of a stage. Not an Exception, so that no ``except Exception`` of the user stops it."""


class _OutOfDate(BaseException):
    """What was remembered of ghost calls is no longer true: code changed an attribute that decides shapes."""


@dataclass
class _Run:
    """One microbatch on its way through the step."""

    step: str
    signature: StepSignature
    received: list[Tensor]
    seed: int
    leaves: list[Tensor]
    active: bool
    again: bool = False
    taken: list[Tensor] | None = None


class Stage:
    """One stage of a module, on this peer.

    Parameters of other stages become ghosts, those of this stage move to the device; if they have no storage yet (meta
    device, ghosts) they get some, with undefined content.

    Args:
        module: The user's module; changed in place.
        plan: The plan of the run.
        index: Which stage.
        device: Where it computes.

    """

    def __init__(self, module: nn.Module, plan: Plan, index: int, device: torch.device) -> None:
        self.module, self.plan, self.index, self.device = module, plan, index, device
        self._begin: SplitPoint | None = plan.cuts[index - 1] if index else None
        self._end: SplitPoint | None = plan.cuts[index] if index < len(plan.cuts) else None
        self._ghosts = Ghosts()
        self._parameters = settle(module, plan.stages[index], self._ghosts, device)
        self._run: _Run | None = None
        self._checked: StepSignature | None = None
        self._counts: dict[str, int] = {}
        points = {point.module: module.get_submodule(point.module) for point in (self._begin, self._end) if point}
        self._handles = [
            part.register_forward_pre_hook(_Gate(self, name, part), prepend=True, with_kwargs=True)
            for name, part in points.items()
        ]
        self._prefix = Prefix(module, self._ghosts, list(points.values()), device) if index else None

    def close(self) -> None:
        """Takes hooks and wrappers off the module. Ghosts stay ghosts."""
        for handle in self._handles:
            handle.remove()
        if self._prefix is not None:
            self._prefix.close()

    @property
    def active(self) -> bool:
        """Whether the step is in this stage's own range now: what it logs here is this stage's to tell."""
        return self._run is not None and self._run.active

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this stage holds, by canonical name."""
        return dict(self._parameters)

    def owned_buffers(self) -> dict[str, Tensor]:
        """The buffers that this stage needs or changes, by name."""
        entries = buffer_entries(self.module)
        return {name: entries[name].tensor for name in self.plan.stages[self.index].buffers if name in entries}

    def run(
        self,
        step: str,
        batch: Any,
        step_args: tuple[Any, ...],
        signature: StepSignature,
        inputs: Sequence[Tensor],
        seed: int,
        *,
        context: Context = nullcontext,
    ) -> StageOutput:
        """Runs one microbatch through this stage.

        Args:
            step: Name of the step function.
            batch: The microbatch; tensors that this stage does not need may be given as `GhostLeaf`.
            step_args: What the step gets after the batch.
            signature: What the dry run learnt about this step function.
            inputs: The tensors received, in the boundary's order, on the device.
            seed: Where random numbers begin, the same on every stage, from `replay_seed`.
            context: Makes the context that the step runs in.

        Raises:
            SliceError: If the step does not call the split points, or gives something that was never computed.

        """
        self._check(step, signature, inputs)
        batch = replace_leaves(batch, self._ghost_leaf)
        for again in (False, True):
            run = _Run(step, signature, list(inputs), seed, [], active=self._begin is None, again=again)
            try:
                result = self._call(run, batch, step_args, context)
                break
            except _OutOfDate:
                assert self._prefix is not None
                self._prefix.forget()
        return StageOutput(self._result(run, result), run.taken or [], run.leaves, _wants(signature, self.index))

    def _call(self, run: _Run, batch: Any, step_args: tuple[Any, ...], context: Context) -> Any:
        self._counts = {}
        self._run = run
        seed_everything(run.seed)
        try:
            if self._prefix is not None:
                self._prefix.enter(run.step, run.signature.veiled[self.index])
            with torch.set_grad_enabled(trains(run.step)), context():
                return call_step(self.module, run.step, batch, step_args)
        except _StageExit:
            return None
        finally:
            self._run = None
            if self._prefix is not None:
                self._prefix.finish()

    # -- the gates

    def arrive(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A split point's submodule is called; gives the arguments that it gets instead, if this is where we begin."""
        run = self._run
        if run is None:
            if name == (self._begin and self._begin.module):
                reseed_if_repeated(args, kwargs)
            return None
        if self._prefix is not None and self._prefix.asleep:
            return None
        point = SplitPoint(name, self._counts.get(name, 0))
        self._counts[name] = point.call + 1
        if point == self._begin and not run.active:
            return self._enter(run, args, kwargs)
        if point == self._end and run.active:
            boundary = run.signature.boundaries[self.index]
            leaves, count = take(args, kwargs, boundary.positions)
            self._check_path(boundary.leaves, count, point)
            run.taken = leaves
            raise _StageExit
        return None

    def _enter(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._prefix is not None
        self._prefix.leave()
        run.active = True
        boundary = run.signature.boundaries[self.index - 1]
        seed = stage_seed(run.seed, self.index)
        seed_everything(seed)
        stand_ins = take(args, kwargs, boundary.positions)[0]
        self._compare_shapes(run, stand_ins)
        entering = []
        for tensor, spec in zip(run.received, boundary.specs, strict=True):
            leaf = tensor.detach()
            if spec.requires_grad and torch.is_grad_enabled():
                leaf.requires_grad_()
            run.leaves.append(leaf)
            # Not the leaf itself: the first operation may be in place, which autograd forbids on leaves and views.
            entering.append(leaf.clone())
        if any(boundary.held):
            for stand_in, tensor, held in zip(stand_ins, entering, boundary.held, strict=True):
                if held:
                    self._prefix.bind(stand_in, tensor, seed)
        places = dict(zip(boundary.positions, entering, strict=True))
        places |= {position: entering[index] for position, index in boundary.twins}
        new, count = splice(args, kwargs, places)
        self._check_path(boundary.leaves, count, self._begin)
        return new

    # -- checks

    def _compare_shapes(self, run: _Run, stand_ins: Sequence[Tensor]) -> None:
        """What was received must look like what code in front of the split point took it for."""
        for position, (tensor, stand_in) in enumerate(zip(run.received, stand_ins, strict=False)):
            if tensor.shape != stand_in.shape:
                if not run.again:
                    raise _OutOfDate
                raise SliceError(
                    f"tensor {position} for stage {self.index} is of shape {tuple(tensor.shape)}, but code in front of "
                    f'"{self._begin}" expects {tuple(stand_in.shape)}: shapes that activations decide cannot cross'
                )

    def _check(self, step: str, signature: StepSignature, inputs: Sequence[Tensor]) -> None:
        if signature.step != step:
            raise SliceError(f"{step} was to run with the signature of {signature.step}")
        expected = signature.boundaries[self.index - 1].specs if self.index else ()
        if len(inputs) != len(expected):
            raise SliceError(f"stage {self.index} gets {len(expected)} tensors in {step}, not {len(inputs)}")
        for position, (tensor, spec) in enumerate(zip(inputs, expected, strict=True)):
            if tensor.dtype != spec.dtype or tensor.dim() != len(spec.shape):
                raise SliceError(
                    f"tensor {position} for stage {self.index} is {tensor.dtype} with {tensor.dim()} dimensions; "
                    f"it should be {spec.dtype} with {len(spec.shape)}"
                )
        if signature is not self._checked:
            missing = signature.parameters[self.index] - self._parameters.keys()
            if missing:
                names = ", ".join(sorted(missing))
                raise SliceError(f"{step} needs {names} at stage {self.index}, which does not hold it")
            self._checked = signature

    def _check_path(self, expected: int, count: int, point: SplitPoint | None) -> None:
        if count != expected:
            raise SliceError(
                f'"{point}" was called with {count} arguments, but with {expected} when the plan was made: '
                "the step took another way, or the batch has another structure"
            )

    def _result(self, run: _Run, result: Any) -> Any:
        if not run.active:
            raise SliceError(f'stage {self.index} begins at "{self._begin}", but {run.step} did not call it this time')
        if self._end is not None and run.taken is None:
            raise SliceError(f'stage {self.index} ends at "{self._end}", but {run.step} did not call it this time')
        leaves = flatten(result, []) if run.taken is None else run.taken
        if any(is_ghost(leaf) for leaf in leaves):
            raise SliceError(
                f"stage {self.index} of {run.step} used a value that belongs to another stage: the step took another "
                "way than when the plan was made"
            )
        return unbound(result) if self._begin is not None and run.taken is None else result

    def _ghost_leaf(self, position: int, leaf: Any) -> Any:
        if isinstance(leaf, GhostLeaf):
            return self._ghosts.empty(leaf.shape, leaf.dtype, self.device)
        return leaf

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        return self  # a copy of the module is no stage: its hooks know that they belong to another module


class _Gate:
    """The pre-hook of a split point."""

    def __init__(self, stage: Stage, name: str, part: nn.Module) -> None:
        self.stage, self.name, self.part = stage, name, part

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.stage.arrive(self.name, args, kwargs) if module is self.part else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        return self


def _wants(signature: StepSignature, index: int) -> tuple[bool, ...]:
    return tuple(spec.requires_grad for spec in signature.boundaries[index - 1].specs) if index else ()
