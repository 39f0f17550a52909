"""Rehearses stages one by one, as they will run, and corrects what the plan believes about them.

The first dry run sees the step as a whole. Here every stage's situation is played: the leaves of the batch that it
does not get are ghosts, and parameters that an earlier stage uses too are other objects behind the split point than
in front of it. What that shows: a stage that goes another way without those leaves gets them all; a parameter that
code in front of the split point keeps a hold of must be real there already; a stage that stores something on a module
has something to tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.slicing.batches import leaves_of, replace_leaves
from lightning_swarm.slicing.dryrun import Context, Guide, StepLeft, dry_run
from lightning_swarm.slicing.ghost import Entry, Ghosts, parameter_entries, put
from lightning_swarm.slicing.liveness import read
from lightning_swarm.slicing.points import SplitPoint, StepSignature
from lightning_swarm.slicing.trace import Op, Trace
from lightning_swarm.slicing.tracer import Tracer
from lightning_swarm.slicing.undo import Attributes


@dataclass(frozen=True)
class Rehearsed:
    """What a dry run is made with."""

    module: nn.Module
    batch: Any
    step: str
    step_args: tuple[Any, ...]
    context: Context


def rehearse_stages(
    run: Rehearsed, points: Sequence[SplitPoint], signature: StepSignature, trace: Trace
) -> StepSignature:
    """The signature, corrected by what playing the stages shows."""
    stages = len(points) + 1
    everything = tuple(i for i, leaf in enumerate(leaves_of(run.batch)) if isinstance(leaf, Tensor))
    leaves, veiled, speaking = list(signature.batch_leaves), list(signature.veiled), list(signature.speaking)
    # Stages that get the same leaves can be played in one run.
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for stage in range(stages):
        groups[leaves[stage]].append(stage)
    for given, group in groups.items():
        play = _Play(points, signature, group, given, run.module)
        try:
            played = dry_run(run.module, run.batch, run.step, run.step_args, run.context, play)
            true_to_plan = play.agrees(trace, played)
        except Exception:
            if set(given) == set(everything):
                raise
            true_to_plan = False
        if not true_to_plan:
            for stage in group:
                leaves[stage] = everything
            play = _Play(points, signature, group, everything, run.module)
            played = dry_run(run.module, run.batch, run.step, run.step_args, run.context, play)
        for stage in group:
            veiled[stage] -= play.grasped(played, stage)
            speaking[stage] = speaking[stage] or play.spoke[stage]
    return replace(signature, batch_leaves=tuple(leaves), veiled=tuple(veiled), speaking=tuple(speaking))


class _Play(Guide):
    """Plays some stages that get the same leaves of the batch."""

    def __init__(
        self,
        points: Sequence[SplitPoint],
        signature: StepSignature,
        group: Sequence[int],
        given: Sequence[int],
        module: nn.Module,
    ) -> None:
        self.points, self.signature, self.group, self.given = points, signature, group, given
        self.module = module
        self.spoke: dict[int, bool] = dict.fromkeys(group, False)
        self.begins: dict[int, int] = {0: 0}
        self._veils: dict[int, dict[int, str]] = {}
        self._before: Attributes | None = None

    def prepare(self, batch: Any, tracer: Tracer, ghosts: Ghosts, device: torch.device) -> Any:
        self.begins = {0: 0}
        self._tracer, self._ghosts, self._device = tracer, ghosts, device
        self._start(0)

        def hide(position: int, leaf: Any) -> Any:
            return ghosts.like(leaf, device) if isinstance(leaf, Tensor) and position not in self.given else leaf

        return replace_leaves(batch, hide)

    def arrive(self, point: SplitPoint, index: int) -> None:
        stage = len(self.begins)
        if stage > len(self.points) or point != self.points[stage - 1]:
            return
        self.begins[stage] = index
        self._finish(stage - 1)
        if stage > max(self.group):
            raise StepLeft
        self._start(stage)

    def agrees(self, expected: Trace, played: Trace) -> bool:
        """Whether the stages did what the whole step did in their ranges, without the leaves that they do not get."""
        cuts = [index for index, call in expected.calls() if SplitPoint(call.module, call.call) in self.points]
        edges = [0, *cuts, len(expected.events)]
        facts = read(played)
        missing = {key for value in played.values if (key := value.key) is not None and value.kind == "leaf"}
        missing -= set(self.given)
        for stage in self.group:
            begin, end = self._range(stage, played)
            if _shape(expected, edges[stage], edges[stage + 1]) != _shape(played, begin, end):
                return False
            for index, sources in facts.source_uses:
                if begin <= index < end and any(kind == "leaf" and key in missing for kind, key in sources):
                    return False
            if any(kind == "leaf" and key in missing for index, sources in facts.source_looks for kind, key in sources):
                return False
        return True

    def grasped(self, played: Trace, stage: int) -> set[str]:
        """Parameters that were taken in front of the split point and used behind it."""
        veils = self._veils.get(stage, {})
        begin, end = self._range(stage, played)
        used = {
            index
            for event in played.events[begin:end]
            if isinstance(event, Op)
            for index in (*event.reads, *event.writes)
        }
        return {name for index, name in veils.items() if index in used}

    def _start(self, stage: int) -> None:
        if stage not in self.group:
            return
        self._before = Attributes(self.module.modules())
        entries = parameter_entries(self.module)
        self._veils[stage] = {}
        for name in self.signature.veiled[stage]:
            entry = entries[name]
            self._veils[stage][self._tracer.index(entry.tensor)] = name
            self._unveil(name, entry)

    def _unveil(self, name: str, entry: Entry) -> None:
        assert isinstance(entry.tensor, nn.Parameter)
        other = self._ghosts.parameter(entry.tensor, self._device)
        self._tracer.declare(other, "parameter", name)
        put(entry, other)

    def _finish(self, stage: int) -> None:
        if stage in self.group and self._before is not None:
            self.spoke[stage] = self._before.changed()

    def _range(self, stage: int, played: Trace) -> tuple[int, int]:
        return self.begins[stage], self.begins.get(stage + 1, len(played.events))


def _shape(trace: Trace, begin: int, end: int) -> list[str]:
    return [event.name for event in trace.events[begin:end] if isinstance(event, Op)]
