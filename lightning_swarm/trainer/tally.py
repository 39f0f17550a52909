"""What happened in a Lightning call, by stage and by worker: the numbers of ``strategy.report()``.

They stay when a worker has gone, and when all workers are spread anew.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Any

log = logging.getLogger(__name__)

MICROBATCH_EVENTS = ("processed", "retried", "duplicate", "lost", "replayed")
"""What can happen to a microbatch at a stage: it was *processed*; its task was *retried*, as a worker or a source
failed; a worker that had done it got its task again, a *duplicate*; it was *lost* with the worker that had accumulated
it, for others to repeat; an output of it was *replayed*, made again as an outbox had evicted it.
"""


class Tally:
    """Counts events.

    Args:
        clock: Seconds that only grow.

    Attributes:
        counters: All events by name.
        bans: Every ban: ``peer`` (of a link: ``source>target``), ``stage``, ``cause``, ``seconds`` and ``at_s``, when
            it began.
        recoveries_s: Of every loss of a worker with microbatches, and of a stage: for how long something of it was not
            done again, since the loss was noticed.

    Example:
        >>> tally = Tally()
        >>> tally.count("replayed", stage=1, worker="QmA")
        >>> tally.by_stage(2)[1]["replayed"], tally.counters["replayed microbatches"]
        (1, 1)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters: Counter[str] = Counter()
        self.bans: list[dict[str, Any]] = []
        self.recoveries_s: list[float] = []
        self._clock = clock
        self._began_s = clock()
        self._stages: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._workers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._missing: list[tuple[float, set[tuple[str, int]]]] = []

    def count(self, event: str, stage: int, worker: str, number: int = 1) -> None:
        """One of `MICROBATCH_EVENTS`, or ``joins``, ``leaves`` or ``bans``, happened to a worker at a stage."""
        self._stages[stage][event] += number
        self._workers[worker][event] += number
        if event not in MICROBATCH_EVENTS:
            self.counters[event] += number
        elif event != "processed":
            self.counters[f"{event} microbatches"] += number

    def banned(self, worker: str, stage: int, cause: str, seconds: float) -> None:
        """A worker is left alone for so long."""
        self.count("bans", stage, worker)
        self._note(worker, stage, cause, seconds)

    def link_banned(self, link: str, stage: int, seconds: float) -> None:
        """Nothing goes over a link (``source>target``) to a stage for so long. It counts for neither worker."""
        self.counters["links banned"] += 1
        self._note(link, stage, "link", seconds)

    def _note(self, whom: str, stage: int, cause: str, seconds: float) -> None:
        at_s = self._clock() - self._began_s
        self.bans.append({"peer": whom, "stage": stage, "cause": cause, "seconds": seconds, "at_s": at_s})

    def missing(self, microbatches: Collection[tuple[str, int]]) -> None:
        """These microbatches at these stages were a lost worker's, and others have to do them."""
        if microbatches:
            self._missing.append((self._clock(), set(microbatches)))

    def done(self, microbatch: str, stage: int) -> None:
        """A stage is done with a microbatch."""
        for since_s, keys in self._missing:
            keys.discard((microbatch, stage))
            if not keys:
                self.recovered(self._clock() - since_s)
        self._missing = [(since_s, keys) for since_s, keys in self._missing if keys]

    def recovered(self, seconds: float) -> None:
        """All that went with a worker or a stage is done again, so long after it was lost."""
        self.recoveries_s.append(seconds)
        log.info("What was lost is done again, %.2f s after the loss", seconds)

    def spread_anew(self) -> None:
        """Nobody does any more what is missing: everything is done again from an earlier step."""
        self._missing.clear()

    def by_stage(self, stages: int) -> list[dict[str, int]]:
        """The counts of every stage."""
        return [_complete(self._stages[stage]) for stage in range(stages)]

    def by_worker(self) -> dict[str, dict[str, int]]:
        """Those of every worker that ever was."""
        return {worker: _complete(counts) for worker, counts in self._workers.items()}


def _complete(counts: Counter[str]) -> dict[str, int]:
    return {event: counts[event] for event in (*MICROBATCH_EVENTS, "joins", "leaves", "bans")}
