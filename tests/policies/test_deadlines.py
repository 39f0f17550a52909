"""Deadlines follow measurements."""

import random

import pytest

from lightning_swarm.policies.deadlines import Deadlines


def measured(seconds: dict[str, float], number: int = 32, **options: float) -> Deadlines:
    deadlines = Deadlines(**options)  # type: ignore[arg-type]
    generator = random.Random(0)
    for peer, value in seconds.items():
        for _ in range(number):
            deadlines.completed(peer, 0, "process", value * generator.uniform(0.9, 1.1))
    return deadlines


def test_no_timeout_is_needed_when_speeds_differ_twenty_times() -> None:
    deadlines = measured({"fast": 1.0, "slow": 20.0})
    assert 2.0 < deadlines.deadline_s("fast", 0, "process") < 6.0
    assert 40.0 < deadlines.deadline_s("slow", 0, "process") < 120.0


@pytest.mark.parametrize(
    ("known", "expected"),
    [({}, 120.0), ({"a": 0.01}, 2.0), ({"a": 1.0}, 20.0), ({"a": 1.0, "b": 2.0, "c": 100.0}, 40.0)],
)
def test_new_peer_gets_a_generous_deadline_from_its_stage(known: dict[str, float], expected: float) -> None:
    assert measured(known).deadline_s("new", 0, "process") == pytest.approx(expected, rel=0.1)


def test_new_peer_may_take_as_long_for_its_first_call_as_others_took_for_theirs() -> None:
    deadlines = Deadlines()
    for peer, first in (("a", 40.0), ("b", 30.0), ("c", 500.0)):
        deadlines.completed(peer, 0, "process", first)
        for _ in range(32):
            deadlines.completed(peer, 0, "process", 0.1)
    assert deadlines.first_s("new", 0, "process") == pytest.approx(120.0)
    assert deadlines.first_s("new", 1, "process") == deadlines.first_s("new", 0, "reduce") == 0.0
    assert deadlines.deadline_s("new", 0, "process") == 2.0, "it is asked what it does as soon as before"
    deadlines.completed("new", 0, "process", 50.0)
    for _ in range(32):
        deadlines.completed("new", 0, "process", 0.1)
    assert deadlines.first_s("new", 0, "process") == 0.0


def test_other_stages_and_calls_say_nothing() -> None:
    deadlines = measured({"a": 0.01})
    assert deadlines.deadline_s("new", 1, "process") == 120.0
    assert deadlines.deadline_s("a", 0, "reduce") == 120.0
    assert deadlines.stage_median_s(0, "reduce") is None


def test_floor_ceiling_and_queue() -> None:
    deadlines = measured({"quick": 0.001, "a": 5.0, "snail": 1e6}, floor_s=3.0)
    assert deadlines.deadline_s("quick", 0, "process") == 3.0
    assert deadlines.deadline_s("snail", 0, "process") == 3600.0
    assert deadlines.deadline_s("a", 0, "process", ahead=4) == pytest.approx(
        deadlines.deadline_s("a", 0, "process") + 20.0, rel=0.05
    )


def test_timeouts_double_the_deadline_until_the_peer_answers() -> None:
    deadlines = measured({"a": 5.0})
    usual = deadlines.deadline_s("a", 0, "process")
    deadlines.timed_out("a", 0, "process")
    deadlines.timed_out("a", 0, "process")
    assert deadlines.deadline_s("a", 0, "process") == pytest.approx(4 * usual)
    deadlines.completed("a", 0, "process", 5.0)
    assert deadlines.deadline_s("a", 0, "process") == pytest.approx(usual, rel=0.01)


def test_worker_that_became_slow_is_given_the_time_it_needs() -> None:
    deadlines = measured({"a": 1.0})
    for _ in range(20):
        if deadlines.deadline_s("a", 0, "process") >= 20.0:
            deadlines.completed("a", 0, "process", 20.0)
        else:
            deadlines.timed_out("a", 0, "process")
    assert deadlines.deadline_s("a", 0, "process") >= 20.0


def test_spread_widens_the_deadline() -> None:
    steady, varied = Deadlines(), Deadlines()
    for index in range(16):
        steady.completed("a", 0, "process", 5.0)
        varied.completed("a", 0, "process", 2.0 + 6.0 * (index % 2))
    assert varied.deadline_s("a", 0, "process") > 2 * steady.deadline_s("a", 0, "process")


def test_move_and_leave_begin_afresh() -> None:
    deadlines = measured({"a": 0.01})
    deadlines.completed("a", 1, "process", 9.0)
    assert deadlines.deadline_s("a", 1, "process") == pytest.approx(27.0)
    deadlines.forget("a")
    assert deadlines.deadline_s("a", 1, "process") == 120.0


def test_bounds_must_be_ordered() -> None:
    with pytest.raises(ValueError, match=r"0 < floor_s <= initial_s <= ceiling_s, got 5 <= 2 <= 3600.0"):
        Deadlines(floor_s=5, initial_s=2)
