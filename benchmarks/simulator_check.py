"""Does the simulator tell what the real swarm does? The scenario of ``rebalancing.py`` in both.

Six workers, five at stage 0 and one at stage 1; the first steps are made so, then the same policy object balances them.
The simulation gets the costs that were measured in the real run (what a microbatch takes a worker, what the end of a
step takes) and the same numbers of workers, microbatches and seconds between readings; the throughputs before and after
are to agree within 10 %.

    python benchmarks/simulator_check.py [--pause 0.1] [--microbatches 48] [--json FILE]
"""

import argparse
from typing import Any

from _report import Report, add_json_argument
from rebalancing import MEASURED_AFTER, MEASURED_BEFORE, PERIOD_S, STAGES, STEPS, WORKERS, measure

from lightning_swarm.policies.rebalancing import Rebalancer
from lightning_swarm.simulation.model import SimulatedWorker, SwarmSettings
from lightning_swarm.simulation.swarm import SwarmSimulation


class FromStep(Rebalancer):
    """Begins when the state of things before has been measured."""

    simulation: SwarmSimulation

    def decide(self, now: float, load: Any) -> Any:
        return super().decide(now, load) if self.simulation.steps >= MEASURED_BEFORE[1] else ()


def simulate(compute_s: float, end_s: float, microbatches: int) -> tuple[float, float, list[int]]:
    """Throughput before and after, and the stages' workers at the end."""
    settings = SwarmSettings(
        STAGES,
        forward_s=compute_s,
        backward_ratio=0.0,
        microbatches=microbatches,
        sync_s=end_s,
        reading_s=PERIOD_S / 4,
    )
    policy = FromStep(PERIOD_S, download_s=1.0)
    workers = [SimulatedWorker(str(index), 0 if index < WORKERS - 1 else 1) for index in range(WORKERS)]
    simulation = policy.simulation = SwarmSimulation(settings, workers, policy=policy)
    simulation.run_microbatches(MEASURED_BEFORE[0] * microbatches)
    before = simulation.run_microbatches((MEASURED_BEFORE[1] - MEASURED_BEFORE[0]) * microbatches)
    simulation.run_microbatches((MEASURED_AFTER[0] - MEASURED_BEFORE[1]) * microbatches)
    after = simulation.run_microbatches((STEPS - MEASURED_AFTER[0]) * microbatches)
    counts = [sum(worker.stage == stage for worker in simulation.workers.values()) for stage in range(STAGES)]
    return before.throughput, after.throughput, counts


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that a microbatch takes a worker")
    parser.add_argument("--microbatches", type=int, default=48, help="a step")
    add_json_argument(parser)
    arguments = parser.parse_args()
    settings = {"pause_s": arguments.pause, "microbatches": arguments.microbatches, "period_s": PERIOD_S}
    report = Report("simulator_check", workers=WORKERS, stages=STAGES, **settings)
    real = measure(arguments.pause, arguments.microbatches)
    before, after, counts = simulate(real["compute_s"], real["end_s"], arguments.microbatches)
    report.figure("a microbatch at a worker", real["compute_s"], "s", "measured, given to the simulation")
    report.figure("the end of a step", real["end_s"], "s", "measured, given to the simulation")
    report.figure("before: real", real["before"], "microbatches/s", f"workers {real['counts'][MEASURED_BEFORE[0]]}")
    report.figure("before: simulated", before, "microbatches/s")
    report.figure("after: real", real["after"], "microbatches/s", f"workers {real['counts'][-1]}")
    report.figure("after: simulated", after, "microbatches/s", f"workers {counts}")
    report.ratio("before: simulated / real", before / real["before"], at_least=0.9, at_most=1.1)
    report.ratio("after: simulated / real", after / real["after"], at_least=0.9, at_most=1.1)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
