"""Routing at scale: workers of speeds 1:2:4:8 in twelve regions, simulated microbatch by microbatch.

Throughput in the steady state as % of the max-flow bound (networkx) of the same workers, from 8 to 1,024 workers and
from 4 to 32 stages, over the latencies of a measured matrix of regions. The wiring learns speeds and latencies as the
real trainer does; how many microbatches are in flight follows from them.

    python benchmarks/simulate_routing.py [--traces DIR] [--noise 0] [--slack 5] [--quick] [--plots DIR] [--json FILE]
"""

import argparse
import time
from collections.abc import Callable, Generator
from pathlib import Path

from _report import Report, add_json_argument

from lightning_swarm.simulation.cli import print_table
from lightning_swarm.simulation.events import EventLoop
from lightning_swarm.simulation.model import SwarmSettings
from lightning_swarm.simulation.network import Network, read_network
from lightning_swarm.simulation.plots import plot_scaling
from lightning_swarm.simulation.studies import RoutingCell, routing_cell, spread_workers

STAGES = (4, 8, 16, 32)
WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)
SPEEDS = (1.0, 2.0, 4.0, 8.0)
FORWARD_S = 0.1


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "traces"
    parser.add_argument("--traces", type=Path, default=default, metavar="DIR", help="default: ../shared/traces")
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of the logarithm of a pass's seconds")
    parser.add_argument("--slack", type=float, default=5.0, help="microbatches in flight over what is in service")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="up to 64 workers and 8 stages")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the plot there")
    add_json_argument(parser)
    arguments = parser.parse_args()
    network = read_network(arguments.traces / "gcp12_latency_bandwidth.csv")
    settings = {"speeds": SPEEDS, "forward_s": FORWARD_S, "noise": arguments.noise, "slack": arguments.slack}
    report = Report("simulate_routing", **settings, seed=arguments.seed)

    start = time.process_time()
    cells: dict[tuple[int, int], RoutingCell] = {}
    for stages in STAGES[:2] if arguments.quick else STAGES:
        for workers in WORKERS[:4] if arguments.quick else WORKERS:
            if workers >= stages:
                cells[stages, workers] = simulate(stages, workers, network, arguments)
    report.figure("CPU time", time.process_time() - start, "s")
    rows = [
        [
            f"{stages}",
            f"{workers:,}",
            f"{cell.throughput:,.1f}",
            f"{cell.bound:,.1f}",
            f"{cell.percent:.1f}",
            f"{cell.in_flight:,}",
        ]
        for (stages, workers), cell in cells.items()
    ]
    print_table("", ["stages", "workers", "microbatches/s", "max flow", "%", "in flight"], rows)
    for (stages, workers), cell in cells.items():
        label = f"{stages} stages, {workers:,} workers"
        report.figure(label, cell.throughput, "microbatches/s", f"{cell.percent:.1f} % of {cell.bound:.4g}")
    report.ratio(
        "throughput / max flow, the worst cell", min(cell.percent for cell in cells.values()) / 100, at_least=0.97
    )
    most = max(workers for stages, workers in cells if stages == 4 and workers <= 128)
    scaling = cells[4, most].throughput / cells[4, 8].throughput / (most / 8)
    report.ratio(f"4 stages: speed-up from 8 to {most} workers / the number of workers", scaling, at_least=0.9)
    ours, theirs = event_rate(own_ticks, arguments.quick), event_rate(simpy_ticks, arguments.quick)
    report.figure("event loop, ours", ours, "events/s")
    report.figure("event loop, simpy", theirs, "events/s")
    report.ratio("event loop: ours / simpy", ours / theirs)
    report.finish(arguments.json)
    if arguments.plots is not None:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        series = {
            f"{stages} stages": [(n, cell.throughput, cell.bound) for (k, n), cell in cells.items() if k == stages]
            for stages in sorted({stages for stages, _ in cells})
        }
        plot_scaling(
            series, arguments.plots / "routing-scaling.png", "speeds 1:2:4:8, twelve regions", "microbatches/s"
        )


def simulate(stages: int, workers: int, network: Network, arguments: argparse.Namespace) -> RoutingCell:
    """One cell."""
    settings = SwarmSettings(
        stages, forward_s=FORWARD_S, noise=arguments.noise, slack=arguments.slack, trainer_region=network.regions[0]
    )
    return routing_cell(settings, spread_workers(workers, stages, SPEEDS, network, arguments.seed), network)


def event_rate(ticks: Callable[[int], None], quick: bool) -> float:
    """Events a second of CPU, the best of three rounds."""
    number, rates = 2_000 if quick else 100_000, []
    for _ in range(3):
        start = time.process_time()
        ticks(number)
        rates.append(number / (time.process_time() - start))
    return max(rates)


def own_ticks(number: int) -> None:
    """A hundred clocks on our event loop."""
    loop = EventLoop()

    def tick(left: int) -> None:
        if left:
            loop.after(1.0, tick, left - 1)

    for _ in range(100):
        loop.after(1.0, tick, number // 100 - 1)
    loop.run()


def simpy_ticks(number: int) -> None:
    """The same in simpy."""
    import simpy

    environment = simpy.Environment()

    def clock() -> Generator[simpy.Timeout, None, None]:
        for _ in range(number // 100):
            yield environment.timeout(1.0)

    for _ in range(100):
        environment.process(clock())
    environment.run()


if __name__ == "__main__":
    main()
