"""Choosing split points, automatically or by name, and saying clearly why some do not work."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_swarm.policies.partitioning import Cut, partition
from lightning_swarm.slicing.facts import Candidate, Facts
from lightning_swarm.slicing.points import SplitPoint


class CutError(MisconfigurationException):
    """The model cannot be cut so; the message says why, and where it can."""


def usable(facts: Facts) -> list[Candidate]:
    """Where stages can begin, in the order of the step. Of calls with no operation in between the outermost counts."""
    found: dict[int, Candidate] = {}
    for candidate in facts.candidates:
        if not candidate.obstacles:
            found.setdefault(candidate.operations_before, candidate)
    return list(found.values())


def choose(facts: Facts, stages: int, step: str) -> list[Candidate]:
    """Cuts the step into this many stages so that the slowest is as fast as can be.

    Raises:
        CutError: If the model has too few places.

    """
    if stages < 1:
        raise CutError(f"stages={stages}: there must be at least 1 stage")
    everywhere = usable(facts)
    places = [candidate for candidate in everywhere if not candidate.degenerate]
    if len(places) < stages - 1:
        places = everywhere
    if len(places) < stages - 1:
        raise CutError(
            f"stages={stages}, but {step} can be cut into at most {len(places) + 1} stages. {_can_begin_at(facts)}"
        )
    cuts = [
        Cut(candidate.operations_before, candidate.flops_before, candidate.bytes, candidate.parameters_before)
        for candidate in places
    ]
    total = len({name for _, name in facts.parameter_uses})
    return [places[index] for index in partition(cuts, facts.total_flops, stages, total)]


def named(facts: Facts, points: Sequence[SplitPoint], step: str, module: nn.Module) -> list[Candidate]:
    """The cuts with these names.

    Raises:
        CutError: If there is no such call, if it cannot begin a stage, or if the order is not that of the step.

    """
    called = {candidate.point: candidate for candidate in facts.candidates}
    cuts = []
    for stage, point in enumerate((_canonical(point, module) for point in points), start=1):
        if point not in called:
            raise CutError(_unknown(point, facts, step, module))
        cut = called[point]
        if cut.obstacles:
            reasons = [obstacle.text for obstacle in cut.obstacles]
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            raise CutError(f'Stage {stage} cannot begin at "{point}": {reasons[0]}{more}. {_can_begin_at(facts)}')
        cuts.append(cut)
    for before, after in pairwise(cuts):
        if before.index >= after.index:
            order = ", ".join(str(cut.point) for cut in sorted(cuts, key=lambda cut: cut.index))
            raise CutError(
                f'"{after.point}" cannot begin the stage after "{before.point}": stages are named in the order in '
                f"which {step} calls them, each once. That order is: {order}."
            )
    return cuts


def _canonical(point: SplitPoint, module: nn.Module) -> SplitPoint:
    """The split point under the name by which the dry run knows a submodule that has several."""
    try:
        wanted = module.get_submodule(point.module)
    except AttributeError:
        return point
    return next((SplitPoint(name, point.call) for name, part in module.named_modules() if part is wanted), point)


def _unknown(point: SplitPoint, facts: Facts, step: str, module: nn.Module) -> str:
    calls = [candidate.point for candidate in facts.candidates if candidate.point.module == point.module]
    if calls:
        return f'No stage can begin at "{point}": {step} calls {point.module} {_times(len(calls))}.'
    names = [name for name, _ in module.named_modules() if name]
    begins = [str(candidate.point) for candidate in usable(facts)]
    if point.module in names:
        inside = [name for name in begins if name.startswith(f"{point.module}.")]
        hint = f" Its parts are: {_listed(inside)}." if inside else f" {_can_begin_at(facts)}"
        return f'No stage can begin at "{point}": {step} does not call it.{hint}'
    near = difflib.get_close_matches(point.module, begins, n=3, cutoff=0.4)
    near += [name for name in difflib.get_close_matches(point.module, names, n=3, cutoff=0.4) if name not in near]
    hint = f"The nearest names are: {', '.join(near[:3])}." if near else _can_begin_at(facts)
    return f'No stage can begin at "{point}": the model has no submodule of that name. {hint}'


def _can_begin_at(facts: Facts) -> str:
    names = [str(candidate.point) for candidate in usable(facts) if not candidate.degenerate]
    names = names or [str(candidate.point) for candidate in usable(facts)]
    return f"Stages can begin at: {_listed(names)}." if names else "It has no place at all where a stage can begin."


def _listed(names: Sequence[str], limit: int = 12) -> str:
    """The shallowest names, in the order of the step."""
    depth = 0
    shown: list[str] = []
    while len(shown) < min(limit, len(names)):
        shown = [name for name in names if name.count(".") <= depth]
        depth += 1
    more = len(names) - min(len(shown), limit)
    return ", ".join(shown[:limit]) + (f" and {more} more" if more else "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
