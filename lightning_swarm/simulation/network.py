"""Links between regions: latency and bandwidth, uniform or read from a measured matrix."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_swarm.simulation.traces import TraceError

__all__ = ["Network", "read_network"]


@dataclass(frozen=True, slots=True)
class Network:
    """Seconds that bytes take from one region to another.

    Args:
        latency_s: one-way latency within a region, and between regions that ``between`` doesn't name.
        bytes_per_s: bandwidth there.
        between: (latency, bandwidth) by pair of regions; the order within a pair does not matter.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    between: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[str, ...]:
        """All regions named in the matrix."""
        return tuple(sorted({region for pair in self.between for region in pair}))

    def link(self, source: str, target: str) -> tuple[float, float]:
        """Latency in s and bandwidth in bytes/s."""
        found = self.between.get((source, target)) or self.between.get((target, source))
        return found or (self.latency_s, self.bytes_per_s)

    def seconds(self, source: str, target: str, size_bytes: float) -> float:
        """Time from sending to arrival."""
        latency, bandwidth = self.link(source, target)
        return latency + size_bytes / bandwidth


def read_network(path: str | Path, *, latency_s: float = 0.0005, bytes_per_s: float = 1.25e9) -> Network:
    """Read a matrix with the columns region_a, region_b, latency_ms and bandwidth_Mbit_per_s.

    Args:
        path: the file.
        latency_s: latency within a region, which the matrix does not tell.
        bytes_per_s: bandwidth within a region.

    Raises:
        TraceError: a column is missing or a row cannot be read, with its line number.
    """
    path = Path(path)
    between: dict[tuple[str, str], tuple[float, float]] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"region_a", "region_b", "latency_ms", "bandwidth_Mbit_per_s"} - set(reader.fieldnames or ())
        if missing:
            raise TraceError(path, 1, f"no column {', '.join(sorted(missing))}")
        for row in reader:
            try:
                latency, megabits = float(row["latency_ms"]), float(row["bandwidth_Mbit_per_s"])
            except (TypeError, ValueError):
                raise TraceError(path, reader.line_num, "latency or bandwidth is not a number") from None
            if not (0.0 <= latency < math.inf and megabits > 0.0):
                raise TraceError(path, reader.line_num, f"impossible link: {latency} ms, {megabits} Mbit/s")
            between[row["region_a"], row["region_b"]] = latency / 1e3, megabits * 1e6 / 8.0
    return Network(latency_s, bytes_per_s, between)
