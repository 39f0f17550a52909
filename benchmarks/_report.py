"""What every benchmark prints: the figures of one run, and their ratios against a goal.

Absolute figures depend on the machine; ratios of figures measured in one run depend on it much less. So goals are set
for ratios only::

    report = Report("local_pipeline", width=384)
    report.figure("swarm", 5.1, "samples/s")
    report.figure("plain", 5.4, "samples/s")
    report.ratio("swarm / plain", 5.1 / 5.4, at_least=0.92)
    report.finish(arguments.json)
"""

import argparse
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE`` to a benchmark's arguments."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


@dataclass(frozen=True)
class Figure:
    """Something measured, or derived from it."""

    name: str
    value: float
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Ratio:
    """A quotient of two figures of the same run, and what it should be."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def goal(self) -> str:
        """The goal in words, empty if there is none."""
        bounds = [("≥", self.at_least), ("≤", self.at_most)]
        return " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    @property
    def met(self) -> bool:
        """Whether the value is within its bounds."""
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


class Report:
    """The figures of one benchmark run.

    Make it before anything is measured: it notes how busy the machine was without the benchmark.

    Args:
        benchmark: The script's name.
        settings: What is measured: sizes, counts.
    """

    def __init__(self, benchmark: str, **settings: Any) -> None:
        self.benchmark, self.settings = benchmark, settings
        self.figures: list[Figure] = []
        self.ratios: list[Ratio] = []
        self.load_before = os.getloadavg()[0]

    def figure(self, name: str, value: float, unit: str, note: str = "") -> None:
        """Add a row of absolute figures."""
        self.figures.append(Figure(name, value, unit, note))

    def ratio(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Add a row of ratios; a bound is the goal."""
        self.ratios.append(Ratio(name, value, at_least, at_most))

    def finish(self, file: Path | None = None) -> None:
        """Print the tables, and write all to ``file``."""
        console = Console(highlight=False)
        console.print(
            f"{self.benchmark}: " + ", ".join(f"{name} {value}" for name, value in self.settings.items()),
            soft_wrap=True,
        )
        if self.load_before > 0.5:
            # Threads that wait for each other are slowed far more by a busy core than single ones.
            console.print(
                f"The machine was busy before (load {self.load_before:.1f}): compare nothing with these figures."
            )
        if self.figures:
            table = Table(box=SIMPLE_HEAD)
            for column in ("", "value", "unit", ""):
                table.add_column(column, justify="right" if column == "value" else "left")
            for figure in self.figures:
                table.add_row(figure.name, f"{figure.value:,.4g}", figure.unit, figure.note)
            console.print(table)
        if self.ratios:
            table = Table(box=SIMPLE_HEAD)
            for column in ("ratio", "value", "goal", ""):
                table.add_column(column, justify="right" if column == "value" else "left")
            for ratio in self.ratios:
                verdict = "" if not ratio.goal else "met" if ratio.met else "missed"
                table.add_row(ratio.name, f"{ratio.value:.3f}", ratio.goal, verdict)
            console.print(table)
        if file is not None:
            file.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Everything, with the machine it was measured on."""
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        machine |= {"load_before": round(self.load_before, 2)}
        ratios = [asdict(ratio) | {"met": ratio.met} for ratio in self.ratios]
        figures = [asdict(figure) for figure in self.figures]
        return {
            "benchmark": self.benchmark,
            "settings": self.settings,
            "machine": machine,
            "figures": figures,
            "ratios": ratios,
        }
