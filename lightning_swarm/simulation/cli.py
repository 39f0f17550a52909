"""``lightning-swarm simulate``: what a swarm would do, before machines are paid for.

    lightning-swarm simulate rebalancing --trace g4dn-trace.csv:4 --stages 4 16 --plot swarm.png
    lightning-swarm simulate routing --workers 8 32 128 --stages 4 --network gcp12_latency_bandwidth.csv

``rebalancing`` runs the rebalancing rules on a trace of preemptions, ``routing`` simulates every microbatch of swarms
of unequal workers. Both print a table; ``--json FILE`` writes it, ``--plot FILE`` draws it. ``routing`` and ``--plot``
need more packages: ``pip install '.[simulation]'`` in a clone of lightning-swarm.

No traces come with the package. The preemptions are Bamboo's (github.com/uclasystem/bamboo), the latencies those of
``communication/communication_costs.py`` in CheckFree (github.com/gensyn-ai/CheckFree), as a CSV file; see the options
for the columns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_swarm.simulation.model import SwarmSettings
from lightning_swarm.simulation.network import Network, read_network
from lightning_swarm.simulation.plots import plot_bars, plot_scaling, plot_timeline
from lightning_swarm.simulation.studies import RULES, rebalancing_cell, routing_cell, spread_workers
from lightning_swarm.simulation.traces import ChurnTrace, read_trace

__all__ = ["main", "print_table"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 when the input cannot be used."""
    arguments = _parser().parse_args(argv)
    try:
        result = arguments.run(arguments)
    except (OSError, ValueError, ImportError) as error:
        print(f"lightning-swarm simulate: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; numbers to the right, the first column to the left."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table, soft_wrap=console.width < 100)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-swarm simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="rebalancing|routing")

    rebalancing = commands.add_parser("rebalancing", help="rebalancing rules on a trace of preemptions")
    rebalancing.add_argument(
        "--trace",
        required=True,
        metavar="FILE[:COPIES]",
        help="rows time_ms,op,node or t_seconds,n_nodes; COPIES of it are shifted in time and superposed",
    )
    rebalancing.add_argument("--stages", type=_positive, nargs="+", default=[4])
    rebalancing.add_argument(
        "--download", type=float, default=60.0, metavar="S", help="seconds to fetch a stage's state"
    )
    rebalancing.add_argument(
        "--rules", nargs="+", choices=sorted(RULES), default=["random", "smallest", "paper-300", "ours"]
    )
    rebalancing.add_argument("--seeds", type=_positive, default=3)
    rebalancing.set_defaults(run=_rebalancing)

    routing = commands.add_parser("routing", help="every microbatch of swarms of unequal workers")
    routing.add_argument("--workers", type=_positive, nargs="+", default=[8, 32, 128])
    routing.add_argument("--stages", type=_positive, nargs="+", default=[4])
    routing.add_argument("--speeds", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    routing.add_argument("--forward", type=float, default=0.1, metavar="S", help="seconds of a forward pass at speed 1")
    routing.add_argument("--noise", type=float, default=0.0, help="deviation of the logarithm of a pass's seconds")
    routing.add_argument("--slack", type=float, default=5.0, help="microbatches in flight over what is in service")
    routing.add_argument(
        "--network", metavar="FILE", help="columns region_a, region_b, latency_ms, bandwidth_Mbit_per_s"
    )
    routing.add_argument("--activation-bytes", type=float, default=0.0)
    routing.add_argument("--seed", type=int, default=0)
    routing.set_defaults(run=_routing)

    for command in (rebalancing, routing):
        command.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
        command.add_argument("--plot", type=Path, metavar="FILE", help="draw them (png, svg, pdf)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _traces(argument: str, seeds: int) -> list[ChurnTrace]:
    path, colon, copies = argument.rpartition(":")
    if not colon or not copies.isdigit():
        return [read_trace(argument)] * seeds
    if int(copies) < 1:
        raise ValueError(f"--trace {argument}: there must be at least one copy")
    trace = read_trace(path)
    return [trace.superposed(int(copies), seed) for seed in range(seeds)]


def _rebalancing(arguments: argparse.Namespace) -> dict[str, Any]:
    traces = _traces(arguments.trace, arguments.seeds)
    cells = {
        (stages, key): rebalancing_cell(
            traces, stages, arguments.download, RULES[key], record=arguments.plot is not None
        )
        for stages in arguments.stages
        for key in arguments.rules
    }
    rows = []
    for stages in arguments.stages:
        row = [cells[stages, key] for key in arguments.rules]
        ceiling = max(cell.ceiling for cell in row)
        rows.append([str(stages), *(f"{cell.percent:.1f} ±{cell.spread:.1f}" for cell in row), f"{ceiling:.1f}"])
    print_table(
        f"{traces[0].name}, {sum(trace.mean_machines() for trace in traces) / len(traces):.0f} machines on average, "
        f"download {arguments.download:g} s, {arguments.seeds} seeds: % of the best possible",
        ["stages", *(RULES[key].name for key in arguments.rules), "ceiling"],
        rows,
    )
    if arguments.plot is not None and len(arguments.stages) == 1:
        stages = arguments.stages[0]
        timelines = {RULES[key].name: cells[stages, key].runs[0].timeline for key in arguments.rules}
        plot_timeline(
            timelines, arguments.plot, f"{traces[0].name}, {stages} stages, download {arguments.download:g} s"
        )
    elif arguments.plot is not None:
        series = {RULES[key].name: [cells[n, key].percent for n in arguments.stages] for key in arguments.rules}
        plot_bars(
            [f"{n} stages" for n in arguments.stages], series, arguments.plot, traces[0].name, "% of the best possible"
        )
    return {
        "trace": arguments.trace,
        "download_s": arguments.download,
        "seeds": arguments.seeds,
        "cells": [
            {
                "stages": n,
                "rule": key,
                "percent": cell.percent,
                "spread": cell.spread,
                "ceiling": cell.ceiling,
                "moves": cell.moves,
            }
            for (n, key), cell in cells.items()
        ],
    }


def _routing(arguments: argparse.Namespace) -> dict[str, Any]:
    if min(arguments.speeds) <= 0 or arguments.forward <= 0 or arguments.noise < 0 or arguments.slack < 1:
        raise ValueError("speeds and --forward must be positive, --noise not negative and --slack at least 1")
    network = read_network(arguments.network) if arguments.network else Network()
    rows, cells, series = [], [], {}
    for stages in arguments.stages:
        line: list[tuple[int, float, float]] = []
        for number in arguments.workers:
            if number < stages:
                continue
            settings = SwarmSettings(
                stages,
                forward_s=arguments.forward,
                noise=arguments.noise,
                slack=arguments.slack,
                activation_bytes=arguments.activation_bytes,
                trainer_region=network.regions[0] if network.regions else "",
            )
            workers = spread_workers(number, stages, arguments.speeds, network, arguments.seed)
            cell = routing_cell(settings, workers, network, seed=arguments.seed)
            line.append((number, cell.throughput, cell.bound))
            cells.append({"stages": stages, "workers": number, "throughput": cell.throughput, "bound": cell.bound})
            rows.append(
                [f"{stages}", f"{number}", f"{cell.throughput:.1f}", f"{cell.percent:.1f}", f"{cell.in_flight}"]
            )
        series[f"{stages} stages"] = line
    if not rows:
        raise ValueError("Every stage needs a worker: give more --workers or fewer --stages")
    columns = ["stages", "workers", "microbatches/s", "% of max flow", "in flight"]
    print_table(f"speeds {arguments.speeds}, seed {arguments.seed}", columns, rows)
    if arguments.plot is not None:
        plot_scaling(series, arguments.plot, ylabel="microbatches/s")
    return {"speeds": arguments.speeds, "noise": arguments.noise, "slack": arguments.slack, "cells": cells}
