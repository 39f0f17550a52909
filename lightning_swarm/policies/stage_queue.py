"""The priority queue of one stage: what :class:`~lightning_swarm.policies.routing.StochasticWiring` keeps of its peers.

A heap with lazy deletion: whenever a peer's charge changes it is pushed again, and only its newest entry counts. A
peer that may hold no more is not in the heap at all and comes back when it has answered.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from statistics import median

from lightning_swarm.policies.utilization import ServiceTime

__all__ = ["Item", "PeerCharge", "StageQueue"]


@dataclass(slots=True, eq=False)
class PeerCharge:
    """A peer of one stage. Its charge is what was settled plus the estimate for each microbatch that is out."""

    name: str
    service: ServiceTime
    estimate_s: float
    capacity: int | None
    declared: bool = False
    newcomer: bool = False
    settled_s: float = 0.0
    outstanding: int = 0
    version: int = 0
    queued: bool = False
    heard_s: float = -math.inf

    @property
    def charge_s(self) -> float:
        return self.settled_s + self.outstanding * self.estimate_s

    @property
    def finish_s(self) -> float:
        return self.settled_s + (self.outstanding + 1) * self.estimate_s


Item = tuple[float, int, int, PeerCharge]
"""Heap entry: finish tag, serial number, version, peer."""


@dataclass(slots=True, eq=False)
class StageQueue:
    """The peers of one stage in the order of their charges.

    Args:
        unproven_limit: microbatches that a newcomer may hold before it has answered any.
        virtual_s: the most that a peer had paid when it was chosen; nobody comes back with less. What is out does not
            count in it: estimates are corrected later, and a first guess would shut everybody out who comes meanwhile.
        rate: microbatches a second by the estimates.
        outstanding: microbatches that the stage's peers hold.
        typical_s: the median service time that unmeasured peers were last given.
        edge_s: average seconds on the wire in front of the stage.
    """

    unproven_limit: int
    peers: dict[str, PeerCharge] = field(default_factory=dict)
    heap: list[Item] = field(default_factory=list)
    serial: int = 0
    virtual_s: float = 0.0
    rate: float = 0.0
    outstanding: int = 0
    typical_s: float | None = None
    edge_s: float = 0.0

    def add(self, name: str, service: ServiceTime, declared_s: float | None, capacity: int | None) -> None:
        """A new peer, which counts as having paid as much as the one that has paid most."""
        estimate = declared_s or self.typical_s or self.median_s() or 1.0
        others = self.peers.values()
        peer = PeerCharge(name, service, estimate, capacity, declared=bool(declared_s))
        peer.newcomer = any(other.service.count for other in others)
        peer.settled_s = max((other.settled_s for other in others), default=self.virtual_s)
        self.peers[name] = peer
        self.rate += 1.0 / estimate
        self.push(peer)

    def remove(self, name: str) -> None:
        """A peer is gone with all that it holds."""
        peer = self.peers.pop(name)
        peer.queued = False
        self.outstanding -= peer.outstanding
        self.rate = sum(1.0 / other.estimate_s for other in self.peers.values())

    def push(self, peer: PeerCharge) -> None:
        """Queue the peer under its present charge."""
        peer.version += 1
        self.serial += 1
        peer.queued = True
        heappush(self.heap, (peer.finish_s, self.serial, peer.version, peer))
        if len(self.heap) > 4 * len(self.peers) + 64:
            self.rebuild()

    def rebuild(self) -> None:
        """Queue everybody afresh, without old entries."""
        queued = [peer for peer in self.peers.values() if peer.queued]
        self.heap = [(peer.finish_s, number, peer.version, peer) for number, peer in enumerate(queued)]
        self.serial = len(queued)
        heapify(self.heap)

    def pop(self) -> Item | None:
        """The least charged peer that has room. It counts as queued: the caller pushes it again, changed or not."""
        while self.heap:
            item = heappop(self.heap)
            peer = item[3]
            if item[2] != peer.version or not peer.queued:
                continue
            if not self.is_full(peer):
                return item
            peer.queued = False
        return None

    def is_full(self, peer: PeerCharge) -> bool:
        """Whether the peer may hold no more: by its memory, as a newcomer, or as one that holds twice its share."""
        held = peer.outstanding
        if peer.capacity is not None and held >= peer.capacity:
            return True
        if held < self.unproven_limit:
            return False
        if peer.newcomer and not peer.service.count:
            return True
        return held >= 2 + 2.0 * self.outstanding / (peer.estimate_s * self.rate)

    def anyone(self, exclude: Collection[str], banned: Collection[str]) -> PeerCharge | None:
        """The best of those that are full or banned, when there is nobody else: first those that are only full."""
        allowed = [peer for name, peer in self.peers.items() if name not in exclude]
        return min(allowed, key=lambda peer: (peer.name in banned, peer.finish_s), default=None)

    def charge(self, peer: PeerCharge, now: float) -> str:
        """The peer gets a microbatch."""
        if not peer.outstanding:
            peer.heard_s = now
        self.virtual_s = max(self.virtual_s, peer.settled_s)
        peer.outstanding += 1
        self.outstanding += 1
        peer.queued = False
        if not self.is_full(peer):
            self.push(peer)
        return peer.name

    def settle(self, peer: PeerCharge, seconds: float) -> None:
        """One microbatch that the peer held is done with, at this price. Who was full gets no credit for that time."""
        if peer.outstanding:
            peer.outstanding -= 1
            self.outstanding -= 1
            peer.settled_s += seconds
        if peer.queued:
            self.push(peer)
        elif not self.is_full(peer):
            peer.settled_s = max(peer.settled_s, self.virtual_s - (peer.outstanding + 1) * peer.estimate_s)
            self.push(peer)

    def observe(self, peer: PeerCharge, seconds: float) -> None:
        """Settle a microbatch with its measured seconds and learn from them."""
        first = not peer.service.count
        self._estimate(peer, peer.service.update(seconds))
        if first:
            self._learn_scale()
        self.settle(peer, seconds)

    def median_s(self) -> float | None:
        """Median service time of the measured peers."""
        measured = [peer.estimate_s for peer in self.peers.values() if peer.service.count]
        return median(measured) if measured else None

    def _estimate(self, peer: PeerCharge, seconds: float) -> None:
        self.rate += 1.0 / seconds - 1.0 / peer.estimate_s
        peer.estimate_s = seconds

    def _learn_scale(self) -> None:
        """Re-estimate peers that have not answered: their first guess may dwarf what the measured ones are charged."""
        typical = self.median_s()
        if typical is None or (self.typical_s is not None and 0.67 < typical / self.typical_s < 1.5):
            return
        self.typical_s = typical
        for peer in self.peers.values():
            if not peer.service.count and not peer.declared:
                self._estimate(peer, typical)
        self.rebuild()
