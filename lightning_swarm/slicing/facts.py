"""What a `Trace` says about cutting: where stages could begin, what would cross there, and who needs what."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_swarm.slicing.points import LeafSpec, SplitPoint
from lightning_swarm.slicing.trace import Place

Source = tuple[str, str | int]  # ("leaf", position) or ("buffer", name)


@dataclass(frozen=True)
class Obstacle:
    """Why a call cannot begin a stage."""

    text: str
    place: Place | None


@dataclass(frozen=True)
class Candidate:
    """A call, and what would cross if a stage began with it."""

    point: SplitPoint
    index: int
    positions: tuple[int, ...]
    specs: tuple[LeafSpec, ...]
    twins: tuple[tuple[int, int], ...]
    held: tuple[bool, ...]
    leaves: int
    flops_before: float
    parameters_before: int
    operations_before: int
    obstacles: tuple[Obstacle, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that cross, for the whole batch."""
        return sum(spec.bytes for spec in self.specs)

    @property
    def degenerate(self) -> bool:
        """Whether the stage in front would have nothing to give."""
        return not self.positions


@dataclass
class Facts:
    """What a trace says, in the order of its events."""

    total_flops: float = 0.0
    candidates: list[Candidate] = field(default_factory=list)
    parameter_uses: list[tuple[int, str]] = field(default_factory=list)
    source_uses: list[tuple[int, frozenset[Source]]] = field(default_factory=list)
    source_looks: list[tuple[int, frozenset[Source]]] = field(default_factory=list)
    buffer_writes: list[tuple[int, str]] = field(default_factory=list)
    flops: list[tuple[int, float]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    end: int = 0
