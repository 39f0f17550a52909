"""Who serves which stage over hours: churn, downloads and moves, without microbatches.

Workers are alike, stages cost alike and the pipeline runs at the rate of its weakest stage, so between two events the
throughput is the least number of serving workers of a stage. The best possible spreads the machines present perfectly,
at once and for free: floor(machines / stages). A part of the difference is nobody's fault: a machine that has just come
holds no state yet. The *ceiling* spreads those that hold one perfectly; no policy that does not know the future gets
beyond it.

The policy object is the swarm's own. It sees a reading a few seconds after each change, as often as it wants to look
at a standing need, and its moves take effect when the download ends, the worker serving its old stage meanwhile.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from lightning_swarm.policies.rebalancing import RebalancingPolicy, assign_stage
from lightning_swarm.policies.utilization import SwarmLoad, WorkerLoad
from lightning_swarm.simulation.events import EventLoop
from lightning_swarm.simulation.traces import ChurnTrace
from lightning_swarm.supervisor import HAND_OVER_S

__all__ = ["AllocationResult", "AllocationSettings", "simulate_allocation"]


@dataclass(frozen=True, slots=True)
class AllocationSettings:
    """What is simulated besides trace and policy.

    Args:
        stages: stages of the pipeline.
        download_s: seconds to download a stage's state, for joining and for moving workers.
        join: "random" sends a new machine to any stage, "smallest" to the one that needs it most.
        notice_s: seconds between the spot market's notice and the loss of a machine; 0 for losses without warning.
        hand_over_s: how long before the announced loss the worker stops to serve.
        reading_s: seconds between two readings of the swarm.
        record: keep the throughput over time, for plots.
    """

    stages: int
    download_s: float = 60.0
    join: str = "smallest"
    notice_s: float = 0.0
    hand_over_s: float = HAND_OVER_S
    reading_s: float = 2.0
    record: bool = False

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"A pipeline has at least one stage, got {self.stages}.")
        if self.join not in ("random", "smallest"):
            raise ValueError(f'join is "random" or "smallest", got {self.join!r}.')
        if self.download_s < 0 or self.notice_s < 0 or self.reading_s <= 0:
            raise ValueError("download_s and notice_s cannot be negative and reading_s must be positive.")


@dataclass(frozen=True, slots=True)
class AllocationResult:
    """Outcome of one run.

    Args:
        percent: work done as % of the best possible.
        ceiling_percent: work of the ceiling as % of the best possible.
        moves: workers that changed their stage.
        stalled_percent: share of the time in which some stage had no worker although there were enough machines.
        timeline: (seconds, machines, serving workers of the weakest stage, best possible) if it was recorded.
    """

    percent: float
    ceiling_percent: float
    moves: int
    stalled_percent: float
    timeline: tuple[tuple[float, int, int, int], ...] = ()


def simulate_allocation(
    trace: ChurnTrace, settings: AllocationSettings, policy: RebalancingPolicy | None, seed: int
) -> AllocationResult:
    """Run a trace under a policy (None never moves anybody); the seed draws the victims and the random joins."""
    return _Run(trace, settings, policy, seed).result()


class _Run:
    def __init__(
        self, trace: ChurnTrace, settings: AllocationSettings, policy: RebalancingPolicy | None, seed: int
    ) -> None:
        self.trace, self.settings, self.policy = trace, settings, policy
        self.loop = EventLoop()
        self.generator = random.Random(seed)
        self.loads: dict[str, WorkerLoad] = {}
        self.names: list[str] = []
        self.serving = [0] * settings.stages
        self.planned = [0] * settings.stages
        self.holding = 0
        self.handed_over: set[str] = set()
        self.created = self.moves = 0
        self.done = self.best = self.ceiling = self.stalled = self.last = 0.0
        self.looks: set[float] = set()
        self.timeline: list[tuple[float, int, int, int]] = []

    def result(self) -> AllocationResult:
        for _ in range(self.trace.initial):
            self._join(holds_state=True)
        for time, change in self.trace.changes:
            if change > 0:
                self.loop.at(time, self._come, change)
            else:
                self.loop.at(time - self.settings.notice_s, self._notice, -change, time)
        if self.policy is not None:
            self._look_periodically()
        self.loop.run(self.trace.end_s)
        self._account()
        best = self.best or math.nan
        return AllocationResult(
            percent=100.0 * self.done / best,
            ceiling_percent=100.0 * self.ceiling / best,
            moves=self.moves,
            stalled_percent=100.0 * self.stalled / self.trace.end_s,
            timeline=tuple(self.timeline),
        )

    def _account(self) -> None:
        """Add up the interval since the last event, during which nothing changed."""
        stages = self.settings.stages
        seconds = self.loop.now - self.last
        self.last = self.loop.now
        best = len(self.names) // stages
        weakest = min(self.serving)
        self.done += min(weakest, best) * seconds
        self.best += best * seconds
        self.ceiling += min(self.holding // stages, best) * seconds
        if best and not weakest:
            self.stalled += seconds
        if self.settings.record and seconds > 0:
            self.timeline.append((self.last - seconds, len(self.names), weakest, best))

    def _come(self, number: int) -> None:
        self._account()
        for _ in range(number):
            self._join(holds_state=False)
        self._look_soon()

    def _join(self, *, holds_state: bool) -> None:
        self.created += 1
        name = f"w{self.created}"
        if self.settings.join == "random":
            stage = self.generator.randrange(self.settings.stages)
        elif self.policy is None:
            stage = min(range(self.settings.stages), key=lambda k: (self.planned[k], self.serving[k], k))
        else:
            stage = assign_stage(self._reading())
        self.names.append(name)
        self.planned[stage] += 1
        self.loads[name] = WorkerLoad(name, stage, joining=True)
        if holds_state or not self.settings.download_s:
            self._ready(name, stage)
        else:
            self.loop.after(self.settings.download_s, self._ready, name, stage)

    def _notice(self, number: int, at: float) -> None:
        """The market takes machines back, drawn uniformly from all; they serve until then."""
        leaving = [name for name in self.names if not self.loads[name].leaving]
        for name in self.generator.sample(leaving, min(number, len(leaving))):
            load = self.loads[name]
            self.loads[name] = WorkerLoad(
                name, load.stage, moving_to=load.moving_to, joining=load.joining, leaving=True
            )
            self.planned[load.destination] -= 1
            if self.settings.notice_s:
                self.loop.at(max(self.loop.now, at - self.settings.hand_over_s), self._hand_over, name)
                self.loop.at(at, self._lose, name)
            else:
                self._lose(name)
        self._look_soon()

    def _lose(self, name: str) -> None:
        self._account()
        load = self.loads.pop(name)
        self.names.remove(name)
        if not load.joining:
            if name not in self.handed_over:
                self.serving[load.stage] -= 1
            self.holding -= 1
        self._look_soon()

    def _hand_over(self, name: str) -> None:
        """A worker whose machine will be lost leaves the swarm."""
        if not self.loads[name].joining:
            self._account()
            self.serving[self.loads[name].stage] -= 1
            self.handed_over.add(name)

    def _ready(self, name: str, stage: int) -> None:
        """A download has ended: the worker serves the stage now."""
        load = self.loads.get(name)
        if load is None or load.destination != stage or name in self.handed_over:
            return
        self._account()
        if load.joining:
            self.holding += 1
        else:
            self.serving[load.stage] -= 1
            self.moves += 1
        self.serving[stage] += 1
        self.loads[name] = WorkerLoad(name, stage, leaving=load.leaving)

    def _reading(self) -> SwarmLoad:
        return SwarmLoad(self.settings.stages, tuple(self.loads.values()))

    def _look_soon(self) -> None:
        """Take two readings, on a grid, after machines came or went: more would show nothing new."""
        if self.policy is not None and self.policy.period_s > 0:
            step = self.settings.reading_s
            first = (math.floor(self.loop.now / step) + 1) * step
            self._look_at(first)
            self._look_at(first + step)

    def _look_periodically(self) -> None:
        assert self.policy is not None
        self._look_at(self.loop.now)
        self.loop.after(self.policy.period_s, self._look_periodically)

    def _look_at(self, time: float) -> None:
        if time not in self.looks:
            self.looks.add(time)
            self.loop.at(time, self._look, time)

    def _look(self, time: float) -> None:
        self.looks.discard(time)
        assert self.policy is not None
        for move in self.policy.decide(self.loop.now, self._reading()):
            load = self.loads[move.peer]
            self.planned[load.destination] -= 1
            self.planned[move.target] += 1
            self.loads[move.peer] = WorkerLoad(move.peer, load.stage, moving_to=move.target)
            self.loop.after(self.settings.download_s, self._ready, move.peer, move.target)
