"""Where to cut a model into stages: an exact choice among the places where it can be cut.

Pure numbers in, indices out (design 2.4). The slowest stage decides a pipeline's speed, so its FLOPs come first;
among the choices that are equal there the one with the fewest bytes on the wire wins, then the one in which more
stages own parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """A place where a stage could begin.

    Args:
        position: Where it is in the step; cuts are given in ascending order of it.
        flops_before: FLOPs of the step up to there.
        boundary_bytes: What would cross there.
        parameters_before: How many parameters were used up to there.

    """

    position: int
    flops_before: float
    boundary_bytes: float
    parameters_before: int = 1


@dataclass(frozen=True, order=True)
class _Cost:
    slowest_flops: float
    boundary_bytes: float
    idle_stages: int


def partition(
    candidates: Sequence[Cut], total_flops: float, stages: int, total_parameters: int | None = None
) -> tuple[int, ...]:
    """Chooses ``stages - 1`` of the candidates.

    Args:
        candidates: Where stages could begin, in ascending order of position, no two at the same position.
        total_flops: FLOPs of the whole step.
        stages: How many stages to make.
        total_parameters: How many parameters the whole step uses.

    Returns:
        Ascending indices into ``candidates``.

    Raises:
        ValueError: If there are fewer than ``stages - 1`` candidates.

    Example::

        >>> cuts = [Cut(1, 10, 8), Cut(2, 20, 2), Cut(3, 30, 8)]
        >>> partition(cuts, total_flops=40, stages=2)
        (1,)

    """
    if stages - 1 > len(candidates):
        raise ValueError(f"{stages} stages need {stages - 1} cuts, there are {len(candidates)}")
    if stages == 1:
        return ()
    flops = [0.0, *(cut.flops_before for cut in candidates), float(total_flops)]
    costs = [0.0, *(float(cut.boundary_bytes) for cut in candidates), 0.0]
    last = total_parameters if total_parameters is not None else candidates[-1].parameters_before + 1
    used = [0, *(cut.parameters_before for cut in candidates), last]
    limit = _smallest_bottleneck(flops, stages)
    return _cheapest(flops, costs, used, stages, limit)


def _smallest_bottleneck(flops: list[float], stages: int) -> float:
    """The least possible FLOPs of the slowest stage. Points are 0, the candidates, the end."""
    points = len(flops)
    best = flops[:]
    for made in range(2, stages + 1):
        following = [float("inf")] * points
        for end in range(made, points):
            # best[] grows with the point, the rest of the way to `end` shrinks: the minimum is where they meet.
            low, high = made - 1, end - 1
            middle = bisect_left(range(low, high), True, key=lambda p: best[p] >= flops[end] - flops[p]) + low
            for point in (middle - 1, middle):
                if low <= point <= high:
                    following[end] = min(following[end], max(best[point], flops[end] - flops[point]))
        best = following
    return best[-1]


def _cheapest(flops: list[float], costs: list[float], used: list[int], stages: int, limit: float) -> tuple[int, ...]:
    """The cheapest choice whose stages all stay within the limit."""
    points = len(flops)
    slack = limit * (1 + 1e-9)
    first = (0.0, 0, ())
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: first}
    for made in range(1, stages + 1):
        following: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        ends = range(made, points) if made < stages else range(points - 1, points)
        for end in ends:
            for begin in range(bisect_left(flops, flops[end] - slack, 0, end), end):
                if begin not in best or (begin == 0 and made > 1):
                    continue
                bytes_before, idle, cuts = best[begin]
                found = (
                    bytes_before + costs[end],
                    idle + (used[end] == used[begin]),
                    (*cuts, end - 1) if end < points - 1 else cuts,
                )
                if end not in following or found < following[end]:
                    following[end] = found
        best = following
    return best[points - 1][2]
