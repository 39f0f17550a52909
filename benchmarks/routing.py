"""What a routing decision costs: seconds of CPU a hop, from 10 to 10,000 workers.

Each hop picks a worker and charges it, as the trainer does for every microbatch and stage; as many microbatches are out
as the policy itself asks for, and each is settled before the next is routed. Measured with and without edge costs, on
four stages, as the least of ``--rounds`` rounds: everything else that runs on the machine only adds to it. The goals
are 20 us with 1,000 workers and a growth of at most the logarithm.

    python benchmarks/routing.py [--rounds 5] [--decisions 20000] [--quick] [--json FILE]
"""

import argparse
import math
import random
import time
from collections import deque

from _report import Report, add_json_argument

from lightning_swarm.policies.routing import LinkCosts, StochasticWiring

STAGES = 4
WORKERS = (10, 100, 1_000, 10_000)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decisions", type=int, default=20_000, help="hops a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few decisions, to see that it works")
    add_json_argument(parser)
    arguments = parser.parse_args()
    rounds, decisions = (1, 400) if arguments.quick else (arguments.rounds, arguments.decisions)
    report = Report("routing", stages=STAGES, decisions=decisions, rounds=rounds, seed=arguments.seed)
    for name, edges in (("without edge costs", False), ("with edge costs", True)):
        seconds = {}
        for workers in WORKERS:
            hop, settle = measure(workers, edges, decisions, rounds, arguments.seed)
            seconds[workers] = hop
            report.figure(f"{workers:,} workers, {name}: decision", 1e6 * hop, "us")
            report.figure(f"{workers:,} workers, {name}: settlement", 1e6 * settle, "us")
        report.ratio(f"{name}: us a decision with 1,000 workers", 1e6 * seconds[1_000], at_most=20.0)
        for few, many, goal in ((100, 1_000, 1.0), (100, 10_000, None)):
            growth = seconds[many] / seconds[few] / (math.log(many) / math.log(few))
            report.ratio(f"{name}: growth from {few} to {many:,} workers / the logarithm's", growth, at_most=goal)
    report.finish(arguments.json)


def measure(workers: int, edges: bool, decisions: int, rounds: int, seed: int) -> tuple[float, float]:
    """CPU seconds of a decision and of a settlement, the least of all rounds."""
    generator = random.Random(seed)
    names = [f"p{index}" for index in range(workers)]
    service_s = {name: 1.0 / generator.choice((1, 2, 4, 8)) for name in names}
    links = LinkCosts(1e6, latency_s=0.05)
    wiring = StochasticWiring(STAGES, edge_cost=links if edges else None)
    for index, name in enumerate(names):
        wiring.add(index % STAGES, name)
        for other in generator.sample(names, min(workers, 20)):
            links.measured(name, other, generator.uniform(0.001, 0.1))
    out: deque[tuple[str, ...]] = deque()

    def settle() -> None:
        for stage, peer in enumerate(out.popleft()):
            wiring.complete(stage, peer, service_s[peer] * generator.uniform(0.8, 1.2), now=0.0)

    while any(wiring.measured_s(name) is None for name in names):
        out.append(wiring.route(0.0))
        if len(out) >= wiring.in_flight_target():
            settle()
    while len(out) < wiring.in_flight_target():
        out.append(wiring.route(0.0))
    best_hop = best_settle = math.inf
    for _ in range(rounds):
        hop = settled = 0.0
        for _ in range(decisions // STAGES // 100):
            start = time.process_time()
            for _ in range(100):
                out.append(wiring.route(0.0))
            middle = time.process_time()
            for _ in range(100):
                settle()
            hop += middle - start
            settled += time.process_time() - middle
        number = decisions // STAGES // 100 * 100 * STAGES
        best_hop, best_settle = min(best_hop, hop / number), min(best_settle, settled / number)
    return best_hop, best_settle


if __name__ == "__main__":
    main()
