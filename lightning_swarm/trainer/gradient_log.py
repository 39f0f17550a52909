"""The gradients that each stage has made its steps with since the trainer's copy of the model.

Applied to that copy they give the stage as it is now, without any step being done again. After each commit one worker
of every stage keeps its summed gradients until the next one, and the trainer fetches them while the next step is under
way. A worker that takes over a stage without workers gets the copy and the log, and applies it as it would have applied
the commits themselves.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from lightning_swarm.swarm.calls import LoggedSums, LogRequest
from lightning_swarm.swarm.errors import ProtocolError, SwarmError
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import Entry
from lightning_swarm.swarm.parts import take

log = logging.getLogger(__name__)

_MOST_FAILURES = 2


class GradientLog:
    """See the module's docstring. Lives on the node's event loop.

    Args:
        node: The trainer's peer.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._steps: dict[tuple[int, int], Entry] = {}
        """By stage and step, as the worker gave it: :class:`~lightning_swarm.swarm.calls.LoggedSums`."""
        self._fetches: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._failures: Counter[int] = Counter()
        self.has_gaps = False
        """Whether something is missing, so that only a younger copy of the model helps."""

    def fetch(self, session: int, plan_version: int, step: int, keepers: Mapping[int, str]) -> None:
        """Begin to fetch what the stages have made a step with, each from one of its workers."""
        for stage, keeper in keepers.items():
            request = LogRequest(session, plan_version, stage, step)
            self._fetches[stage, step] = asyncio.create_task(self._fetch(request, keeper), name="gradient log")

    async def settle(self) -> None:
        """Until all is here that will come."""
        if self._fetches:
            await asyncio.wait(self._fetches.values())

    def covers(self, stage: int, steps: range) -> bool:
        """Whether all these steps of a stage are here."""
        return all((stage, step) in self._steps for step in steps)

    def may_cover(self, stage: int, steps: range) -> bool:
        """Whether they are, or are under way."""
        return all((stage, step) in self._steps or (stage, step) in self._fetches for step in steps)

    def step(self, stage: int, step: int) -> Entry | None:
        """What a stage has made a step with, if it is here."""
        return self._steps.get((stage, step))

    def forget(self, version: int) -> None:
        """The trainer's copy of the model is that of step ``version`` now."""
        self._steps = {key: step for key, step in self._steps.items() if key[1] >= version}
        self.has_gaps = False

    def failed(self, stage: int) -> None:
        """A worker could not take its stage over from the log; after the second time it counts as of no use."""
        self._failures[stage] += 1
        if self._failures[stage] >= _MOST_FAILURES:
            self._steps = {key: step for key, step in self._steps.items() if key[0] != stage}
            self.has_gaps = True

    def clear(self) -> None:
        """The stages are others, or go back."""
        for task in self._fetches.values():
            task.cancel()
        self._fetches.clear()
        self._steps.clear()
        self._failures.clear()
        self.has_gaps = False

    async def _fetch(self, request: LogRequest, keeper: str) -> None:
        key = request.stage, request.step
        try:
            header, tensors = await take(self._node, keeper, "log", request.to_dict(), computes=False)
            if LoggedSums.from_dict(header).commit.step != request.step:
                raise ProtocolError("It is of another step.", keeper)
            self._steps[key] = Entry(tuple(tensors), header)
        except SwarmError as error:
            log.info("The gradients of stage %d in step %d are not logged: %s", *key, error)
            self.has_gaps = True
        finally:
            self._fetches.pop(key, None)
