"""``lightning-swarm status``: who serves what, how fast, and what has happened.

The trainer knows best and is asked first (the call ``report``). When it is gone, or between two Lightning calls, what
the workers themselves announce in the DHT is shown: that says less, but survives the trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_swarm.swarm.calls import WorkerRecord
from lightning_swarm.swarm.errors import PeerBusy, SwarmError
from lightning_swarm.swarm.finding import announced_trainer, told_trainer
from lightning_swarm.swarm.node import Node

__all__ = ["StatusReader", "SwarmStatus", "WorkerStatus", "show"]

_REPORT_WITHIN_S = 10.0


@dataclass(frozen=True)
class WorkerStatus:
    """One worker.

    Args:
        stage: What it serves; ``None`` while it has no stage.
        peer: Its peer id.
        device: As it says.
        state: ``serving``, ``joining``, ``moving``, ``leaving``, ``banned`` or ``silent``.
        microbatches_per_s: While it computes; 0 while unknown.
        queued: Passes that wait for its device; ``None`` when nobody can tell.
        microbatches: That it has done in this Lightning call; ``None`` when nobody can tell.
        bytes_sent: Since it took its stage.
        bytes_received: The same.
        moving_to: The stage whose state it fetches while it serves.
    """

    stage: int | None
    peer: str
    device: str
    state: str
    microbatches_per_s: float
    queued: int | None = None
    microbatches: int | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    moving_to: int | None = None


@dataclass(frozen=True)
class SwarmStatus:
    """One look at a swarm.

    Args:
        run_id: Which run.
        trainer: The trainer's peer id; ``None`` when none answers.
        source: ``trainer`` or ``announcements``: who says so.
        note: Why it is not the trainer.
        step: The last one that anybody knows of.
        elapsed_s: Of this Lightning call.
        samples: In this Lightning call.
        samples_per_s: Since the last look, at the first one since the call began.
        bans: How many there were.
        moves: How many there were.
        bytes_sent: By the trainer and all workers that are present.
        bytes_received: The same.
        counters: All events by name.
        workers: By stage.
    """

    run_id: str
    trainer: str | None
    source: str
    note: str = ""
    step: int = 0
    elapsed_s: float = 0.0
    samples: int = 0
    samples_per_s: float = 0.0
    bans: int = 0
    moves: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    workers: Sequence[WorkerStatus] = ()

    @property
    def alive(self) -> bool:
        """Whether anybody of the run works: its trainer, or workers that announce themselves."""
        return self.trainer is not None or bool(self.workers)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


class StatusReader:
    """Looks at a swarm again and again.

    Args:
        node: A peer of the run.
        initial_peers: Addresses of peers that may know the trainer before the DHT does.
    """

    def __init__(self, node: Node, initial_peers: Sequence[str]) -> None:
        self._node = node
        self._initial_peers = list(initial_peers)
        self._last: tuple[float, int] = (0.0, 0)

    async def read(self) -> SwarmStatus:
        """One look. On the node's event loop."""
        trainer = await announced_trainer(self._node) or await told_trainer(self._node, self._initial_peers)
        why = "no trainer is there"
        if trainer is not None:
            try:
                report, _ = await self._node.call(trainer, "report", {}, deadline_s=_REPORT_WITHIN_S)
                return self._reported(trainer, report)
            except PeerBusy as busy:
                why = busy.message
            except SwarmError as error:
                trainer, why = None, f"the trainer does not answer: {error}"
        records = await self._node.directory.read("worker", WorkerRecord)
        return announced(self._node.run_id, trainer, records, why)

    def _reported(self, trainer: str, report: Mapping[str, Any]) -> SwarmStatus:
        elapsed_s, samples = float(report["elapsed_s"]), int(report["samples"])
        before_s, before = self._last if self._last[0] <= elapsed_s else (0.0, 0)
        self._last = elapsed_s, samples
        rate = (samples - before) / (elapsed_s - before_s) if elapsed_s > before_s else 0.0
        counters = {str(name): int(count) for name, count in report["counters"].items()}
        everybody = [report["trainer"], *report["workers"]]
        return SwarmStatus(
            run_id=self._node.run_id,
            trainer=trainer,
            source="trainer",
            step=int(report["step"]),
            elapsed_s=elapsed_s,
            samples=samples,
            samples_per_s=max(0.0, rate),
            bans=counters.get("bans", 0),
            moves=counters.get("moves", 0),
            bytes_sent=sum(int(row.get("bytes_sent", 0)) for row in everybody),
            bytes_received=sum(int(row.get("bytes_received", 0)) for row in everybody),
            counters=counters,
            workers=tuple(_from_row(row) for row in report["workers"]),
        )


def _from_row(row: Mapping[str, Any]) -> WorkerStatus:
    moving_to = row.get("moving_to")
    state = "serving"
    if "unreachable" in row:
        state = "silent"
    elif row.get("banned"):
        state = "banned"
    elif row.get("leaving"):
        state = "leaving"
    elif moving_to is not None:
        state = "moving"
    elif not row["ready"]:
        state = "joining"
    return WorkerStatus(
        stage=row["stage"],
        peer=row["peer"],
        device=row["device"],
        state=state,
        microbatches_per_s=row["microbatches_per_s"],
        queued=row.get("queued"),
        microbatches=row["microbatches"],
        bytes_sent=row.get("bytes_sent"),
        bytes_received=row.get("bytes_received"),
        moving_to=moving_to,
    )


def announced(run_id: str, trainer: str | None, records: Mapping[str, WorkerRecord], why: str) -> SwarmStatus:
    """What the workers announce, where the trainer cannot be asked."""
    workers = [
        WorkerStatus(
            stage=record.stage if record.stage >= 0 else None,
            peer=peer,
            device=record.device,
            state="serving" if record.stage >= 0 else "joining",
            microbatches_per_s=record.microbatches_per_s,
        )
        for peer, record in records.items()
    ]
    workers.sort(key=lambda worker: (worker.stage is None, worker.stage or 0, worker.peer))
    step = max((record.step for record in records.values()), default=0)
    return SwarmStatus(run_id, trainer, "announcements", note=why, step=step, workers=tuple(workers))


def show(status: SwarmStatus) -> Group:
    """The screen."""
    head = f"run {status.run_id}, step {status.step}"
    if status.source == "trainer":
        hours, rest = divmod(int(status.elapsed_s), 3600)
        head += f", {status.samples_per_s:.1f} samples/s, {hours}:{rest // 60:02}:{rest % 60:02}"
        head += f", {_bytes(status.bytes_sent)} sent"
    table = Table(box=SIMPLE_HEAD)
    columns = ("stage", "peer", "device", "state", "microbatches/s", "queue", "microbatches", "sent", "received")
    for column in columns:
        table.add_column(column, justify="left" if column in ("peer", "device", "state") else "right")
    last: int | None = -1
    for worker in status.workers:
        first, last = worker.stage != last, worker.stage
        stage = "-" if worker.stage is None else str(worker.stage)
        state = worker.state if worker.moving_to is None else f"{worker.state} to {worker.moving_to}"
        table.add_row(
            stage if first else "",
            worker.peer[-6:],
            worker.device,
            Text(state, style="" if worker.state == "serving" else "bold yellow"),
            f"{worker.microbatches_per_s:.1f}" if worker.microbatches_per_s else "",
            "" if worker.queued is None else str(worker.queued),
            "" if worker.microbatches is None else f"{worker.microbatches:,}",
            "" if worker.bytes_sent is None else _bytes(worker.bytes_sent),
            "" if worker.bytes_received is None else _bytes(worker.bytes_received),
        )
    counts: dict[int, int] = {}
    for worker in status.workers:
        if worker.stage is not None:
            counts[worker.stage] = counts.get(worker.stage, 0) + 1
    by_stage = " + ".join(str(counts.get(stage, 0)) for stage in range(max(counts, default=-1) + 1)) or "no"
    events = ", ".join(f"{name} {count}" for name, count in sorted(status.counters.items()))
    foot = f"{by_stage} workers; bans {status.bans}, moves {status.moves}"
    if events:
        foot += f" ({events})"
    if status.note:
        foot = f"{by_stage} workers, by their own announcements: {status.note}"
    return Group(Text(head, style="bold"), table, Text(foot))


def _bytes(number: int) -> str:
    value, units = float(number), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
