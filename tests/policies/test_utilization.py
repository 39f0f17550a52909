"""Load measures."""

import pytest

from lightning_swarm.policies.utilization import (
    LossRate,
    ServiceTime,
    SwarmLoad,
    WorkerLoad,
    capacities,
    effective_speeds,
    stage_costs,
    throughput,
)


def test_service_time_is_an_unbiased_average() -> None:
    service = ServiceTime(0.1)
    assert service.seconds is None
    for _ in range(5):
        assert service.update(3.0) == pytest.approx(3.0)
    for _ in range(100):
        service.update(1.0)
    assert service.seconds == pytest.approx(1.0, rel=0.01)
    with pytest.raises(ValueError, match=r"smoothing must lie in \(0, 1\], got 0"):
        ServiceTime(0)


@pytest.mark.parametrize(
    ("workers", "plan", "expected"),
    [
        ([], None, [1.0, 1.0]),
        ([WorkerLoad("a", 0, 2.0), WorkerLoad("b", 0, 4.0), WorkerLoad("c", 0, 4.0)], None, [4.0, 4.0]),
        ([WorkerLoad("a", 0, 2.0, speed=3.0)], (1.0, 0.5), [6.0, 3.0]),
        (
            [WorkerLoad("a", 0, 2.0), WorkerLoad("b", 1, 8.0), WorkerLoad("c", 1, 1.0, joining=True)],
            (1.0, 1.0),
            [2.0, 8.0],
        ),
    ],
)
def test_stage_costs(workers: list[WorkerLoad], plan: tuple[float, ...] | None, expected: list[float]) -> None:
    assert stage_costs(SwarmLoad(2, tuple(workers), plan)) == pytest.approx(expected)


def test_capacities_now_and_planned() -> None:
    load = SwarmLoad(
        3,
        (
            WorkerLoad("a", 0, 0.5),
            WorkerLoad("b", 0, 0.5, moving_to=1),
            WorkerLoad("c", 1, 1.0, leaving=True),
            WorkerLoad("d", 1, 1.0),
            WorkerLoad("e", 2, joining=True, speed=2.0),
        ),
    )
    now, planned = capacities(load)
    assert now == pytest.approx([4.0, 2.0, 0.0])
    assert planned == pytest.approx([2.0, 2.0, 2.0 / stage_costs(load)[2]])
    assert throughput(load) == 0.0
    assert effective_speeds(load, stage_costs(load)) == pytest.approx([1, 1, 1, 1, 2])


def test_stage_costs_must_fit() -> None:
    with pytest.raises(ValueError, match="1 stage costs for 2 stages"):
        SwarmLoad(2, (), (1.0,))


def test_losses_are_counted_once_two_readings_miss_a_worker() -> None:
    losses = LossRate()
    assert losses.per_worker_s == 0.0
    assert losses.observe(0.0, "abcd") == frozenset()
    assert losses.observe(10.0, "abc") == frozenset()
    assert losses.observe(20.0, "abc") == {"d"}
    assert losses.observe(30.0, "") == frozenset(), "one false reading"
    assert losses.observe(40.0, "abc") == frozenset()
    assert losses.per_worker_s == pytest.approx(1 / 100, rel=0.2)
