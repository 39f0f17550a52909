"""The plan of a run: which stage holds what. Plain data that every peer gets, prints and agrees on."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_swarm.slicing.points import SplitPoint, StepSignature


@dataclass(frozen=True)
class Item:
    """A parameter or buffer of the model, by its canonical name."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class StagePlan:
    """What one stage is.

    Args:
        index: Its number, from 0.
        begins_at: The call that begins it; None for stage 0, which begins with the step.
        modules: The submodules that run in it, as few names as will do.
        parameters: Canonical names of the parameters that it holds, shared ones included.
        buffers: Names of the buffers whose content it needs, and of those that it changes.
        flops: Forward FLOPs of one sample.
        parameter_bytes: Bytes of its parameters.
        bytes_in: What enters for one sample, forward; as much leaves as gradients where those are wanted.
        bytes_out: What leaves for one sample, forward.

    """

    index: int
    begins_at: SplitPoint | None
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    flops: float
    parameter_bytes: int
    bytes_in: float
    bytes_out: float


@dataclass(frozen=True)
class Plan:
    """How a model is cut into stages.

    Args:
        cuts: The split points; stage ``k + 1`` begins at ``cuts[k]``.
        inventory: All parameters and buffers of the model, in the order of its modules.
        signatures: What is known of each step function, the one that the plan was made for first.

    """

    cuts: tuple[SplitPoint, ...]
    inventory: tuple[Item, ...]
    signatures: dict[str, StepSignature]
    stages: tuple[StagePlan, ...] = field(init=False)
    shared: dict[str, tuple[int, ...]] = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        holders = self._holders()
        object.__setattr__(self, "stages", tuple(self._stage(index, holders) for index in range(len(self.cuts) + 1)))
        parameters = {item.name for item in self.inventory if item.kind == "parameter"}
        shared = {name: held for name, held in holders.items() if len(held) > 1 and name in parameters}
        object.__setattr__(self, "shared", shared)
        object.__setattr__(self, "fingerprint", self._fingerprint())

    def with_signature(self, signature: StepSignature) -> Plan:
        """The plan that also knows another step function. A parameter used there at another stage belongs to both."""
        return replace(self, signatures={**self.signatures, signature.step: signature})

    def table(self) -> str:
        """The plan as a table: stage, begins at, modules, parameters, share of FLOPs, bytes in and out a sample."""
        total = sum(stage.flops for stage in self.stages) or 1.0
        rows = [("stage", "begins at", "modules", "parameters", "FLOPs", "in / sample", "out / sample")]
        sizes = {item.name: _numel(item.shape) for item in self.inventory}
        for stage in self.stages:
            count = sum(sizes[name] for name in stage.parameters)
            rows.append(
                (
                    str(stage.index),
                    str(stage.begins_at or "the step"),
                    _in_few_words(stage.modules),
                    f"{count:,}",
                    f"{100 * stage.flops / total:.1f} %",
                    _bytes(stage.bytes_in),
                    _bytes(stage.bytes_out),
                )
            )
        lines = _aligned(rows, left=(1, 2))
        for name, held in self.shared.items():
            lines.append(f"{name} is shared by stages {', '.join(str(index) for index in held)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for msgpack."""
        return {
            "cuts": [str(cut) for cut in self.cuts],
            "inventory": [[item.name, item.kind, list(item.shape), item.dtype, item.bytes] for item in self.inventory],
            "signatures": [signature.to_dict() for signature in self.signatures.values()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The reverse of ``to_dict``."""
        signatures = [StepSignature.from_dict(signature) for signature in data["signatures"]]
        return cls(
            cuts=tuple(SplitPoint.parse(cut) for cut in data["cuts"]),
            inventory=tuple(
                Item(name, kind, tuple(shape), dtype, count) for name, kind, shape, dtype, count in data["inventory"]
            ),
            signatures={signature.step: signature for signature in signatures},
        )

    def _holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that hold each parameter and buffer."""
        used: dict[str, set[int]] = defaultdict(set)
        written: dict[str, set[int]] = defaultdict(set)
        for signature in self.signatures.values():
            for stage, names in enumerate(zip(signature.parameters, signature.buffers, strict=True)):
                for name in (*names[0], *names[1]):
                    used[name].add(stage)
            for stage, changed in enumerate(signature.written):
                for name in changed:
                    written[name].add(stage)
        holders: dict[str, tuple[int, ...]] = {}
        previous = 0
        for item in self.inventory:
            # What no step uses stays with its neighbour; of a buffer that changes there is one truth, where it changes.
            stages = written[item.name] or used[item.name] or {previous}
            holders[item.name] = tuple(sorted(stages))
            if item.kind == "parameter":
                previous = min(stages)
        return holders

    def _stage(self, index: int, holders: Mapping[str, Sequence[int]]) -> StagePlan:
        main = next(iter(self.signatures.values()))
        held = [item for item in self.inventory if index in holders[item.name]]
        edges = [0.0, *(boundary.bytes_per_sample for boundary in main.boundaries), 0.0]
        return StagePlan(
            index=index,
            begins_at=self.cuts[index - 1] if index else None,
            modules=main.modules[index],
            parameters=tuple(item.name for item in held if item.kind == "parameter"),
            buffers=tuple(item.name for item in held if item.kind == "buffer"),
            flops=main.flops[index],
            parameter_bytes=sum(item.bytes for item in held if item.kind == "parameter"),
            bytes_in=edges[index],
            bytes_out=edges[index + 1],
        )

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(_package_version().encode())
        for item in self.inventory:
            digest.update(f"{item.kind} {item.name} {item.shape} {item.dtype}\n".encode())
        digest.update(" ".join(str(cut) for cut in self.cuts).encode())
        return digest.hexdigest()[:32]


def _package_version() -> str:
    try:
        return version("lightning-swarm")
    except PackageNotFoundError:
        return "unknown"


def _numel(shape: Iterable[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def _in_few_words(names: Sequence[str], limit: int = 48) -> str:
    """``blocks.0, blocks.1, blocks.2`` becomes ``blocks.0-2``."""
    words: list[str] = []
    run: tuple[str, int, int] | None = None
    for name in (*names, ""):
        stem, _, number = name.rpartition(".")
        if run and number.isdecimal() and stem == run[0] and int(number) == run[2] + 1:
            run = (stem, run[1], run[2] + 1)
            continue
        if run:
            words.append(f"{run[0]}.{run[1]}" + (f"-{run[2]}" if run[2] > run[1] else ""))
        run = (stem, int(number), int(number)) if stem and number.isdecimal() else None
        if not run and name:
            words.append(name)
    text = ", ".join(words) or "-"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
