"""Preemption traces: how many machines a spot market gave, and when it took them back.

Two formats are read. An event trace has rows ``time_ms,op,node`` with ``add`` or ``remove``; a count trace has rows
``t_seconds,n_nodes``, a step function. Either may begin with a header line. A trace says how many machines come and
go, not which stage they serve: the simulation draws the victims.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ChurnTrace", "TraceError", "read_trace"]


class TraceError(ValueError):
    """A trace that cannot be read; the message has the file and the line."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}, line {line}: {problem}")


@dataclass(frozen=True, slots=True)
class ChurnTrace:
    """Machines that come and go.

    Args:
        name: for tables.
        initial: machines at the start.
        changes: (seconds, machines more or less), in order of time.
        end_s: length of the trace.
    """

    name: str
    initial: int
    changes: tuple[tuple[float, int], ...]
    end_s: float

    def superposed(self, copies: int, seed: int) -> ChurnTrace:
        """A larger swarm: copies of this trace, each shifted in time by its own random amount and wrapped around."""
        generator = random.Random(seed)
        initial = 0
        changes: dict[float, int] = {}
        for _ in range(copies):
            shift = generator.uniform(0.0, self.end_s)
            level, levels = self.initial, [(0.0, self.initial)]
            for time, change in self.changes:
                level += change
                levels.append((time, level))
            at_start = max((time, value) for time, value in levels if time <= shift)[1]
            initial += at_start
            before = at_start
            later = [(time - shift, value) for time, value in levels if time > shift]
            earlier = [(time - shift + self.end_s, value) for time, value in levels if time <= shift]
            for time, value in later + earlier:
                if value != before:
                    changes[time] = changes.get(time, 0) + value - before
                    before = value
        ordered = tuple(sorted((time, change) for time, change in changes.items() if change and time < self.end_s))
        return ChurnTrace(f"{self.name} x{copies}", initial, ordered, self.end_s)

    def mean_machines(self) -> float:
        """Machines on the average over time."""
        total, level, last = 0.0, self.initial, 0.0
        for time, change in (*self.changes, (self.end_s, 0)):
            total += level * (time - last)
            level, last = level + change, time
        return total / self.end_s


def read_trace(path: str | Path, name: str | None = None) -> ChurnTrace:
    """Read an event or a count trace.

    Args:
        path: the file; which of the two formats it has shows in its first row.
        name: for tables; the file's name while None.

    Raises:
        TraceError: a row cannot be read, goes back in time or is impossible, with its line number.
    """
    path = Path(path)
    with path.open(newline="") as file:
        rows = [(number, row) for number, row in _rows(file)]
    if not rows:
        raise TraceError(path, 1, "the trace has no rows")
    width = len(rows[0][1])
    if width not in (2, 3):
        raise TraceError(
            path, rows[0][0], f"expected t_seconds,n_nodes or time_ms,op,node, got {','.join(rows[0][1])!r}"
        )
    points = _count_points(path, rows) if width == 2 else _event_points(path, rows)
    if points[-1][0] <= 0:
        raise TraceError(path, rows[-1][0], "the trace ends at 0 s")
    start = [value for time, value in points if time <= 0]
    initial = start[-1] if start else 0
    changes: list[tuple[float, int]] = []
    level = initial
    for time, value in points:
        if time > 0 and value != level:
            changes.append((time, value - level))
            level = value
    return ChurnTrace(name or path.stem, initial, tuple(changes), points[-1][0])


def _rows(file: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(file)
    for row in reader:
        cells = [cell.strip() for cell in row]
        if any(cells) and not (reader.line_num == 1 and cells[0].isidentifier()):
            yield reader.line_num, cells


def _count_points(path: Path, rows: list[tuple[int, list[str]]]) -> list[tuple[float, int]]:
    points: list[tuple[float, int]] = []
    for line, row in rows:
        time = _time(path, line, row, 2, points[-1][0] if points else 0.0)
        try:
            count = int(row[1])
        except ValueError:
            raise TraceError(path, line, f"{row[1]!r} is not a number of machines") from None
        if count < 0:
            raise TraceError(path, line, f"there cannot be {count} machines")
        points.append((time, count))
    return points


def _event_points(path: Path, rows: list[tuple[int, list[str]]]) -> list[tuple[float, int]]:
    points: list[tuple[float, int]] = []
    present: set[str] = set()
    for line, row in rows:
        time = _time(path, line, row, 3, 1000.0 * points[-1][0] if points else 0.0) / 1000.0
        _, operation, node = row
        if operation not in ("add", "remove"):
            raise TraceError(path, line, f"{operation!r} is neither add nor remove")
        if (node in present) == (operation == "add"):
            raise TraceError(
                path, line, f"{node} {'is added twice' if operation == 'add' else 'is removed but was never added'}"
            )
        (present.add if operation == "add" else present.remove)(node)
        points.append((time, len(present)))
    return points


def _time(path: Path, line: int, row: list[str], width: int, last: float) -> float:
    if len(row) != width:
        raise TraceError(path, line, f"expected {width} columns, got {len(row)}")
    try:
        time = float(row[0])
    except ValueError:
        raise TraceError(path, line, f"{row[0]!r} is not a time") from None
    if not 0.0 <= time < float("inf"):
        raise TraceError(path, line, f"{row[0]} is not a time")
    if time < last:
        raise TraceError(path, line, f"time goes back from {last:g} to {time:g}")
    return time
