"""From a module and one batch to a plan: who holds what, what crosses where, who needs which part of the batch.

``make_plan`` decides where to cut; ``make_signature`` learns what another step function does under the same cuts. Both
run the step once over ghosts (`dryrun.py`), read what happened (`liveness.py`) and then rehearse every stage by itself
(`probe.py`). Neither takes parameter memory, neither leaves a trace on the module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_swarm.slicing.batches import leaves_of
from lightning_swarm.slicing.blueprint import Item, Plan, StagePlan
from lightning_swarm.slicing.cuts import CutError, choose, named
from lightning_swarm.slicing.dryrun import Context, dry_run
from lightning_swarm.slicing.facts import Candidate, Facts
from lightning_swarm.slicing.ghost import buffer_entries, parameter_entries
from lightning_swarm.slicing.liveness import read
from lightning_swarm.slicing.points import Boundary, LeafSpec, SplitPoint, StepSignature
from lightning_swarm.slicing.probe import Rehearsed, rehearse_stages
from lightning_swarm.slicing.trace import Trace

__all__ = [
    "Boundary",
    "CutError",
    "LeafSpec",
    "Plan",
    "SplitPoint",
    "StagePlan",
    "StepSignature",
    "make_plan",
    "make_signature",
]


def make_plan(
    module: nn.Module,
    batch: Any,
    stages: int | Sequence[str],
    step: str = "training_step",
    step_args: tuple[Any, ...] = (0,),
    *,
    context: Context = nullcontext,
) -> Plan:
    """Cuts a module into stages.

    Args:
        module: The user's module. Parameters may be real or on the meta device.
        batch: A batch as the step gets it; best a microbatch of the size that stages will see.
        stages: How many stages, or the names of the calls at which stages 1, 2, ... begin.
        step: The step function that decides.
        step_args: What the step gets after the batch.
        context: Makes the context that the step runs in, such as autocast.

    Returns:
        The plan, with the signature of this step function.

    Raises:
        CutError: If the module cannot be cut so.

    Example::

        >>> plan = make_plan(model, batch, stages=4)  # doctest: +SKIP
        >>> print(plan)  # doctest: +SKIP

    """
    trace = dry_run(module, batch, step, step_args, context)
    facts = read(trace)
    if isinstance(stages, int):
        cuts = choose(facts, stages, step)
    else:
        cuts = named(facts, [SplitPoint.parse(name) for name in stages], step, module)
    points = tuple(cut.point for cut in cuts)
    run = Rehearsed(module, batch, step, step_args, context)
    signature = rehearse_stages(run, points, _signature(trace, facts, cuts, batch, step), trace)
    return Plan(points, _inventory(module), {step: signature})


def make_signature(
    module: nn.Module,
    batch: Any,
    plan: Plan | Sequence[SplitPoint],
    step: str,
    step_args: tuple[Any, ...] = (0,),
    *,
    context: Context = nullcontext,
) -> StepSignature:
    """Learns what a step function does under the cuts of a plan.

    Args:
        module: The user's module.
        batch: A batch as the step gets it.
        plan: A plan, or its cuts.
        step: The step function.
        step_args: What the step gets after the batch.
        context: Makes the context that the step runs in.

    Raises:
        CutError: If a cut does not work for this step.

    """
    points = plan.cuts if isinstance(plan, Plan) else plan
    trace = dry_run(module, batch, step, step_args, context)
    facts = read(trace)
    signature = _signature(trace, facts, named(facts, points, step, module), batch, step)
    return rehearse_stages(Rehearsed(module, batch, step, step_args, context), points, signature, trace)


def _signature(trace: Trace, facts: Facts, cuts: Sequence[Candidate], batch: Any, step: str) -> StepSignature:
    stages = len(cuts) + 1
    samples = _samples(batch)
    starts = [cut.index for cut in cuts]

    def stage_at(index: int) -> int:
        return bisect_right(starts, index)

    leaves: list[set[int]] = [set() for _ in range(stages)]
    parameters: list[set[str]] = [set() for _ in range(stages)]
    buffers: list[set[str]] = [set() for _ in range(stages)]
    written: list[set[str]] = [set() for _ in range(stages)]
    flops = [0.0] * stages
    for index, name in facts.parameter_uses:
        parameters[stage_at(index)].add(name)
    for index, name in facts.buffer_writes:
        written[stage_at(index)].add(name)
    for index, count in facts.flops:
        flops[stage_at(index)] += count / samples
    needs = [(range(stage_at(index), stage_at(index) + 1), sources) for index, sources in facts.source_uses]
    # What Python saw decided the way that every stage behind goes, too.
    needs += [(range(stage_at(index), stages), sources) for index, sources in facts.source_looks]
    for needing, sources in needs:
        for kind, key in sources:
            for stage in needing:
                if kind == "leaf":
                    leaves[stage].add(int(key))
                else:
                    buffers[stage].add(str(key))
    spoken = {stage_at(index) for index in facts.kept} | {stages - 1}
    return StepSignature(
        step=step,
        boundaries=tuple(
            Boundary(cut.positions, cut.specs, cut.bytes / samples, cut.twins, cut.held, cut.leaves) for cut in cuts
        ),
        batch_leaves=tuple(tuple(sorted(needed)) for needed in leaves),
        parameters=tuple(frozenset(names) for names in parameters),
        buffers=tuple(frozenset(names) for names in buffers),
        veiled=tuple(
            frozenset(name for name in names if any(name in before for before in parameters[:stage]))
            for stage, names in enumerate(parameters)
        ),
        written=tuple(frozenset(names) for names in written),
        speaking=tuple(stage in spoken for stage in range(stages)),
        flops=tuple(flops),
        modules=_modules(trace, starts),
    )


def _modules(trace: Trace, starts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """For each stage the outermost submodules whose calls lie in it, whole."""
    stages: dict[str, set[int]] = {}
    for index, call in trace.calls():
        end = call.closed_at if call.closed_at is not None else len(trace.events)
        span = stages.setdefault(call.module, set())
        span.update((bisect_right(starts, index), bisect_right(starts, max(index, end - 1))))
    found: list[list[str]] = [[] for _ in range(len(starts) + 1)]
    for name, span in stages.items():
        parents = [name[:position] for position, letter in enumerate(name) if letter == "."]
        if any(len(stages.get(parent, ())) == 1 for parent in parents):
            continue
        if len(span) == 1 or not any(other.startswith(f"{name}.") for other in stages):
            for stage in span:
                found[stage].append(name)
    return tuple(tuple(names) for names in found)


def _inventory(module: nn.Module) -> tuple[Item, ...]:
    entries = {**parameter_entries(module), **buffer_entries(module)}
    order: dict[str, None] = {}
    for path, part in module.named_modules():
        for kind in (part._parameters, part._buffers):
            order.update({f"{path}.{name}" if path else name: None for name in kind})
    return tuple(
        Item(
            name=name,
            kind="parameter" if isinstance(entries[name].tensor, nn.Parameter) else "buffer",
            shape=tuple(entries[name].tensor.shape),
            dtype=str(entries[name].tensor.dtype).removeprefix("torch."),
            bytes=entries[name].tensor.numel() * entries[name].tensor.element_size(),
        )
        for name in order
        if name in entries
    )


def _samples(batch: Any) -> int:
    """How many samples a batch has: the most frequent first dimension of its tensors."""
    sizes = Counter(leaf.shape[0] for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return max(sizes.most_common(1)[0][0], 1) if sizes else 1
