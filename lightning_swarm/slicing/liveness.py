"""Reads a `Trace`: what must cross where, what each part of the step needs, where the step can be cut.

A value *must cross* a cut when it was made before and is used after, and is not the same on every stage: it came from
parameters (a ghost, for the stages behind), or it was drawn at random after the first operation on a ghost. All other
values depend on the batch alone; every stage computes them for itself, and needs the leaves of the batch for it.
A call can begin a stage when everything that must cross there is among its arguments.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from lightning_swarm.slicing.facts import Candidate, Facts, Obstacle, Source
from lightning_swarm.slicing.points import SplitPoint
from lightning_swarm.slicing.trace import Call, Checkpoint, Kept, Op, Trace, Value


@dataclass
class _Storage:
    crosses_from: int | None = None
    ghost: bool = False
    sources: frozenset[Source] = frozenset()
    writes: list[int] = field(default_factory=list)


def read(trace: Trace) -> Facts:
    """The facts of a trace."""
    return _Reader(trace).facts


class _Reader:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.facts = Facts(end=len(trace.events))
        self.storages: dict[int, _Storage] = defaultdict(_Storage)
        self.born: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.last_custom: dict[int, int] = {}
        self.leaks: list[tuple[int, Op, Call | None]] = []
        self.seen_ghost = False
        self.outside = {value.storage for value in trace.values if value.kind == "outside"}
        self.flops_at: list[float] = []
        self.parameters_at: list[int] = []
        self.operations_at: list[int] = []
        self._declare()
        self._walk()
        self._find_candidates()

    # -- first pass: what each storage depends on, who uses what

    def _declare(self) -> None:
        for index, value in enumerate(self.trace.values):
            if value.kind == "parameter":
                self.storages[value.storage].crosses_from = -1
                self.storages[value.storage].ghost = True
            elif value.kind in ("buffer", "leaf"):
                assert value.key is not None
                self.storages[value.storage].sources |= {(value.kind, value.key)}
            if value.kind != "made":
                self.born[index] = -1

    def _walk(self) -> None:
        seen: set[str] = set()
        operations = 0
        for index, event in enumerate(self.trace.events):
            self.flops_at.append(self.facts.total_flops)
            self.parameters_at.append(len(seen))
            self.operations_at.append(operations)
            if isinstance(event, Op):
                operations += 1
                self._operation(index, event)
                for value in self._values(event.reads):
                    if value.kind == "parameter":
                        assert isinstance(value.key, str)
                        self.facts.parameter_uses.append((index, value.key))
                        seen.add(value.key)
            elif isinstance(event, Kept):
                self.facts.kept.append(index)
                for value_index in event.reads:
                    self.last[value_index] = index
                self._needs(index, event.reads, self.facts.source_uses)

    def _operation(self, index: int, op: Op) -> None:
        self.facts.total_flops += op.flops
        if op.flops:
            self.facts.flops.append((index, op.flops))
        reads = [self.storages[value.storage] for value in self._values(op.reads)]
        different = any(storage.crosses_from is not None for storage in reads)
        ghost = any(storage.ghost for storage in reads)
        late = op.own_generator or (op.random and self.seen_ghost)
        self.seen_ghost = self.seen_ghost or ghost
        crosses = (different and not op.blank) or late
        for value_index in op.reads:
            self.last[value_index] = index
            if op.custom:
                self.last_custom[value_index] = index
        if crosses or different:
            self._needs(index, op.reads, self.facts.source_uses)
        if op.looks:
            self._needs(index, op.reads, self.facts.source_looks)
            if ghost and not op.contained and self._decided_by_ghosts(op):
                self.leaks.append((index, op, op.frame))
        sources: frozenset[Source] = frozenset()
        if not op.blank:
            sources = sources.union(*(storage.sources for storage in reads)) if reads else sources
        for value_index in (*op.makes, *op.writes):
            value = self.trace.values[value_index]
            self.born.setdefault(value_index, index)
            storage = self.storages[value.storage]
            storage.sources |= sources
            if crosses and storage.crosses_from is None:
                storage.crosses_from = index
            storage.ghost = storage.ghost or (ghost and not op.blank)
        for value in self._values(op.writes):
            self.storages[value.storage].writes.append(index)
            if value.storage in self.outside:
                self.facts.source_uses.append((index, sources))
            for name in self._buffers_in(value.storage):
                self.facts.buffer_writes.append((index, name))
                self.facts.source_uses.append((index, frozenset({("buffer", name)}) | sources))

    def _needs(self, index: int, reads: tuple[int, ...], where: list[tuple[int, frozenset[Source]]]) -> None:
        for value in self._values(reads):
            storage = self.storages[value.storage]
            if storage.sources and (storage.crosses_from is None or value.kind in ("buffer", "leaf")):
                where.append((index, storage.sources))

    def _decided_by_ghosts(self, op: Op) -> bool:
        """Whether Python saw ghosts' data. In ``x[mask]`` the mask decides the shape, so ``x`` may be a ghost."""
        values = self._values(op.reads)
        ghosts = [value for value in values if self.storages[value.storage].ghost]
        masks = [value for value in values if not value.dtype.is_floating_point]
        return not op.makes or not masks or any(value in ghosts for value in masks)

    def _buffers_in(self, storage: int) -> list[str]:
        return [str(value.key) for value in self.trace.values if value.kind == "buffer" and value.storage == storage]

    def _values(self, indices: tuple[int, ...]) -> list[Value]:
        return [self.trace.values[index] for index in indices]

    # -- second pass: what is alive at each call

    def _find_candidates(self) -> None:
        begins: dict[int, list[int]] = defaultdict(list)
        for value_index, value in enumerate(self.trace.values):
            crosses_from = self.storages[value.storage].crosses_from
            if value.kind != "parameter" and crosses_from is not None and value_index in self.last:
                begins[max(crosses_from, self.born.get(value_index, -1))].append(value_index)
        alive: set[int] = set(begins.pop(-1, ()))
        for index, event in enumerate(self.trace.events):
            if isinstance(event, Call):
                alive = {value_index for value_index in alive if self.last[value_index] >= index}
                self.facts.candidates.append(self._candidate(index, event, alive))
            alive.update(begins.get(index, ()))

    def _candidate(self, index: int, call: Call, alive: set[int]) -> Candidate:
        positions: list[int] = []
        twins: list[tuple[int, int]] = []
        first: dict[int, int] = {}
        for position, value_index in enumerate(call.leaves):
            if value_index is None or value_index not in alive:
                continue
            if value_index in first:
                twins.append((position, first[value_index]))
            else:
                first[value_index] = len(positions)
                positions.append(position)
        specs = [call.specs[position] for position in positions]
        end = self.facts.end if call.closed_at is None else call.closed_at
        return Candidate(
            point=SplitPoint(call.module, call.call),
            index=index,
            positions=tuple(positions),
            specs=tuple(spec for spec in specs if spec is not None),
            twins=tuple(twins),
            held=tuple(call.checkpoint is not None or self.last[value_index] >= end for value_index in first),
            leaves=len(call.leaves),
            flops_before=self.flops_at[index],
            parameters_before=self.parameters_at[index],
            operations_before=self.operations_at[index],
            obstacles=tuple(self._obstacles(index, call, alive, set(first))),
        )

    def _obstacles(self, index: int, call: Call, alive: set[int], passed: set[int]) -> list[Obstacle]:
        found = []
        if call.checkpoint is Checkpoint.REENTRANT:
            found.append(
                Obstacle("it is called by a reentrant checkpoint: use checkpoint(..., use_reentrant=False)", None)
            )
        elif call.checkpoint is Checkpoint.INSIDE:
            found.append(
                Obstacle("it is called inside a function that is checkpointed: checkpoint the module itself", None)
            )
        for value_index in sorted(alive - passed, key=lambda v: self.born.get(v, -1)):
            value = self.trace.values[value_index]
            found.append(Obstacle(f"the value {describe(value)} does not pass through its call", value.place))
        end = self.facts.end if call.closed_at is None else call.closed_at
        for value_index in passed:
            if self.last_custom.get(value_index, -1) >= end:
                name = describe(self.trace.values[value_index])
                found.append(Obstacle(f"{name} also goes to a torch.autograd.Function after its call", None))
        shared: dict[int, int] = defaultdict(int)
        for value_index in passed:
            shared[self.trace.values[value_index].storage] += 1
        for value_index in passed:
            value = self.trace.values[value_index]
            storage = self.storages[value.storage]
            if shared[value.storage] > 1 and any(write >= index for write in storage.writes):
                found.append(
                    Obstacle(f"{describe(value)} and a view of it cross, and one is changed later", value.place)
                )
                break
        for look, op, frame in self.leaks:
            if look < index and not _closed(frame, index):
                what = "the shape of a tensor was decided by data" if op.makes else "a number was read from a tensor"
                where = f" at {op.place}" if op.place else ""
                cure = "cut in front of it" if op.makes else "keep it a tensor"
                found.append(Obstacle(f"{what}{where}, and what it told may be used behind: {cure}", op.place))
                break
        return found


def _closed(frame: Call | None, index: int) -> bool:
    """Whether what was seen inside this call stayed inside: it ended before, and gave no numbers back."""
    while frame is not None and frame.closed_at is not None and frame.closed_at <= index:
        if not frame.leaks_numbers:
            return True
        frame = frame.parent
    return False


def describe(value: Value) -> str:
    """A value in the user's words: its name if the line that made it tells, and where that line is."""
    name = value.place.assigned_name() if value.place else None
    what = f'"{name}"' if name else f"of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')},"
    return f"{what} made at {value.place}" if value.place else what
