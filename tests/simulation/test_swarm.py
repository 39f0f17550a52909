"""Single microbatches: timing that can be computed by hand, and every fault survived."""

from collections.abc import Callable

import pytest

from lightning_swarm.policies.rebalancing import Rebalancer
from lightning_swarm.simulation.model import SimulatedWorker, SwarmSettings
from lightning_swarm.simulation.network import Network
from lightning_swarm.simulation.studies import max_flow, routing_cell, spread_workers
from lightning_swarm.simulation.swarm import SwarmSimulation


def swarm(*counts: int, speed: Callable[[str], float] = lambda name: 1.0, **settings: object) -> SwarmSimulation:
    """Stages with so many workers, named by stage and number: 0.0, 0.1, 1.0, ..."""
    names = [f"{stage}.{index}" for stage, count in enumerate(counts) for index in range(count)]
    policy = settings.pop("policy", None)
    network = settings.pop("network", None)
    return SwarmSimulation(
        SwarmSettings(len(counts), **{"forward_s": 1.0, **settings}),  # type: ignore[arg-type]
        [SimulatedWorker(name, int(name[0]), speed(name)) for name in names],
        network,  # type: ignore[arg-type]
        policy,  # type: ignore[arg-type]
    )


def test_one_microbatch_takes_both_passes_everywhere_and_the_links() -> None:
    """Trainer to 0, 1 + 2 s there, 3 s at the last stage, one boundary there and back, reply: 6 s and 4 latencies."""
    report = swarm(1, 1, in_flight=1, network=Network(latency_s=0.25)).run_microbatches(1)
    assert report.seconds == pytest.approx(6.0 + 4 * 0.25)


def test_transfers_wait_for_the_uplink() -> None:
    network = Network(bytes_per_s=100.0)
    report = swarm(1, 1, in_flight=1, network=network, activation_bytes=50.0).run_microbatches(1)
    assert report.seconds == pytest.approx(6.0 + 2 * 0.5)


@pytest.mark.parametrize(
    ("counts", "forward", "rate"),
    [((1,), 1.0, 1 / 3), ((1, 1, 1), 1.0, 1 / 3), ((2, 1), (1.0, 0.5), 2 / 3), ((3, 3), 0.1, 10.0)],
)
def test_full_pipeline_runs_at_its_weakest_stage(
    counts: tuple[int, ...], forward: float | tuple[float, ...], rate: float
) -> None:
    pipeline = swarm(*counts, forward_s=forward)
    pipeline.run_microbatches(50)
    assert pipeline.run_microbatches(200).throughput == pytest.approx(rate, rel=0.01)


def test_overhead_occupies_the_worker() -> None:
    pipeline = swarm(1, overhead_s=0.25)
    assert pipeline.run_microbatches(100).throughput == pytest.approx(1 / 3.5, rel=0.01)


def test_shares_follow_speeds() -> None:
    pipeline = swarm(3, 3, speed=lambda name: 0.25 if name == "0.0" else 1.0)
    pipeline.run_microbatches(50)
    report = pipeline.run_microbatches(900)
    assert report.share["0.0"] == pytest.approx(0.25 / 2.25, rel=0.05)
    assert report.throughput == pytest.approx(2.25 / 3, rel=0.02)
    assert report.busy["0.1"] == pytest.approx(1.0, abs=0.03)


def test_worker_that_becomes_slow_is_followed() -> None:
    pipeline = swarm(3)
    pipeline.run_microbatches(60)
    pipeline.slow("0.0", 0.25)
    pipeline.run_microbatches(20)
    assert pipeline.run_microbatches(180).share["0.0"] == pytest.approx(0.25 / 2.25, rel=0.1)


def test_steps_end_with_reduction_and_commit() -> None:
    pipeline = swarm(1, 1, microbatches=4, sync_s=10.0, in_flight=1)
    report = pipeline.run(3 * (4 * 6.0 + 10.0) - 0.001)
    assert (report.steps, report.microbatches) == (2, 12)
    pipeline.run(0.001)
    assert pipeline.steps == 3


@pytest.mark.parametrize("moment", [0.5, 3.0, 7.3, 11.1, 12.0, 14.0])
@pytest.mark.parametrize("victim", ["0.0", "1.1", "2.0"])
def test_killed_worker_costs_only_what_it_held(victim: str, moment: float) -> None:
    pipeline = swarm(2, 2, 2, microbatches=6, sync_s=3.0)
    pipeline.run(moment)
    held = len(pipeline.workers[victim].held)
    pipeline.kill(victim)
    report = pipeline.run(200.0)
    assert pipeline.repeated == held <= 6
    assert report.steps >= 7
    assert 0 <= pipeline.finished - 6 * pipeline.steps <= 6


def test_worker_killed_during_the_reduction_delays_the_commit() -> None:
    pipeline = swarm(2, microbatches=4, sync_s=10.0)
    pipeline.run_microbatches(4)
    pipeline.run(5.0)
    held = len(pipeline.workers["0.0"].held)
    pipeline.kill("0.0")
    assert held and pipeline.finished == 4 - held
    pipeline.run(3.0 * held + 9.9)
    assert (pipeline.steps, pipeline.finished) == (0, 4)
    pipeline.run(0.2)
    assert pipeline.steps == 1


@pytest.mark.parametrize("microbatches", [None, 4])
def test_stage_without_workers_waits_for_one(microbatches: int | None) -> None:
    pipeline = swarm(1, 1, microbatches=microbatches, download_s=20.0)
    pipeline.run(10.0)
    pipeline.kill("1.0")
    assert pipeline.run(100.0).microbatches <= 1
    assert pipeline.join("new") == 1
    pipeline.run(25.0)
    assert pipeline.run(100.0).microbatches > 20


def test_hung_worker_is_found_out_and_returns() -> None:
    pipeline = swarm(3)
    pipeline.run_microbatches(60)
    pipeline.hang("0.0")
    pipeline.run(100.0)
    tasks = pipeline.workers["0.0"].tasks
    report = pipeline.run(300.0)
    assert pipeline.workers["0.0"].tasks - tasks <= 12
    assert report.throughput == pytest.approx(2 / 3, rel=0.05)
    pipeline.recover("0.0")
    pipeline.run(900.0)
    assert pipeline.run(300.0).throughput == pytest.approx(1.0, rel=0.05)


def test_hang_that_ends_before_the_deadline_loses_nothing() -> None:
    pipeline = swarm(1)
    pipeline.run(10.0)
    pipeline.hang("0.0")
    pipeline.run(5.0)
    pipeline.recover("0.0")
    assert pipeline.run(30.0).microbatches == 10
    assert pipeline.repeated == 0


def test_five_and_one_become_three_and_three() -> None:
    pipeline = swarm(5, 1, policy=Rebalancer(60.0, download_s=10.0), microbatches=12, sync_s=1.0, download_s=10.0)
    before = pipeline.run(60.0).throughput
    pipeline.run(120.0)
    assert sorted(worker.stage for worker in pipeline.workers.values()) == [0, 0, 0, 1, 1, 1]
    after = pipeline.run(600.0)
    assert after.moves == ()
    assert after.throughput > 2.0 * before


def test_killed_workers_are_made_good_by_moves() -> None:
    pipeline = swarm(4, 3, policy=Rebalancer(60.0, download_s=10.0), download_s=10.0, noise=0.1)
    pipeline.run(300.0)
    assert pipeline.moves == []
    pipeline.kill("1.0")
    pipeline.kill("1.1")
    pipeline.run(120.0)
    counts = [sum(worker.stage == stage for worker in pipeline.workers.values()) for stage in range(2)]
    assert sorted(counts) == [2, 3]


def test_noise_moves_nobody() -> None:
    pipeline = swarm(3, 3, policy=Rebalancer(60.0), noise=0.2)
    pipeline.run(3000.0)
    assert pipeline.moves == []


def test_near_workers_are_used_where_it_helps() -> None:
    network = Network(between={("east", "west"): (2.0, 1e9)})
    rates = []
    for near_first in (True, False):
        workers = [SimulatedWorker(f"{k}{region}", k, region=region) for k in range(2) for region in ("east", "west")]
        settings = SwarmSettings(2, forward_s=0.1, in_flight=8, near_first=near_first, trainer_region="north")
        pipeline = SwarmSimulation(settings, workers, network)
        pipeline.run_microbatches(50)
        rates.append(pipeline.run_microbatches(200).throughput)
    assert rates[0] > 2.0 * rates[1]


def test_allocation_and_single_microbatches_agree() -> None:
    """The coarse simulation takes the weakest stage's workers as the throughput; so does the fine one, to some %."""
    pipeline = swarm(4, 4, 4, forward_s=0.1)
    pipeline.run_microbatches(200)
    for victim, weakest in [("0.0", 3), ("1.0", 3), ("1.1", 2), ("2.0", 2), ("1.2", 1)]:
        pipeline.kill(victim)
        pipeline.run_microbatches(60)
        assert pipeline.run_microbatches(200).throughput == pytest.approx(weakest / 0.3, rel=0.03)


def test_unequal_workers_reach_the_max_flow() -> None:
    network = Network(between={("a", "b"): (0.05, 1e8), ("a", "c"): (0.1, 1e8), ("b", "c"): (0.02, 1e8)})
    settings = SwarmSettings(3, forward_s=0.1, noise=0.05, slack=4.0, trainer_region="a")
    workers = spread_workers(18, 3, (1.0, 2.0, 4.0, 8.0), network, 0)
    bound = min(sum(worker.speed for worker in workers if worker.stage == stage) for stage in range(3)) / 0.3
    assert max_flow(workers, settings) == pytest.approx(bound)
    assert routing_cell(settings, workers, network, warm_up=4, cycles=3).percent > 96.0
