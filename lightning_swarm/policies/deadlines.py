"""How long to wait for a peer: from what it and its stage have shown, never from a hand-set timeout.

A deadline follows the median and the spread of the peer's own durations, so one that is twenty times slower than its
neighbours simply gets a twenty times longer one. A peer that nobody has measured yet gets a generous deadline from the
others of its stage; as long as it computes, it gets as much time as each of them took the first time, when there was
something to compile or to load. After a timeout the peer's next deadline doubles until it answers again: a worker that
has become slow is then measured instead of being timed out for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Deadlines"]

_LONGEST_BACKOFF = 64.0
_FIRSTS = 8
"""Of how many peers of a stage the first duration is remembered."""


@dataclass(slots=True)
class _History:
    stage: int
    durations: deque[float]
    backoff: float = 1.0
    quantiles: tuple[float, float] | None = None
    unseen: int = 0

    def add(self, duration: float) -> None:
        """Take a duration in. The quantiles follow at once while there are few, later with every fourth."""
        self.durations.append(duration)
        self.backoff = 1.0
        self.unseen += 1
        if self.unseen >= 4 or len(self.durations) < 8:
            self.quantiles = None

    def longest_of_late(self) -> float:
        """The longest of the last few durations."""
        return max(self.durations[-index] for index in range(1, min(len(self.durations), 3) + 1))

    def median_and_spread(self) -> tuple[float, float]:
        """Median and scaled median absolute deviation (1.4826 makes it the standard deviation of a normal sample)."""
        if self.quantiles is None:
            middle = median(self.durations)
            self.quantiles = middle, 1.4826 * median(abs(value - middle) for value in self.durations)
            self.unseen = 0
        return self.quantiles


@dataclass(slots=True)
class Deadlines:
    """Deadlines by peer and call.

    Args:
        floor_s: no deadline is shorter. It covers what the durations do not show: a garbage collection, a busy machine.
        ceiling_s: no deadline is longer, whatever was measured.
        initial_s: the deadline while nobody of the stage has been measured. Raise it when the first microbatch
            compiles.
        factor: multiple of the median that is still ordinary; for a peer's first call, of what others took for theirs.
        spreads: multiple of the spread that is added.
        unknown_factor: multiple of the stage's median for a peer without history: how much slower than the typical
            worker a newcomer may be.
        window: number of durations kept a peer and call.
    """

    floor_s: float = 2.0
    ceiling_s: float = 3600.0
    initial_s: float = 120.0
    factor: float = 3.0
    spreads: float = 6.0
    unknown_factor: float = 20.0
    window: int = 32
    _histories: dict[tuple[str, str], _History] = field(default_factory=dict)
    _firsts: dict[tuple[int, str], deque[float]] = field(default_factory=dict)
    """By stage and call, the first durations of the peers that came last."""

    def __post_init__(self) -> None:
        if not 0 < self.floor_s <= self.initial_s <= self.ceiling_s:
            raise ValueError(
                "Deadlines need 0 < floor_s <= initial_s <= ceiling_s, "
                f"got {self.floor_s} <= {self.initial_s} <= {self.ceiling_s}."
            )

    def completed(self, peer: str, stage: int, call: str, duration_s: float) -> None:
        """Record how long a call took, from sending to the reply. A change of stage starts a new history."""
        history = self._history(peer, stage, call)
        if not history.durations:
            self._firsts.setdefault((stage, call), deque(maxlen=_FIRSTS)).append(duration_s)
        history.add(duration_s)

    def timed_out(self, peer: str, stage: int, call: str) -> None:
        """Record that a deadline passed: the peer's next one is twice as long."""
        history = self._history(peer, stage, call)
        history.backoff = min(history.backoff * 2.0, _LONGEST_BACKOFF)

    def extend(self, peer: str, stage: int, call: str) -> bool:
        """A deadline passed, but there is nobody else to ask.

        Returns:
            Whether the peer's next one is longer, which it is until it is 64 times the usual one.
        """
        history = self._history(peer, stage, call)
        extensible = history.backoff < _LONGEST_BACKOFF
        self.timed_out(peer, stage, call)
        return extensible

    def deadline_s(self, peer: str, stage: int, call: str, *, ahead: int = 0) -> float:
        """Seconds to wait for the call's reply.

        Args:
            peer: the peer that is called.
            stage: the stage that it serves.
            call: name of the call; each has its own history.
            ahead: tasks in the peer's queue beyond what was usual when it was measured; each may take another median.
        """
        history = self._histories.get((peer, call))
        if history is not None and history.stage == stage and history.durations:
            middle, spread = history.median_and_spread()
            allowed = (self.factor + ahead) * middle + self.spreads * spread
            # Without this a worker that has become slow answers, is measured, and times out again for half a window.
            allowed = max(allowed, 2.0 * history.longest_of_late())
        else:
            others = self.stage_median_s(stage, call)
            allowed = self.initial_s if others is None else self.unknown_factor * others * (1 + ahead)
        backoff = history.backoff if history is not None else 1.0
        return min(max(allowed, self.floor_s) * backoff, self.ceiling_s)

    def first_s(self, peer: str, stage: int, call: str) -> float:
        """Seconds that a peer without a history may compute for its first call; 0 for others, or if nobody made one."""
        history = self._histories.get((peer, call))
        firsts = self._firsts.get((stage, call))
        if firsts is None or (history is not None and history.stage == stage and history.durations):
            return 0.0
        return min(self.factor * median(firsts), self.ceiling_s)

    def stage_median_s(self, stage: int, call: str) -> float | None:
        """The median over the stage's peers of their median durations, or None while none is measured."""
        medians = [
            history.median_and_spread()[0]
            for (_, name), history in self._histories.items()
            if name == call and history.stage == stage and history.durations
        ]
        return median(medians) if medians else None

    def forget(self, peer: str) -> None:
        """Drop what is known of a peer that has left."""
        for key in [key for key in self._histories if key[0] == peer]:
            del self._histories[key]

    def _history(self, peer: str, stage: int, call: str) -> _History:
        history = self._histories.get((peer, call))
        if history is None or history.stage != stage:
            history = self._histories[peer, call] = _History(stage, deque(maxlen=self.window))
        return history
