"""Plots of simulated swarms. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_bars", "plot_scaling", "plot_timeline"]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError:
        raise ImportError("Plots need matplotlib: pip install '.[simulation]' in a clone of lightning-swarm") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: str | Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_timeline(
    timelines: Mapping[str, Sequence[tuple[float, int, int, int]]], path: str | Path, title: str = ""
) -> None:
    """Throughput over time: a line a rule, under the best possible.

    Args:
        timelines: by rule, the rows of :attr:`AllocationResult.timeline`.
        path: the image; its ending tells the format.
        title: above the plot.
    """
    figure, axes = _figure(9.0, 4.0)
    best = next(iter(timelines.values()))
    axes.step(
        [row[0] / 3600 for row in best], [row[3] for row in best], "k--", where="post", lw=1, label="best possible"
    )
    for name, rows in timelines.items():
        axes.step([row[0] / 3600 for row in rows], [row[2] for row in rows], where="post", lw=1, label=name)
    axes.set(xlabel="hours", ylabel="throughput (workers of the weakest stage)", title=title, ylim=(0, None))
    axes.legend(loc="lower right", fontsize="small")
    _save(figure, path)


def plot_bars(
    groups: Sequence[str], series: Mapping[str, Sequence[float]], path: str | Path, title: str = "", ylabel: str = ""
) -> None:
    """Grouped bars, for instance % of the best possible by number of stages and rule."""
    figure, axes = _figure(9.0, 4.0)
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [index + (number - (len(series) - 1) / 2) * width for index in range(len(groups))]
        axes.bar(places, values, width, label=name)
    axes.set_xticks(range(len(groups)), groups)
    low = min(min(values) for values in series.values())
    axes.set(ylabel=ylabel, title=title, ylim=(max(0.0, 10 * (low // 10)), None))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    _save(figure, path)


def plot_scaling(
    series: Mapping[str, Sequence[tuple[int, float, float]]], path: str | Path, title: str = "", ylabel: str = ""
) -> None:
    """Throughput by number of workers on logarithmic axes: rows of (workers, throughput, bound) a series."""
    figure, axes = _figure(6.5, 4.5)
    for name, rows in series.items():
        (line,) = axes.plot([row[0] for row in rows], [row[1] for row in rows], "o-", ms=4, lw=1.2, label=name)
        axes.plot([row[0] for row in rows], [row[2] for row in rows], ":", lw=1, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="workers", ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", title="dotted: max-flow bound")
    _save(figure, path)
