"""The two questions that the simulator is asked: how good is a rebalancing rule, and how good is the routing?

Each function answers for one cell of a table; the command line and the benchmarks put cells together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev

from lightning_swarm.policies.rebalancing import PaperRebalancer, Rebalancer, RebalancingPolicy, assign_stage
from lightning_swarm.policies.utilization import SwarmLoad, WorkerLoad
from lightning_swarm.simulation.allocation import AllocationResult, AllocationSettings, simulate_allocation
from lightning_swarm.simulation.model import SimulatedWorker, SwarmSettings
from lightning_swarm.simulation.network import Network
from lightning_swarm.simulation.swarm import SwarmSimulation
from lightning_swarm.simulation.traces import ChurnTrace

__all__ = [
    "RULES",
    "RebalancingCell",
    "RoutingCell",
    "Rule",
    "max_flow",
    "rebalancing_cell",
    "routing_cell",
    "spread_workers",
]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a swarm places its workers.

    Args:
        name: for tables.
        policy: makes the rebalancing policy for a download time; None never moves anybody.
        join: where new machines go, see :class:`AllocationSettings`.
        notice_s: the spot market's notice.
    """

    name: str
    policy: Callable[[float], RebalancingPolicy] | None = None
    join: str = "smallest"
    notice_s: float = 0.0


RULES: Mapping[str, Rule] = {
    "random": Rule("none, random joins", join="random"),
    "smallest": Rule("none, join the smallest"),
    "paper-300": Rule("the paper's, T = 300 s", lambda download_s: PaperRebalancer(300.0)),
    "paper-60": Rule("the paper's, T = 60 s", lambda download_s: PaperRebalancer(60.0)),
    "ours": Rule("ours", lambda download_s: Rebalancer(60.0, download_s=download_s)),
    "ours-notice-30": Rule(
        "ours, 30 s notice", lambda download_s: Rebalancer(60.0, download_s=download_s), notice_s=30.0
    ),
    "ours-notice-120": Rule(
        "ours, 120 s notice", lambda download_s: Rebalancer(60.0, download_s=download_s), notice_s=120.0
    ),
}
"""The rules that are compared."""


@dataclass(frozen=True, slots=True)
class RebalancingCell:
    """Means over the seeds, in % of the best possible; ``spread`` is their standard deviation."""

    percent: float
    spread: float
    ceiling: float
    moves: float
    runs: tuple[AllocationResult, ...]


def rebalancing_cell(
    traces: Sequence[ChurnTrace], stages: int, download_s: float, rule: Rule, *, record: bool = False
) -> RebalancingCell:
    """Simulate a rule on a trace a seed; the trace's index is the seed."""
    settings = AllocationSettings(stages, download_s, rule.join, rule.notice_s, record=record)
    runs = tuple(
        simulate_allocation(trace, settings, rule.policy(download_s) if rule.policy else None, seed)
        for seed, trace in enumerate(traces)
    )
    percents = [run.percent for run in runs]
    return RebalancingCell(
        mean(percents),
        pstdev(percents),
        mean(run.ceiling_percent for run in runs),
        mean(run.moves for run in runs),
        runs,
    )


@dataclass(frozen=True, slots=True)
class RoutingCell:
    """One simulated swarm.

    Args:
        throughput: microbatches a second in the steady state.
        bound: the max-flow bound of the same workers.
        in_flight: microbatches in flight.
        events: simulated events.
    """

    throughput: float
    bound: float
    in_flight: int
    events: int

    @property
    def percent(self) -> float:
        """Throughput in % of the bound."""
        return 100.0 * self.throughput / self.bound


def spread_workers(
    number: int, stages: int, speeds: Sequence[float], network: Network, seed: int
) -> list[SimulatedWorker]:
    """Workers of these speeds in turn, at random places; the fastest come first, each where it is needed most."""
    generator = random.Random(seed)
    regions = network.regions or ("",)
    loads: list[WorkerLoad] = []
    workers = []
    for index, speed in enumerate(sorted((speeds[index % len(speeds)] for index in range(number)), reverse=True)):
        stage = assign_stage(SwarmLoad(stages, tuple(loads)), speed=speed)
        loads.append(WorkerLoad(f"w{index}", stage, speed=speed))
        workers.append(SimulatedWorker(f"w{index}", stage, speed, generator.choice(regions)))
    return workers


def max_flow(workers: Sequence[SimulatedWorker], settings: SwarmSettings) -> float:
    """Microbatches a second that no routing exceeds: the maximum flow through the workers' rates."""
    try:
        import networkx
    except ImportError:
        raise ImportError(
            "The max-flow bound needs networkx: pip install '.[simulation]' in a clone of lightning-swarm"
        ) from None
    graph = networkx.DiGraph()
    for worker in workers:
        seconds = settings.forward_of(worker.stage) / worker.speed * (1.0 + settings.backward_ratio)
        seconds += 2.0 * settings.overhead_s
        graph.add_edge(("stage", worker.stage), worker.name, capacity=1.0 / seconds)
        graph.add_edge(worker.name, ("stage", worker.stage + 1))
    return float(networkx.maximum_flow_value(graph, ("stage", 0), ("stage", settings.stages)))


def routing_cell(
    settings: SwarmSettings,
    workers: Sequence[SimulatedWorker],
    network: Network,
    *,
    seed: int = 0,
    warm_up: int = 10,
    cycles: int = 3,
) -> RoutingCell:
    """Simulate until the start is forgotten, then measure.

    Args:
        settings: of the swarm.
        workers: fresh ones; the simulation changes them.
        network: the links.
        seed: of the noise.
        warm_up: how many times the number in flight pass before the measurement.
        cycles: how many times the number in flight are measured.
    """
    bound = max_flow(workers, settings)
    swarm = SwarmSimulation(settings, workers, network, seed=seed)
    swarm.run_microbatches(2 * len(workers))
    for _ in range(warm_up):
        swarm.run_microbatches(swarm.in_flight_target)
    in_flight = swarm.in_flight_target
    report = swarm.run_microbatches(max(cycles * in_flight, 400))
    return RoutingCell(report.throughput, bound, in_flight, swarm.loop.handled)
