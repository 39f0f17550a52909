"""Who has accumulated what: the trainer's record that makes every microbatch count exactly once."""

from collections import defaultdict
from collections.abc import Iterable


class Ledger:
    """The microbatches of the current step, by stage and worker.

    Example:
        >>> ledger = Ledger(stages=2)
        >>> ledger.record("7:0", stage=0, worker="QmA")
        >>> ledger.record("7:0", stage=1, worker="QmB")
        >>> sorted(ledger.held_by("QmA"))
        ['7:0']
        >>> ledger.missing(["7:0", "7:1"])
        [('7:1', 0), ('7:1', 1)]
        >>> ledger.lose("QmB")
        [('7:0', 1)]
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self._holders: dict[tuple[str, int], str] = {}
        self._counts = [0] * stages

    def record(self, microbatch: str, stage: int, worker: str) -> None:
        """Note that ``worker`` has accumulated ``microbatch`` at ``stage``.

        Raises:
            ValueError: Another worker has it already; counting it again would be wrong.
        """
        holder = self._holders.get((microbatch, stage))
        if holder is None:
            self._holders[microbatch, stage] = worker
            self._counts[stage] += 1
        elif holder != worker:
            raise ValueError(
                f"Microbatch {microbatch} was accumulated twice at stage {stage}: by {holder} and by {worker}."
            )

    def holder(self, microbatch: str, stage: int) -> str | None:
        """The worker that has accumulated it, if one has."""
        return self._holders.get((microbatch, stage))

    def count(self, stage: int) -> int:
        """How many microbatches somebody has accumulated at a stage."""
        return self._counts[stage]

    def held_by(self, worker: str) -> frozenset[str]:
        """What ``worker`` has accumulated."""
        return frozenset(microbatch for (microbatch, _), holder in self._holders.items() if holder == worker)

    def holders(self) -> set[str]:
        """Everybody who has accumulated something."""
        return set(self._holders.values())

    def holdings(self) -> dict[str, frozenset[str]]:
        """What each of them has accumulated."""
        held: dict[str, list[str]] = defaultdict(list)
        for (microbatch, _), worker in self._holders.items():
            held[worker].append(microbatch)
        return {worker: frozenset(microbatches) for worker, microbatches in held.items()}

    def contributors(self) -> dict[int, set[str]]:
        """By stage, the workers that have accumulated something."""
        by_stage: dict[int, set[str]] = defaultdict(set)
        for (_, stage), worker in self._holders.items():
            by_stage[stage].add(worker)
        return by_stage

    def missing(self, microbatches: Iterable[str]) -> list[tuple[str, int]]:
        """``(microbatch, stage)`` that nobody has accumulated."""
        return [(m, s) for m in microbatches for s in range(self.stages) if (m, s) not in self._holders]

    def lose(self, worker: str) -> list[tuple[str, int]]:
        """Strike a worker out.

        Returns:
            What it held and others must repeat, as ``(microbatch, stage)``.
        """
        lost = [key for key, holder in self._holders.items() if holder == worker]
        for key in lost:
            del self._holders[key]
            self._counts[key[1]] -= 1
        return lost

    def clear(self) -> None:
        """The step is committed."""
        self._holders.clear()
        self._counts = [0] * self.stages
