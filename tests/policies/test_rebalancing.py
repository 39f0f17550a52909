"""Moves happen when they pay, and only then."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_swarm.policies.rebalancing import Move, PaperRebalancer, Rebalancer, RebalancingPolicy, assign_stage
from lightning_swarm.policies.utilization import SwarmLoad, WorkerLoad


def swarm(*counts: int, **changes: object) -> SwarmLoad:
    """Stages with so many equal workers: a0, a1, ... at stage 0, b0, ... at stage 1."""
    workers = []
    for stage, count in enumerate(counts):
        for index in range(count):
            workers.append(WorkerLoad(f"{chr(97 + stage)}{index}", stage, **changes))  # type: ignore[arg-type]
    return SwarmLoad(len(counts), tuple(workers))


def without(load: SwarmLoad, *peers: str) -> SwarmLoad:
    return SwarmLoad(load.stages, tuple(worker for worker in load.workers if worker.peer not in peers))


def follow(load: SwarmLoad, moves: Sequence[Move], *, arrived: bool = True) -> SwarmLoad:
    targets = {move.peer: move.target for move in moves}
    return SwarmLoad(
        load.stages,
        tuple(
            WorkerLoad(w.peer, targets[w.peer] if arrived else w.stage, moving_to=None if arrived else targets[w.peer])
            if w.peer in targets
            else w
            for w in load.workers
        ),
    )


def counts(load: SwarmLoad) -> list[int]:
    counter = Counter(worker.stage for worker in load.workers)
    return [counter[stage] for stage in range(load.stages)]


def decide(policy: RebalancingPolicy, load: SwarmLoad, start: float = 0.0) -> tuple[Move, ...]:
    """The decision on a need that is confirmed by a second reading."""
    return policy.decide(start, load) or policy.decide(start + 5.0, load)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((5, 1), [3, 3]),
        ((3, 3), [3, 3]),
        ((4, 3), [4, 3]),
        ((9, 1, 1, 1), [3, 3, 3, 3]),
        ((1, 1, 1), [1, 1, 1]),
        ((6, 0), [3, 3]),
        ((1, 0), [1, 0]),
        ((2, 2, 2, 6), [3, 3, 3, 3]),
        ((10, 8, 6, 0), [6, 6, 6, 6]),
    ],
)
def test_moves_as_many_at_once_as_pays_and_never_the_last(before: tuple[int, ...], after: list[int]) -> None:
    load = swarm(*before)
    assert counts(follow(load, decide(Rebalancer(), load))) == after


def test_decision_tells_its_numbers() -> None:
    (move,) = decide(Rebalancer(download_s=30.0), swarm(3, 1))
    assert move == Move("a0", 0, 1, (3.0, 1.0), (2.0, 2.0), gain=600.0, cost=pytest.approx(3.0))
    assert str(move) == (
        "a0 moves from stage 0 to 1: planned microbatches/s [3, 1] -> [2, 2], expected gain 600, cost 3 microbatches"
    )


def test_nothing_happens_on_a_single_reading() -> None:
    policy, load = Rebalancer(), swarm(3, 3, 3)
    assert policy.decide(0.0, load) == ()
    assert policy.decide(5.0, without(load, "c0", "c1", "c2")) == (), "a false reading: stage 2 is empty"
    for now in range(10, 100, 5):
        assert policy.decide(now, load) == ()
    assert policy.losses.per_worker_s == 0.0


def test_noisy_speeds_move_nobody_over_50_periods() -> None:
    for sizes in ((3, 3), (2, 2, 2), (8, 8, 8, 8), (4, 3)):
        policy, generator = Rebalancer(60.0), random.Random(1)
        for reading in range(600):
            load = swarm(*sizes)
            noisy = tuple(
                WorkerLoad(w.peer, w.stage, generator.gauss(1.0, 0.1), busy_share=generator.uniform(0.8, 1.0))
                for w in load.workers
            )
            assert policy.decide(5.0 * reading, SwarmLoad(load.stages, noisy)) == ()


def test_moves_under_way_are_not_ordered_again() -> None:
    policy, load = Rebalancer(60.0), swarm(5, 1)
    moves = decide(policy, load)
    assert [move.peer for move in moves] == ["a0", "a1"]
    assert decide(policy, load, 10.0) == (), "not reported yet"
    assert decide(policy, follow(load, moves, arrived=False), 70.0) == ()
    assert decide(policy, follow(load, moves), 140.0) == ()


def test_refused_moves_are_ordered_again_later() -> None:
    policy, load = Rebalancer(60.0), swarm(5, 1)
    first = decide(policy, load)
    assert decide(policy, load, 20.0) == ()
    assert decide(policy, load, 80.0) == first


def test_worker_killed_in_the_middle_of_its_move_is_replaced() -> None:
    policy, load = Rebalancer(60.0), swarm(4, 1)
    (move,) = decide(policy, load)
    moving = follow(load, [move], arrived=False)
    assert policy.decide(10.0, moving) == ()
    load = without(moving, move.peer)
    assert policy.decide(15.0, load) == ()
    (again,) = policy.decide(20.0, load)
    assert (again.source, again.target) == (0, 1)


@pytest.mark.parametrize(("reacts", "answered"), [(True, 25.0), (False, 65.0)])
def test_loss_is_answered_before_the_period_is_over(reacts: bool, answered: float) -> None:
    policy, load = Rebalancer(60.0, react_to_losses=reacts), swarm(6, 2)
    load = follow(load, decide(policy, load))
    load = without(load, "b0", "b1")
    decisions = {now: policy.decide(now, load) for now in (10.0, 20.0, 25.0, 65.0) if now != 10.0 or not reacts}
    assert [now for now, moves in decisions.items() if moves] == [answered]


def test_no_move_when_the_download_costs_more_than_is_won() -> None:
    load = swarm(3, 1)
    assert decide(Rebalancer(download_s=60.0, horizon_s=600.0), load)
    assert not decide(Rebalancer(download_s=1e5, horizon_s=600.0, disturbance=0.2), load)


@pytest.mark.parametrize(("losses", "after"), [(0, [5, 3, 3, 3]), (40, [4, 4, 3, 3])])
def test_spares_are_spread_only_where_machines_vanish(losses: int, after: list[int]) -> None:
    policy, load = Rebalancer(), swarm(5, 3, 3, 3)
    present = [worker.peer for worker in load.workers]
    for index in range(losses):
        policy.losses.observe(60.0 * index, [*present, "spot"])
        policy.losses.observe(60.0 * index + 20.0, present)
        policy.losses.observe(60.0 * index + 40.0, present)
    assert counts(follow(load, decide(policy, load, 60.0 * losses))) == after


def test_announced_leavers_are_replaced_beforehand() -> None:
    load = swarm(3, 2)
    leaving = tuple(WorkerLoad(w.peer, w.stage, leaving=w.peer == "b0") for w in load.workers)
    (move,) = decide(Rebalancer(), SwarmLoad(2, leaving))
    assert (move.source, move.target) == (0, 1)


def test_joining_workers_count_where_they_will_serve() -> None:
    load = swarm(3, 1)
    joining = (*load.workers, WorkerLoad("new", 1, joining=True))
    assert decide(Rebalancer(), SwarmLoad(2, joining)) == ()


def test_speeds_count_and_not_heads() -> None:
    """Capacities 9 and 4; a fast worker for a slow one makes 6 and 7."""
    fast = (WorkerLoad("f", 0, 0.25), WorkerLoad("g", 0, 0.25), WorkerLoad("h", 0, 1.0, speed=0.25))
    slow = tuple(WorkerLoad(f"s{index}", 1, 1.0, speed=0.25) for index in range(4))
    moves = decide(Rebalancer(), SwarmLoad(2, fast + slow))
    assert [(move.peer, move.target) for move in moves] == [("f", 1), ("s0", 0)]
    assert (moves[0].before, moves[0].after) == ((9.0, 4.0), (6.0, 7.0))


def test_stages_that_do_not_limit_the_swarm_attract_nobody() -> None:
    load = swarm(3, 1, busy_share=0.2)
    assert decide(Rebalancer(), load) == ()
    assert decide(Rebalancer(), swarm(3, 1, busy_share=0.95))


@pytest.mark.parametrize("seed", range(20))
def test_rebalancing_ends(seed: int) -> None:
    """From any start a few rounds reach the best spread, and then nobody moves any more."""
    generator = random.Random(seed)
    load = swarm(*(generator.randrange(0, 9) for _ in range(generator.randrange(2, 9))))
    policy, now = Rebalancer(60.0), 0.0
    for _ in range(6):
        moves = decide(policy, load, now)
        load, now = follow(load, moves), now + 61.0
    assert moves == ()
    movable = sum(count > 1 for count in counts(load))
    if movable:
        best = len(load.workers) // load.stages
        assert min(counts(load)) == best


@pytest.mark.parametrize("period_s", [0, -1, math.inf, math.nan])
def test_periods_that_make_no_sense_are_refused(period_s: float) -> None:
    said = rf"must be positive and download_s cannot be negative, got {period_s}, 600.0 and 60.0"
    with pytest.raises(ValueError, match=said):
        Rebalancer(period_s)
    with pytest.raises(ValueError, match=rf"period_s must be positive, got {period_s}"):
        PaperRebalancer(period_s)


@pytest.mark.parametrize(
    ("before", "after"),
    [((5, 1), [4, 2]), ((3, 3), [3, 3]), ((2, 1), [1, 2]), ((1, 1), [1, 1]), ((9, 1, 1, 1), [8, 2, 1, 1])],
)
def test_papers_rule_moves_one_a_period_whatever_it_gains(before: tuple[int, ...], after: list[int]) -> None:
    policy, load = PaperRebalancer(300.0), swarm(*before)
    load = follow(load, policy.decide(0.0, load))
    assert counts(load) == after
    assert policy.decide(299.0, load) == ()


def test_papers_rule_takes_the_least_loaded_worker() -> None:
    queues = {"a0": 3.0, "a1": 1.0, "b0": 9.0}
    load = SwarmLoad(2, tuple(WorkerLoad(w.peer, w.stage, queue_s=queues[w.peer]) for w in swarm(2, 1).workers))
    assert [move.peer for move in PaperRebalancer().decide(0.0, load)] == ["a1"]


def test_joining_workers_are_spread() -> None:
    load, stages = swarm(2, 1, 2, 1), []
    for index in range(6):
        stages.append(assign_stage(load))
        load = SwarmLoad(4, (*load.workers, WorkerLoad(f"new{index}", stages[-1], joining=True)))
    assert sorted(stages[:2]) == [1, 3]
    assert counts(load) == [3, 3, 3, 3]


def test_joining_worker_goes_where_it_fits() -> None:
    assert assign_stage(swarm(3, 1, 2), allowed=[0, 2]) == 2
    with pytest.raises(ValueError, match="no stage that the worker could serve"):
        assign_stage(swarm(1, 1), allowed=[])
    empty = SwarmLoad(3, ())
    assert assign_stage(empty) == 0


@pytest.mark.parametrize("rule", [Rebalancer(), PaperRebalancer()])
def test_nobody_moves_to_a_stage_that_its_memory_cannot_hold(rule: RebalancingPolicy) -> None:
    load = swarm(3, 1)
    small = tuple(replace(w, allowed=frozenset({0})) if w.stage == 0 and w.peer != "a2" else w for w in load.workers)
    assert [move.peer for move in decide(rule, replace(load, workers=small))] == ["a2"]
    none = tuple(replace(w, allowed=frozenset({w.stage})) for w in load.workers)
    assert not decide(type(rule)(), replace(load, workers=none))
