"""The priority queue of one stage: what :class:`~lightning_swarm.policies.routing.StochasticWiring` keeps of its peers.

A heap with lazy deletion: whenever a peer's charge changes it is pushed again, and only its newest entry counts. A peer that
may hold no more is not in the heap at all and comes back when it has answered.
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


@dataclass(slots=True, eq=False)
class StageQueue:
    """The priority queue of one stage: a heap with lazy deletion, where only an entry's newest version counts."""

    unproven_limit: int
    peers: dict[str, PeerCharge] = field(default_factory=dict)
    heap: list[Item] = field(default_factory=list)
    serial: int = 0
    virtual_s: float = 0.0
    rate: float = 0.0
    outstanding: int = 0
    typical_s: float | None = None
    edge_s: float = 0.0

    def push(self, peer: PeerCharge) -> None:
        peer.version += 1
        self.serial += 1
        peer.queued = True
        heappush(self.heap, (peer.finish_s, self.serial, peer.version, peer))
        if len(self.heap) > 4 * len(self.peers) + 64:
            self.rebuild()

    def rebuild(self) -> None:
        self.heap = [
            (peer.finish_s, n, peer.version, peer) for n, peer in enumerate(self.peers.values()) if peer.queued
        ]
        self.serial = len(self.peers)
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
        held = peer.outstanding
        if peer.capacity is not None and held >= peer.capacity:
            return True
        if held < self.unproven_limit:
            return False
        if peer.newcomer and not peer.service.count:
            return True
        return held >= 2 + 2.0 * self.outstanding / (peer.estimate_s * self.rate)

    def back(self, peer: PeerCharge) -> None:
        """Queue a peer that was out of the queue because it was full: without credit for the time it was not there."""
        if not peer.queued and not self.is_full(peer):
            peer.settled_s = max(peer.settled_s, self.virtual_s - (peer.outstanding + 1) * peer.estimate_s)
            self.push(peer)

    def set_estimate(self, peer: PeerCharge, seconds: float) -> None:
        self.rate += 1.0 / seconds - 1.0 / peer.estimate_s
        peer.estimate_s = seconds
