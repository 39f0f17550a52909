"""Reads the stages' loads, tells them to the DHT, and lets a policy decide who moves.

A reading is what every worker says of its compute thread (``stats``): for how long it computed since the last reading,
and how much computing waits for it. With the service times that the trainer measures it makes a
:class:`~lightning_swarm.policies.utilization.SwarmLoad`, which is all that the policy gets to know.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from lightning_swarm.policies.rebalancing import Rebalancer, RebalancingPolicy
from lightning_swarm.policies.utilization import SwarmLoad, WorkerLoad
from lightning_swarm.swarm.calls import LoadRecord, StageLoad, WorkerStats
from lightning_swarm.swarm.errors import NodeClosed, SwarmError
from lightning_swarm.swarm.node import Node
from lightning_swarm.trainer.moves import Moves
from lightning_swarm.trainer.roster import Worker

log = logging.getLogger(__name__)

_STATS_DEADLINE_S = 2.0
_READINGS_A_PERIOD = 4
_LONGEST_BETWEEN_READINGS_S = 2.0
_SHORTEST_LIFETIME_S = 30.0


class Balancer:
    """Looks after the balance of a session's stages.

    Args:
        node: The trainer's peer.
        policy: Decides.
        moves: Who carries moves out under the present plan; ``None`` before there is one.
        costs: The stages' FLOPs, for what is not measured yet.
        position: The session's number and step, for the record.
    """

    def __init__(
        self,
        node: Node,
        policy: RebalancingPolicy,
        moves: Callable[[], Moves | None],
        costs: Callable[[], tuple[float, ...]],
        position: Callable[[], tuple[int, int]],
    ) -> None:
        self._node = node
        self.policy = policy
        self._moves = moves
        self._costs = costs
        self._position = position
        self._busy: dict[str, tuple[float, float]] = {}
        """When each worker was read last, and for how long it had computed by then."""
        self.every_s = min(policy.period_s / _READINGS_A_PERIOD, _LONGEST_BETWEEN_READINGS_S)

    async def run(self) -> None:
        """Read and decide until cancelled."""
        while True:
            await asyncio.sleep(self.every_s)
            moves = self._moves()
            if moves is None:
                continue
            try:
                await self._balance(moves)
            except NodeClosed:
                return

    async def _balance(self, moves: Moves) -> None:
        moves.relieve()
        load = await self.read(moves)
        stages = stage_loads(load)
        session, step = self._position()
        lifetime_s = max(3 * self.every_s, _SHORTEST_LIFETIME_S)
        await self._node.directory.announce("load", LoadRecord(session, step, stages), lifetime_s)
        if isinstance(self.policy, Rebalancer) and moves.roster.download_s is not None:
            self.policy.download_s = moves.roster.download_s
        for move in self.policy.decide(time.monotonic(), load):
            seen = "; ".join(f"stage {stage}: {of_stage}" for stage, of_stage in enumerate(stages))
            log.info("Rebalancing: %s. Loads: %s", move, seen)
            if not await moves.order(move):
                log.info("Worker %s does not move: it cannot, or its stage needs it now.", move.peer[-6:])

    async def read(self, moves: Moves) -> SwarmLoad:
        """A reading of all workers."""
        workers = sorted(moves.roster.workers.values(), key=lambda w: w.peer)
        loads = await asyncio.gather(*(self._read(worker, moves) for worker in workers))
        self._busy = {worker.peer: self._busy[worker.peer] for worker in workers if worker.peer in self._busy}
        return SwarmLoad(moves.roster.stages, tuple(loads), self._costs())

    async def _read(self, worker: Worker, moves: Moves) -> WorkerLoad:
        busy_share, queue_s = None, 0.0
        stage, moving_to, ready = worker.stage, worker.moving_to, worker.ready
        try:
            header, _ = await self._node.call(worker.peer, "stats", {}, deadline_s=_STATS_DEADLINE_S)
            stats, now = WorkerStats.from_dict(header), time.monotonic()
            before_s, before_busy_s = self._busy.get(worker.peer, (now, 0.0))
            if now > before_s:
                busy_share = min(max((stats.busy_s - before_busy_s) / (now - before_s), 0.0), 1.0)
            self._busy[worker.peer] = now, stats.busy_s
            queue_s = stats.queue_s
        except NodeClosed as error:
            if error.peer is None:
                raise
        except SwarmError as error:
            log.debug("No load of worker %s: %s", worker.peer[-6:], error)
        return WorkerLoad(
            worker.peer,
            stage,
            service_s=moves.roster.service_s(worker.peer),
            busy_share=busy_share,
            queue_s=queue_s,
            moving_to=moving_to,
            joining=not ready,
            leaving=worker.leaving,
            allowed=moves.allowed(worker),
        )


def stage_loads(load: SwarmLoad) -> tuple[StageLoad, ...]:
    """The loads of the stages in a reading."""
    found = []
    for stage in range(load.stages):
        workers = [worker for worker in load.workers if worker.stage == stage and not worker.joining]
        count = max(1, len(workers))
        busy = [worker.busy_share for worker in workers if worker.busy_share is not None]
        found.append(
            StageLoad(
                workers=len(workers),
                busy_share=sum(busy) / max(1, len(busy)),
                queue_s=sum(worker.queue_s for worker in workers) / count,
                microbatches_per_s=sum(1.0 / worker.service_s for worker in workers if worker.service_s),
            )
        )
    return tuple(found)
