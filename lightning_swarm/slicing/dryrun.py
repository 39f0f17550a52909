"""One run of a step over ghosts, which leaves no trace: the `Trace` that a plan is made from.

All parameters are ghosts while it lasts, so it takes no parameter memory and hardly any time. Values that depend on the
batch alone are real. Everything that the step changed (attributes, buffers, metric states, the batch, generators of
random numbers) is as before when it is over, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.slicing.batches import leaves_of
from lightning_swarm.slicing.ghost import Ghosts, buffer_entries, ghosted
from lightning_swarm.slicing.points import SplitPoint
from lightning_swarm.slicing.rehearsal import GhostMode, Part
from lightning_swarm.slicing.seeds import untouched_generators
from lightning_swarm.slicing.step import call_step, detached_from_trainer, trains
from lightning_swarm.slicing.trace import Trace
from lightning_swarm.slicing.tracer import Tracer
from lightning_swarm.slicing.undo import Attributes

Context = Callable[[], AbstractContextManager[Any]]


class StepLeft(BaseException):
    """Raised by a guide to end a dry run before the step does."""


class Guide:
    """Who wants to take part in a dry run."""

    def prepare(self, batch: Any, tracer: Tracer, ghosts: Ghosts, device: torch.device) -> Any:
        """Gives the batch to run with."""
        return batch

    def arrive(self, point: SplitPoint, index: int) -> None:
        """This call is about to begin, at this position among the events."""


def dry_run(
    module: nn.Module,
    batch: Any,
    step: str,
    step_args: tuple[Any, ...] = (0,),
    context: Context = nullcontext,
    guide: Guide | None = None,
) -> Trace:
    """Runs a step function over ghosts.

    Args:
        module: The user's module; its parameters may be real, on the meta device, or ghosts.
        batch: A batch as the step would get it.
        step: Name of the step function.
        step_args: What follows the batch.
        context: Makes the context that the step runs in, such as autocast.
        guide: Takes part.

    Raises:
        Exception: Whatever the step raises.

    """
    try:
        return _attempt(module, batch, step, step_args, context, guide or Guide(), fill=1)
    except Exception:
        # A number read from a ghost was taken for 1. It may have been an index: only 0 is always one.
        return _attempt(module, batch, step, step_args, context, guide or Guide(), fill=0)


def _attempt(
    module: nn.Module, batch: Any, step: str, step_args: tuple[Any, ...], context: Context, guide: Guide, fill: int
) -> Trace:
    ghosts = Ghosts()
    device = _device(module, batch)
    tracer = Tracer()
    mode = GhostMode(ghosts, tracer, fill)
    attributes = Attributes(module.modules())
    try:
        with (
            untouched_generators(),
            ghosted(module, ghosts, device) as parameters,
            _real_buffers(module, ghosts, device),
            detached_from_trainer(module, tracer.keep),
            _evaluating(module, step),
            _watched_calls(module, tracer, mode, guide),
        ):
            for name, parameter in parameters.items():
                tracer.declare(parameter, "parameter", name)
            for name, entry in buffer_entries(module).items():
                tracer.declare(entry.tensor, "buffer", name)
            batch = guide.prepare(batch, tracer, ghosts, device)
            for position, leaf in enumerate(leaves_of(batch)):
                if isinstance(leaf, Tensor):
                    tracer.declare(leaf, "leaf", position)
            try:
                with torch.set_grad_enabled(trains(step)), tracer, mode, context():
                    result = call_step(module, step, batch, step_args)
                tracer.keep(result, returned=True)
            except StepLeft:
                pass
    finally:
        tracer.undo_writes()
        attributes.restore()
    return tracer.trace


def _device(module: nn.Module, batch: Any) -> torch.device:
    tensors: Iterable[Any] = (*leaves_of(batch), *module.parameters())
    return next((t.device for t in tensors if isinstance(t, Tensor) and t.device.type != "meta"), torch.device("cpu"))


@contextmanager
def _real_buffers(module: nn.Module, ghosts: Ghosts, device: torch.device) -> Iterator[None]:
    """Buffers on the meta device become ghosts, which mix with real tensors; the others stay as they are."""
    replaced = [entry for entry in buffer_entries(module).values() if entry.tensor.is_meta]
    for entry in replaced:
        for slot in entry.slots:
            slot.module._buffers[slot.name] = ghosts.like(entry.tensor, device)
    try:
        yield
    finally:
        for entry in replaced:
            for slot in entry.slots:
                slot.module._buffers[slot.name] = entry.tensor


@contextmanager
def _evaluating(module: nn.Module, step: str) -> Iterator[None]:
    """Lightning runs all steps but the training step in evaluation mode."""
    if trains(step):
        yield
        return
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def _watched_calls(module: nn.Module, tracer: Tracer, mode: GhostMode, guide: Guide) -> Iterator[None]:
    """While it lasts every submodule's call is recorded, and rehearsed on zeros if ghosts cannot do it."""
    total = sum(parameter.numel() for parameter in module.parameters())
    handles, wrapped = [], []
    for name, part in module.named_modules():
        if not name:
            continue
        handles.append(
            part.register_forward_pre_hook(_Enter(name, tracer, mode, guide), prepend=True, with_kwargs=True)
        )
        wrapped.append((part, part.__dict__.get("forward")))
        part.__dict__["forward"] = _Forward(Part.of(part, total), tracer, mode)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part, forward in wrapped:
            if forward is None:
                del part.__dict__["forward"]
            else:
                part.__dict__["forward"] = forward


class _Enter:
    """The pre-hook that records a call's arguments as they arrive, before the user's own hooks."""

    def __init__(self, name: str, tracer: Tracer, mode: GhostMode, guide: Guide) -> None:
        self.name, self.tracer, self.mode, self.guide = name, tracer, mode, guide

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.mode.asleep:
            call = self.tracer.arrive(self.name, args, kwargs)
            self.guide.arrive(SplitPoint(call.module, call.call), len(self.tracer.trace.events) - 1)


class _Forward:
    """A submodule's ``forward``, recorded."""

    def __init__(self, part: Part, tracer: Tracer, mode: GhostMode) -> None:
        self.part, self.tracer, self.mode = part, tracer, mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.mode.asleep:
            return self.part.forward(*args, **kwargs)
        call = self.tracer.enter()
        output = self.mode.perform(self.part, args, kwargs)
        self.tracer.leave(call, output)
        return output
