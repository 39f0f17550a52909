"""The choice of cuts is exact: compared with trying all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_swarm.policies.partitioning import Cut, partition


def cost(cuts: list[Cut], total: float, parameters: int, chosen: tuple[int, ...]) -> tuple[float, float, int]:
    """What ``partition`` minimises, spelled out."""
    flops = [0.0, *(cuts[i].flops_before for i in chosen), total]
    used = [0, *(cuts[i].parameters_before for i in chosen), parameters]
    return (
        max(b - a for a, b in itertools.pairwise(flops)),
        sum(cuts[i].boundary_bytes for i in chosen),
        sum(b == a for a, b in itertools.pairwise(used)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_other_choice_is_better(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    flops = sorted(draw.choice([0, 5, 10, 20, 30, 50]) for _ in range(count))
    owned = sorted(draw.randint(0, 4) for _ in range(count))
    cuts = [Cut(i, float(f), float(draw.randint(1, 3)), n) for i, (f, n) in enumerate(zip(flops, owned, strict=True))]
    total, parameters = flops[-1] + draw.choice([0, 10]), owned[-1] + draw.randint(0, 1)
    for stages in range(1, count + 2):
        chosen = partition(cuts, total, stages, parameters)
        assert len(chosen) == stages - 1 and list(chosen) == sorted(set(chosen))
        best = min(cost(cuts, total, parameters, other) for other in itertools.combinations(range(count), stages - 1))
        assert cost(cuts, total, parameters, chosen) == best


def test_bytes_decide_between_choices_that_are_equally_fast() -> None:
    cuts = [Cut(1, 50, 900), Cut(2, 50, 100), Cut(3, 50, 400)]
    assert partition(cuts, 100, 2) == (1,)


def test_stages_that_own_parameters_are_preferred() -> None:
    cuts = [Cut(1, 50, 100, parameters_before=0), Cut(2, 50, 100, parameters_before=3)]
    assert partition(cuts, 100, 2, total_parameters=4) == (1,)


def test_a_thousand_candidates_are_no_trouble() -> None:
    cuts = [Cut(i, float(i), 1.0, i) for i in range(1, 1000)]
    flops = [0.0, *(cuts[i].flops_before for i in partition(cuts, 1000, 8)), 1000.0]
    assert [b - a for a, b in itertools.pairwise(flops)] == [125.0] * 8


def test_a_step_without_any_flops_is_cut_all_the_same() -> None:
    assert partition([Cut(1, 0, 8, 1), Cut(2, 0, 4, 2)], 0, 2, 3) == (1,)


def test_too_few_candidates() -> None:
    with pytest.raises(ValueError, match="4 stages need 3 cuts, there are 1"):
        partition([Cut(1, 10, 1)], 20, 4)
