"""Churn over hours: the books are right, and the rules rank as they should."""

import pytest

from lightning_swarm.policies.rebalancing import PaperRebalancer, Rebalancer
from lightning_swarm.simulation.allocation import AllocationSettings, simulate_allocation
from lightning_swarm.simulation.studies import RULES, rebalancing_cell
from lightning_swarm.simulation.traces import ChurnTrace

STEADY = ChurnTrace("steady", 8, (), 1000.0)
CHURN = ChurnTrace("churn", 14, tuple((60.0 * k, -1 if k % 2 else 1) for k in range(1, 100)), 6000.0)


def test_nothing_happens_and_nothing_is_lost() -> None:
    for policy in (None, Rebalancer(), PaperRebalancer()):
        result = simulate_allocation(STEADY, AllocationSettings(4), policy, 0)
        assert (result.percent, result.ceiling_percent, result.moves, result.stalled_percent) == (100.0, 100.0, 0, 0.0)


def test_one_loss_costs_what_it_must() -> None:
    """Of 9 workers one is lost at 500 s: a spare of another stage arrives 4 s (two readings) and 60 s later."""
    trace = ChurnTrace("one", 9, ((500.0, -1),), 1000.0)
    settings = AllocationSettings(4, 60.0)
    percents = {round(simulate_allocation(trace, settings, Rebalancer(), seed).percent, 6) for seed in range(10)}
    assert percents == {100.0, 100 - 100 * 64 / 2000}
    assert {simulate_allocation(trace, settings, None, seed).percent for seed in range(10)} == {100.0, 75.0}


def test_joining_machines_download_first() -> None:
    trace = ChurnTrace("join", 1, ((500.0, 1),), 1000.0)
    result = simulate_allocation(trace, AllocationSettings(1, 100.0), None, 0)
    assert result.percent == result.ceiling_percent == pytest.approx(100 * 1400 / 1500)
    free = simulate_allocation(trace, AllocationSettings(1, 0.0), None, 0)
    assert free.percent == 100.0


def test_machine_that_is_lost_during_its_download_never_serves() -> None:
    trace = ChurnTrace("gone", 0, ((100.0, 1), (150.0, -1), (200.0, 1)), 400.0)
    result = simulate_allocation(trace, AllocationSettings(1, 100.0), Rebalancer(), 0)
    assert result.percent == pytest.approx(100 * 100 / 250)


def test_notice_lets_the_replacement_come_in_time() -> None:
    trace = ChurnTrace("one", 9, ((500.0, -1),), 1000.0)
    settings = AllocationSettings(4, 60.0, notice_s=120.0)
    assert {simulate_allocation(trace, settings, Rebalancer(), seed).percent for seed in range(10)} == {100.0}


def test_a_worker_with_a_notice_hands_over_before_the_loss() -> None:
    trace = ChurnTrace("one", 8, ((500.0, -1),), 1000.0)
    result = simulate_allocation(trace, AllocationSettings(4, 60.0, notice_s=60.0, hand_over_s=10.0), None, 0)
    assert result.percent == pytest.approx(100 * 1490 / 1500)


def test_empty_stage_stalls_until_somebody_moves_there() -> None:
    trace = ChurnTrace("two", 4, ((100.0, -1),), 1000.0)
    stuck = [simulate_allocation(trace, AllocationSettings(2, 60.0, join="random"), None, seed) for seed in range(20)]
    healed = [simulate_allocation(trace, AllocationSettings(2, 60.0), Rebalancer(), seed) for seed in range(20)]
    assert max(result.stalled_percent for result in stuck) > 80.0
    assert max(result.stalled_percent for result in healed) == 0.0


def test_rules_rank_as_they_should() -> None:
    traces = [CHURN] * 5
    percent = {key: rebalancing_cell(traces, 4, 30.0, RULES[key]).percent for key in RULES}
    assert percent["random"] < percent["smallest"] < percent["ours"] < percent["ours-notice-30"]
    assert percent["random"] < percent["paper-60"] < percent["ours"]
    assert percent["ours-notice-30"] <= rebalancing_cell(traces, 4, 30.0, RULES["ours"]).ceiling + 0.01


def test_seed_determines_the_run_and_the_timeline_adds_up() -> None:
    settings = AllocationSettings(4, 60.0, record=True)
    first, second = (simulate_allocation(CHURN, settings, Rebalancer(), 3) for _ in range(2))
    assert first == second
    ends = [row[0] for row in first.timeline[1:]] + [CHURN.end_s]
    spans = [end - row[0] for row, end in zip(first.timeline, ends, strict=True)]
    done = sum(span * min(row[2], row[3]) for row, span in zip(first.timeline, spans, strict=True))
    best = sum(span * row[3] for row, span in zip(first.timeline, spans, strict=True))
    assert first.percent == pytest.approx(100 * done / best)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 0}, "at least one stage, got 0"),
        ({"stages": 1, "join": "largest"}, "got 'largest'"),
        ({"stages": 1, "download_s": -1.0}, "cannot be negative"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllocationSettings(**settings)  # type: ignore[arg-type]
