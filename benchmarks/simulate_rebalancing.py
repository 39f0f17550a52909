"""Rebalancing rules on public traces of spot machines, as % of the best possible.

The best possible spreads the machines that are there perfectly, at once and for free. The *ceiling* does so with the
machines that already hold a state; the rest is the download of those that have just come, which no rule avoids. A
trace does not say which stage loses a machine: the seed draws it, uniformly. The T4 trace is superposed 4 and 16 times,
each copy shifted in time by the seed.

Rows "notice" are our rule where the market warns before it takes a machine back (30 s at GCP, 120 s at AWS) and the
worker serves until then; the other rows know of a loss only afterwards.

    python benchmarks/simulate_rebalancing.py [--traces DIR] [--seeds 10] [--quick] [--plots DIR] [--json FILE]
"""

import argparse
import time
from pathlib import Path
from statistics import mean

from _report import Report, add_json_argument

from lightning_swarm.simulation.cli import print_table
from lightning_swarm.simulation.plots import plot_bars, plot_timeline
from lightning_swarm.simulation.studies import RULES, RebalancingCell, rebalancing_cell
from lightning_swarm.simulation.traces import ChurnTrace, read_trace

STAGES = (4, 8, 16, 32)
DOWNLOADS_S = (0.0, 60.0, 300.0)
PLAIN_RULES = ("random", "smallest", "paper-300", "paper-60", "ours")
NOTICE_RULES = ("ours-notice-30", "ours-notice-120")
MARKET_NOTICE = {"AWS": "ours-notice-120", "GCP": "ours-notice-30"}
"""How long before the loss the market of a trace tells of it."""
GOALS = {4: 99.0, 16: 96.5}
"""% of the best possible by stages, at a download of 60 s."""

Cells = dict[tuple[str, int, float, str], RebalancingCell]


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "traces"
    parser.add_argument("--traces", type=Path, default=default, metavar="DIR", help="default: ../shared/traces")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one seed, one trace, two numbers of stages")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw plots there")
    add_json_argument(parser)
    arguments = parser.parse_args()
    seeds = 1 if arguments.quick else arguments.seeds
    stages = (4, 16) if arguments.quick else STAGES
    traces = read_traces(arguments.traces, seeds)
    if arguments.quick:
        traces = {name: traces[name] for name in list(traces)[:1]}

    report = Report("simulate_rebalancing", seeds=list(range(seeds)), period_s=60, reading_s=2, download_s=DOWNLOADS_S)
    start = time.process_time()
    cells: Cells = {}
    for name, runs in traces.items():
        for number in stages:
            for download_s in DOWNLOADS_S:
                for key in (*PLAIN_RULES, *(NOTICE_RULES if download_s == 60.0 else ())):
                    cells[name, number, download_s, key] = rebalancing_cell(runs, number, download_s, RULES[key])
        print_cells(name, runs, cells, stages)
    report.figure("CPU time", time.process_time() - start, "s")
    add_goals(report, cells, list(traces), stages)
    report.finish(arguments.json)
    if arguments.plots is not None:
        draw(arguments.plots, traces, cells, stages)


def read_traces(folder: Path, seeds: int) -> dict[str, list[ChurnTrace]]:
    """By name, one trace a seed."""
    t4 = read_trace(folder / "events" / "g4dn-trace.csv", "AWS T4")
    a100 = read_trace(folder / "counts" / "bamboo_gcloud-a100x1-east1b.csv", "GCP A100")
    v100 = read_trace(folder / "counts" / "bamboo_gcloud-v100x1-east1c.csv", "GCP V100")
    return {
        "AWS T4 x4": [t4.superposed(4, seed) for seed in range(seeds)],
        "AWS T4 x16": [t4.superposed(16, seed) for seed in range(seeds)],
        "GCP A100": [a100] * seeds,
        "GCP V100": [v100] * seeds,
    }


def print_cells(name: str, runs: list[ChurnTrace], cells: Cells, stages: tuple[int, ...]) -> None:
    """The table of one trace."""
    keys = (*PLAIN_RULES, *NOTICE_RULES)
    rows = []
    for number in stages:
        for download_s in DOWNLOADS_S:
            row = [f"{number} stages, {download_s:g} s"]
            for key in keys:
                cell = cells.get((name, number, download_s, key))
                row.append(f"{cell.percent:.1f} ±{cell.spread:.1f}" if cell is not None else "")
            row.append(f"{cells[name, number, download_s, 'ours'].ceiling:.1f}")
            rows.append(row)
    machines = mean(trace.mean_machines() for trace in runs)
    losses = mean(sum(-change for _, change in trace.changes if change < 0) for trace in runs)
    hours = runs[0].end_s / 3600
    title = f"{name}: {machines:.0f} machines, {losses / machines / hours:.2f} losses a machine and hour, {hours:.0f} h"
    print_table(title, ["", *(RULES[key].name for key in keys), "ceiling"], rows)


def add_goals(report: Report, cells: Cells, names: list[str], stages: tuple[int, ...]) -> None:
    """Every cell as a figure; the goals as ratios."""
    for (name, number, download_s, key), cell in cells.items():
        label = f"{name}, {number} stages, {download_s:g} s, {key}"
        report.figure(
            label, cell.percent, "%", f"±{cell.spread:.2f}, ceiling {cell.ceiling:.2f}, {cell.moves:.0f} moves"
        )
    for number in stages:
        goal = GOALS[number] / 100 if number in GOALS else None
        ours = {name: cells[name, number, 60.0, "ours"] for name in names}
        noticed = {name: cells[name, number, 60.0, MARKET_NOTICE[name[:3]]] for name in names}
        for kind, found in (("ours", ours), ("ours, with the market's notice", noticed)):
            title = f"{kind}: {number} stages, 60 s"
            for name in names if goal else ():
                report.ratio(f"{title}, {name}", found[name].percent / 100, at_least=goal)
            report.ratio(f"{title}, mean of the traces", mean(c.percent for c in found.values()) / 100, at_least=goal)
            share = mean(cell.percent / cell.ceiling for cell in found.values())
            report.ratio(f"{title}, mean of the traces, share of the ceiling", share)
    worst = min(
        cells[name, number, download_s, "ours"].percent - cells[name, number, download_s, rule].percent
        for name in names
        for number in stages
        for download_s in DOWNLOADS_S
        for rule in ("paper-300", "paper-60")
    )
    report.ratio("ours - the paper's rule, the worst of all cells", worst / 100, at_least=0.0)


def draw(folder: Path, traces: dict[str, list[ChurnTrace]], cells: Cells, stages: tuple[int, ...]) -> None:
    """One plot of bars by trace, and one over time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in traces:
        keys = (*PLAIN_RULES, MARKET_NOTICE[name[:3]])
        series = {RULES[key].name: [cells[name, number, 60.0, key].percent for number in stages] for key in keys}
        groups = [f"{number} stages" for number in stages]
        path = folder / f"rebalancing-{name.lower().replace(' ', '-')}.png"
        plot_bars(groups, series, path, f"{name}, download 60 s", "% of the best possible")
    name = next(iter(traces))
    timelines = {
        RULES[key].name: rebalancing_cell(traces[name][:1], 4, 60.0, RULES[key], record=True).runs[0].timeline
        for key in ("random", "paper-300", "ours")
    }
    plot_timeline(timelines, folder / "rebalancing-over-time.png", f"{name}, 4 stages, download 60 s")


if __name__ == "__main__":
    main()
