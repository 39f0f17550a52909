"""What the workers of a run still hold when its trainer is started again.

The trainer asks every worker that it hears of, which makes it their trainer. If the one before it died in the middle of
a commit, some are at step ``t + 1`` and others at ``t`` with their gradients reduced: the former tell what they were
told, and the latter do it too, so the step is not lost. Then the newest step of which every stage has a holder is
taken: the trainer fetches one state a stage, and all who hold that step keep theirs.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_swarm.swarm.calls import CommitRequest, Holding, StateRequest, WorkerRecord
from lightning_swarm.swarm.errors import CallerError, PeerBusy, SwarmError
from lightning_swarm.swarm.loop import together
from lightning_swarm.swarm.node import Node
from lightning_swarm.trainer.position import StepRecord
from lightning_swarm.worker.state import StageState, fetch_state

log = logging.getLogger(__name__)

_ASK_DEADLINE_S = 30.0
_COMMIT_DEADLINE_S = 600.0
_AGAIN_AFTER_S = 0.3

Holdings = dict[str, Holding]
"""By worker."""


@dataclass(frozen=True)
class Kept:
    """Workers that hold the state which training goes on from."""

    step: int
    fingerprint: str
    """Of their plan."""
    stages: dict[str, int]
    """By worker."""


@dataclass(frozen=True)
class Recovered:
    """All that is needed to go on from what the workers hold."""

    step: int
    states: list[StageState]
    record: StepRecord
    """Of the step before it."""
    kept: Kept


class Unrecoverable(SwarmError):
    """Workers hold something of the run, but it is not whole; says what is missing."""


class Recovery:
    """One attempt to find what the workers of a run hold.

    Args:
        node: The trainer's peer.
        seen: Workers that have asked for a trainer, besides those in the DHT.
        wait_s: How long to wait for workers of stages that nobody holds.
    """

    def __init__(self, node: Node, seen: Callable[[], frozenset[str]], wait_s: float) -> None:
        self._node = node
        self._seen = seen
        self._wait_s = wait_s
        self._silent: set[str] = set()
        self._holdings: Holdings = {}

    @property
    def found(self) -> bool:
        """Whether any worker holds anything."""
        return bool(self._holdings)

    async def find(self) -> int | None:
        """The newest step that all stages together have, after a commit that was under way has been finished.

        Returns:
            ``None`` if no worker holds anything.

        Raises:
            Unrecoverable: Not every stage has a holder.
            CallerError: The run's trainer lives.
        """
        answers = await self._ask_all()
        if not answers:
            return None
        plan = _newest_of(answers).fingerprint
        self._holdings = {peer: holding for peer, holding in answers.items() if holding.fingerprint == plan}
        await self._finish_commit()
        self._step = _newest(self._holdings)
        if self._step is None:
            raise Unrecoverable(_missing(self._holdings))
        return self._step

    async def fetch(self) -> Recovered:
        """The states of that step.

        Raises:
            SwarmError: Nobody could give a stage's state, or nobody knows where the data stood.
        """
        step = self._step
        assert step is not None
        commits = [_commit_of(holding) for holding in self._holdings.values()]
        last = next((c for c in commits if c is not None and c.step == step - 1 and c.position), None)
        if last is None:
            raise Unrecoverable(
                f"Workers hold the weights of step {step}, but none was told where the data stood then: they are told "
                'when training begins with trainer.fit(..., ckpt_path="swarm") the first time, too.'
            )
        holders = {peer: holding for peer, holding in self._holdings.items() if holding.step == step}
        stages = next(iter(holders.values())).stages
        states = await together([self._state(stage, holders) for stage in range(stages)])
        kept = Kept(
            step,
            next(iter(holders.values())).fingerprint,
            {peer: holding.stage for peer, holding in holders.items()},
        )
        return Recovered(step, states, StepRecord(last.position, last.effects), kept)

    async def _ask_all(self) -> Holdings:
        """Ask workers until every stage has a holder, or nobody holds anything, or for as long as may be.

        All of a run's workers announce themselves under one key, so who finds one in the DHT finds them all.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_s
        answers: Holdings = {}
        while True:
            records = await self._node.directory.read("worker", WorkerRecord)
            known = (records.keys() | self._seen()) - answers.keys() - self._silent
            await asyncio.gather(*(self._ask(worker, answers) for worker in known))
            holdings = {worker: holding for worker, holding in answers.items() if holding.stage >= 0}
            nothing = bool(answers) and not holdings
            if nothing or _covers_all_stages(holdings) or loop.time() >= until:
                return holdings
            await asyncio.sleep(_AGAIN_AFTER_S)

    async def _ask(self, worker: str, answers: Holdings) -> None:
        try:
            header, _ = await self._node.call(worker, "hold", {}, deadline_s=_ASK_DEADLINE_S)
            answers[worker] = Holding.from_dict(header)
        except CallerError:
            raise
        except PeerBusy:
            return  # It is between two calls of its script; it may be asked again.
        except SwarmError as error:
            log.info("Worker %s does not say what it holds: %s", worker[-6:], error)
            self._silent.add(worker)

    async def _finish_commit(self) -> None:
        """Let those who have reduced the last step, but not heard of its commit, hear of it."""
        newest = _newest_of(self._holdings)
        commit = newest.commit
        if commit is None or CommitRequest.from_dict(commit).step != newest.step - 1:
            return
        behind = {p: h for p, h in self._holdings.items() if h.step == newest.step - 1}
        ahead = {h.stage for h in self._holdings.values() if h.step == newest.step}
        # Stages that nobody can bring on leave the others where they are.
        lacking = {p: h for p, h in behind.items() if h.stage not in ahead}
        for peers in (lacking, {p: h for p, h in behind.items() if p not in lacking}):
            await asyncio.gather(*(self._commit(peer, commit) for peer in peers))
            if len({h.stage for h in self._holdings.values() if h.step == newest.step}) < newest.stages:
                return

    async def _commit(self, worker: str, commit: dict[str, Any]) -> None:
        request = {**commit, "session": self._holdings[worker].session}
        try:
            await self._node.call(worker, "commit", request, deadline_s=_COMMIT_DEADLINE_S)
        except SwarmError as error:
            log.info("Worker %s cannot finish step %s: %s", worker[-6:], commit["step"], error)
            return
        self._holdings[worker] = replace(self._holdings[worker], step=commit["step"] + 1, commit=commit)

    async def _state(self, stage: int, holders: Mapping[str, Holding]) -> StageState:
        problems = []
        for peer, holding in holders.items():
            if holding.stage != stage:
                continue
            request = StateRequest(holding.session, holding.plan_version, stage)
            try:
                state = await fetch_state(self._node, peer, request)
                if state.version == holding.step:
                    return state
                problems.append(f"{peer[-6:]}: it is at step {state.version} by now")
            except SwarmError as error:
                problems.append(f"{peer[-6:]}: {error}")
        raise Unrecoverable(f"Nobody could give the state of stage {stage}: {'; '.join(problems)}")


def _commit_of(holding: Holding) -> CommitRequest | None:
    return None if holding.commit is None else CommitRequest.from_dict(holding.commit)


def _newest_of(holdings: Holdings) -> Holding:
    return max(holdings.values(), key=lambda holding: holding.step)


def _covers_all_stages(holdings: Holdings) -> bool:
    """Whether every stage has a holder of the newest step, or of the one before it, whose commit may be under way."""
    if not holdings:
        return False
    newest = _newest_of(holdings)
    near = {h.stage for h in holdings.values() if h.fingerprint == newest.fingerprint and h.step >= newest.step - 1}
    return near == set(range(newest.stages))


def _newest(holdings: Holdings) -> int | None:
    """The newest step of which every stage has a holder."""
    stages = set(range(_newest_of(holdings).stages))
    for step in sorted({holding.step for holding in holdings.values()}, reverse=True):
        if {holding.stage for holding in holdings.values() if holding.step == step} == stages:
            return step
    return None


def _missing(holdings: Holdings) -> str:
    steps: dict[int, set[int]] = {}
    for holding in holdings.values():
        steps.setdefault(holding.step, set()).add(holding.stage)
    held = "; ".join(f"step {step}: {sorted(stages)}" for step, stages in sorted(steps.items()))
    return f"The workers do not hold all {_newest_of(holdings).stages} stages of any step. They hold, by step: {held}."
