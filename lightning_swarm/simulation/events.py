"""The event loop of the simulation: a heap of (time, order, callback).

simpy was tried first: its processes are generators, and an event costs about twice what a callback does here
(``benchmarks/simulate_routing.py`` prints both); that benchmark handles some 10^7 events, which is minutes as it is.
Events of one moment run in the order in which they were scheduled, so a seed determines a run.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

__all__ = ["EventLoop"]


class EventLoop:
    """Runs callbacks at simulated times.

    Example:
        >>> loop = EventLoop()
        >>> loop.after(2.0, print, "two")
        >>> loop.after(1.0, print, "one")
        >>> loop.run()
        one
        two
        >>> loop.now
        2.0
    """

    __slots__ = ("_heap", "_order", "_stopped", "handled", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0
        self._stopped = False

    def at(self, time: float, callback: Callable[..., object], *args: Any) -> None:
        """Call ``callback(*args)`` at this time; a time in the past means now."""
        self._order += 1
        heappush(self._heap, (time if time > self.now else self.now, self._order, callback, args))

    def after(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        """Call ``callback(*args)`` after a delay."""
        self._order += 1
        heappush(self._heap, (self.now + delay, self._order, callback, args))

    def stop(self) -> None:
        """Make :meth:`run` return after the present event."""
        self._stopped = True

    def run(self, until: float = float("inf")) -> None:
        """Handle events until :meth:`stop` is called or none is left up to ``until``; then it is ``until``."""
        self._stopped = False
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, callback, args = heappop(heap)
            self.handled += 1
            callback(*args)
            if self._stopped:
                return
        if until < float("inf"):
            self.now = until
