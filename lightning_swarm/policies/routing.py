"""Stochastic wiring: which worker of each stage a microbatch passes.

Interleaved weighted round-robin, as in SWARM (Ryabinin et al., ICML 2023, section 3.2 and algorithm 1): each stage
keeps a priority queue of its peers; a peer's priority is the processing time charged to it so far, and a microbatch
goes to the least charged one. Slow workers are charged more a microbatch, so each gets a share in proportion to its
speed.

What is added to the paper's algorithm, each for an incident:

* Forward and backward are charged together at dispatch with the estimate and settled at completion with what was
  measured. Whatever is still out is re-charged with the new estimate, so a worker that slows down is followed at once.
* The queue is ordered by the charge *after* the microbatch, as weighted fair queueing orders by finish tags: a slow
  worker isn't given the last microbatch of a step that a fast one would finish earlier.
* A new peer enters with the most that anybody has paid, and nobody earns credit while it is idle, full or banned; so
  nobody is flooded when it comes (back).
* A timeout is evidence: the time waited is charged and counts as an observation. A peer that came later and has
  answered nothing yet holds at most two microbatches, any other one at most about twice its share of what is out,
  whatever the deadlines are.
* The seconds that a microbatch spends on the wire are added to the charge while peers are compared: the nearest peer
  wins when this makes the microbatch finish earlier, and since the charge stays, far peers still get their share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from heapq import heappush

from lightning_swarm.policies.stage_queue import Item, PeerCharge, StageQueue
from lightning_swarm.policies.utilization import ServiceTime

__all__ = ["EdgeCost", "LinkCosts", "StageEmpty", "StochasticWiring"]

_CONNECT_S = 10.0
"""What two peers that have not met may take to connect, on busy machines."""
EdgeCost = Callable[[str, str], float]
"""Seconds that a microbatch spends on the wire between two peers, there and back; ``math.inf`` where no link works."""


class StageEmpty(LookupError):
    """No peer of a stage is left to choose from."""

    def __init__(self, stage: int, excluded: Collection[str]) -> None:
        self.stage = stage
        self.excluded = tuple(excluded)
        tried = f" besides {', '.join(sorted(self.excluded))}" if self.excluded else ""
        super().__init__(f"Stage {stage} has no worker{tried}.")


class LinkCosts:
    """An :data:`EdgeCost` from measured latencies and bandwidths, or from the seconds that transfers took.

    Args:
        microbatch_bytes: bytes of an activation; its gradient takes as many on the way back.
        latency_s: one-way latency of a link that nobody has measured.
        bytes_per_s: bandwidth of a link that nobody has measured.
        smoothing: weight of a new observation.
    """

    def __init__(
        self,
        microbatch_bytes: float,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        smoothing: float = 0.2,
    ) -> None:
        self.microbatch_bytes = microbatch_bytes
        self.default_s = latency_s + microbatch_bytes / bytes_per_s
        self.smoothing = smoothing
        self._seconds: dict[tuple[str, str], float] = {}
        self._cut: set[tuple[str, str]] = set()

    def measured(self, source: str, target: str, latency_s: float, bytes_per_s: float = math.inf) -> None:
        """Record a measurement of the link, one way; the other direction is taken to be alike until it is measured."""
        self._seconds[source, target] = latency_s + self.microbatch_bytes / bytes_per_s

    def observed(self, source: str, target: str, seconds: float) -> None:
        """Record how long a microbatch's tensors took over the link, one way."""
        before = self._seconds.get((source, target), seconds)
        self._seconds[source, target] = before + self.smoothing * (seconds - before)

    def patience_s(self, source: str, target: str, factor: float = 4.0) -> float:
        """How long a transfer may take before the link counts as dead: so many times what it usually takes, or, where
        nothing was measured, what the slowest link takes, and as long as it takes to connect.
        """
        known = self._seconds.get((source, target))
        if known is not None:
            return factor * known
        return max(_CONNECT_S, factor * max(self._seconds.values(), default=self.default_s))

    def forget(self, peer: str) -> None:
        """The peer has left."""
        self._seconds = {link: seconds for link, seconds in self._seconds.items() if peer not in link}
        self._cut = {link for link in self._cut if peer not in link}

    def cut(self, source: str, target: str) -> None:
        """The link does not work: no microbatch shall pass it until it is restored."""
        self._cut.add((source, target))

    def restore(self, source: str, target: str) -> None:
        """The link may be tried again."""
        self._cut.discard((source, target))

    def __call__(self, source: str, target: str) -> float:
        if self._cut and ((source, target) in self._cut or (target, source) in self._cut):
            return math.inf
        there, back = self._seconds.get((source, target)), self._seconds.get((target, source))
        if there is None or back is None:
            known = there if back is None else back
            return 2.0 * (self.default_s if known is None else known)
        return there + back


class StochasticWiring:
    """Chooses workers microbatch by microbatch.

    Every peer that :meth:`route` or :meth:`pick` returns is charged, and exactly one of :meth:`complete`,
    :meth:`timed_out`, :meth:`failed` and :meth:`withdraw` must follow for it. Peers that have left or moved meanwhile
    are ignored there. A decision takes microseconds and grows with the logarithm of a stage's workers.

    Args:
        stages: number of stages.
        edge_cost: seconds on the wire between two peers; None treats all links alike.
        smoothing: weight of a new service time, see :class:`~lightning_swarm.policies.utilization.ServiceTime`.
        lookahead: how many of the least charged peers are compared by edge cost. More finds nearer peers and costs
            time.
        unproven_limit: microbatches that a peer, which came when others were at work, may hold before it has answered
            any.

    Example:
        >>> wiring = StochasticWiring(2)
        >>> wiring.add(0, "a"), wiring.add(1, "b")
        (None, None)
        >>> wiring.route(now=0.0)
        ('a', 'b')
        >>> wiring.complete(0, "a", 0.5, now=0.5)
        >>> wiring.service_s("a")
        0.5
    """

    def __init__(
        self,
        stages: int,
        *,
        edge_cost: EdgeCost | None = None,
        smoothing: float = 0.2,
        lookahead: int = 10,
        unproven_limit: int = 2,
    ) -> None:
        if stages < 1 or lookahead < 1 or unproven_limit < 1:
            raise ValueError(
                f"stages, lookahead and unproven_limit must be at least 1, got {stages}, {lookahead}, {unproven_limit}"
            )
        self.edge_cost = edge_cost
        self.smoothing = smoothing
        self.lookahead = lookahead
        self._stages = [StageQueue(unproven_limit) for _ in range(stages)]
        self._where: dict[str, int] = {}

    def add(self, stage: int, peer: str, *, service_s: float | None = None, capacity: int | None = None) -> None:
        """A peer serves the stage from now on. It enters with the most that anybody has paid.

        Args:
            stage: index of the stage.
            peer: the peer; added again, it leaves its old place first.
            service_s: declared seconds a microbatch; the stage's median while None.
            capacity: how many microbatches its memory holds at once; None for no bound.
        """
        self.remove(peer)
        self._stages[stage].add(peer, ServiceTime(self.smoothing), service_s, capacity)
        self._where[peer] = stage

    def remove(self, peer: str) -> None:
        """The peer has left; what it held is forgotten. Unknown peers are ignored."""
        stage = self._where.pop(peer, None)
        if stage is None:
            return
        self._stages[stage].remove(peer)

    def move(self, peer: str, stage: int) -> None:
        """The peer serves another stage now. Its speed relative to the old stage's peers makes the first estimate."""
        old = self._stages[self._where[peer]]
        entry = old.peers[peer]
        here, there = old.median_s(), self._stages[stage].median_s()
        measured = entry.service.seconds
        known = measured is not None and here and there
        self.add(stage, peer, service_s=measured / here * there if known else None, capacity=entry.capacity)  # type: ignore[operator]

    def limit(self, peer: str, capacity: int) -> None:
        """The peer's memory holds so many microbatches at once. Unknown peers are ignored."""
        stage = self._where.get(peer)
        if stage is not None:
            self._stages[stage].peers[peer].capacity = capacity

    def peers(self, stage: int) -> tuple[str, ...]:
        """The peers of a stage."""
        return tuple(self._stages[stage].peers)

    def stage_of(self, peer: str) -> int | None:
        """The stage that a peer serves, or None."""
        return self._where.get(peer)

    def route(self, now: float, banned: Collection[str] = (), *, source: str | None = None) -> tuple[str, ...]:
        """Choose one peer a stage for a new microbatch and charge them.

        Args:
            now: the time, for :meth:`silent`.
            banned: peers to avoid; ignored at a stage where all are banned.
            source: the peer that the first stage fetches from, for the edge cost.

        Raises:
            StageEmpty: a stage has no peer; then nobody is charged.
        """
        chosen: list[str] = []
        previous = source
        try:
            for stage in range(len(self._stages)):
                previous = self.pick(stage, now, banned=banned, previous=previous)
                chosen.append(previous)
        except StageEmpty:
            for stage, peer in enumerate(chosen):
                self.withdraw(stage, peer)
            raise
        return tuple(chosen)

    def pick(
        self,
        stage: int,
        now: float,
        *,
        banned: Collection[str] = (),
        exclude: Collection[str] = (),
        previous: str | None = None,
        following: str | None = None,
    ) -> str:
        """Choose a peer for one hop and charge it, for instance to repair a route.

        Args:
            stage: index of the stage.
            now: the time, for :meth:`silent`.
            banned: peers to avoid unless nobody else is left.
            exclude: peers that must not be chosen (they have just failed this microbatch).
            previous: the peer in front of this hop; its links count.
            following: the peer behind this hop; its links count.

        Raises:
            StageEmpty: nobody is left.
        """
        queue = self._stages[stage]
        cost = self.edge_cost if previous is not None or following is not None else None
        wanted = 1 if cost is None else self.lookahead
        best: Item | None = None
        best_score = best_edge = math.inf
        passed: list[Item] = []
        skipped: list[PeerCharge] = []
        while wanted > 0 or best_score == math.inf:
            item = queue.pop()
            if item is None:
                break
            name = item[3].name
            if name in exclude:
                passed.append(item)
                continue
            if name in banned:
                skipped.append(item[3])
                continue
            wanted -= 1
            edge = 0.0
            if cost is not None:
                if previous is not None:
                    edge = cost(previous, name)
                if following is not None:
                    edge += cost(name, following)
            score = item[0] + edge
            if best is None or score < best_score:
                if best is not None:
                    passed.append(best)
                best, best_score, best_edge = item, score, edge
            else:
                passed.append(item)
        for item in passed:
            heappush(queue.heap, item)
        for entry in skipped:
            # Its turn passes: it pays as if served, so it neither hoards credit nor is looked at again soon.
            entry.settled_s += entry.estimate_s
            queue.push(entry)
        if cost is not None and best_edge < math.inf:
            queue.edge_s += 0.02 * (best_edge - queue.edge_s)
        chosen = best[3] if best is not None else queue.anyone(exclude, banned)
        if chosen is None:
            raise StageEmpty(stage, [peer for peer in exclude if peer in queue.peers])
        return queue.charge(chosen, now)

    def complete(self, stage: int, peer: str, service_s: float, *, now: float) -> None:
        """A microbatch is done: settle its charge with the seconds that the worker computed (forward and backward)."""
        entry = self._stages[stage].peers.get(peer)
        if entry is not None:
            entry.heard_s = now
            self._stages[stage].observe(entry, max(service_s, 1e-9))

    def timed_out(self, stage: int, peer: str, waited_s: float, *, now: float | None = None) -> None:
        """A deadline passed: charge the wait. It is an observation unless the peer is known to be even slower.

        ``now`` is accepted as by :meth:`complete`, but silence has no end here.
        """
        entry = self._stages[stage].peers.get(peer)
        if entry is not None:
            self._stages[stage].observe(entry, max(waited_s, entry.estimate_s))

    def failed(self, stage: int, peer: str) -> None:
        """The call failed or the peer was busy. The charge stays, so that who fails fast does not draw all the work."""
        self._settle(stage, peer, refund=False)

    def withdraw(self, stage: int, peer: str) -> None:
        """The task was taken back for a reason that isn't the peer's: refund the charge."""
        self._settle(stage, peer, refund=True)

    def service_s(self, peer: str) -> float:
        """The current estimate of the peer's seconds a microbatch."""
        return self._stages[self._where[peer]].peers[peer].estimate_s

    def measured_s(self, peer: str) -> float | None:
        """The measured average of the peer's seconds a microbatch, None before its first answer."""
        return self._stages[self._where[peer]].peers[peer].service.seconds

    def shares(self, stage: int) -> dict[str, float]:
        """The share of the stage's microbatches that each peer gets in the long run."""
        queue = self._stages[stage]
        return {name: 1.0 / (entry.estimate_s * queue.rate) for name, entry in queue.peers.items()}

    def outstanding(self, peer: str) -> int:
        """How many microbatches the peer holds."""
        stage = self._where.get(peer)
        return 0 if stage is None else self._stages[stage].peers[peer].outstanding

    def silent(self, now: float) -> dict[str, float]:
        """Seconds since each peer that holds microbatches gave its last answer (or got the first of them)."""
        return {
            name: now - entry.heard_s
            for queue in self._stages
            for name, entry in queue.peers.items()
            if entry.outstanding
        }

    def in_flight_target(self, *, edge_s: Sequence[float] | None = None, slack: float = 5.0) -> int:
        """How many microbatches in flight keep every worker of the weakest stage busy.

        By Little's law the pipeline holds throughput x time in it: at each stage one microbatch in service a worker,
        and on the wire what leaves in the time of a journey. ``slack`` multiplies that, since routes do not arrive
        evenly. What the workers' memory cannot hold is not counted in.

        Args:
            edge_s: seconds on the wire in front of each stage, there and back; None takes the average of the routes
                chosen.
            slack: raise it when service times vary widely; lower it when memory is short.

        Raises:
            StageEmpty: a stage has no peer.
        """
        for stage, queue in enumerate(self._stages):
            if not queue.peers:
                raise StageEmpty(stage, ())
        rate = min(queue.rate for queue in self._stages)
        wire_s = sum(queue.edge_s for queue in self._stages) if edge_s is None else sum(edge_s)
        working = sum(len(queue.peers) * rate / queue.rate for queue in self._stages)
        target = math.ceil(slack * (working + rate * wire_s))
        for queue in self._stages:
            if queue.typical_s is None:
                target = min(target, 2 * len(queue.peers))
            if all(entry.capacity is not None for entry in queue.peers.values()):
                target = min(target, sum(entry.capacity or 0 for entry in queue.peers.values()))
        return max(target, 1)

    def _settle(self, stage: int, peer: str, *, refund: bool) -> None:
        queue = self._stages[stage]
        entry = queue.peers.get(peer)
        if entry is not None and entry.outstanding:
            queue.settle(entry, 0.0 if refund else entry.estimate_s)
