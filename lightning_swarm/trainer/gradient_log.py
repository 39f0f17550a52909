"""The gradients that each stage has made its steps with since the trainer's copy of the model.

Applied to that copy they give the stage as it is now, without any step being done again. After each commit one worker
of every stage keeps its summed gradients until the next one, and the trainer fetches them while the next step is under
way. A worker that takes over a stage without workers gets the copy and the log, and applies it as it would have applied
the commits themselves.
"""

import asyncio
import logging
from collections.abc import Mapping

from lightning_swarm.swarm.calls import log_key
from lightning_swarm.swarm.errors import SwarmError
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import Entry, FetchRequest, fetched
from lightning_swarm.swarm.watched import call_watched

log = logging.getLogger(__name__)

_DEADLINE_S = 600.0


class GradientLog:
    """See the module's docstring. Lives on the node's event loop.

    Args:
        node: The trainer's peer.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._entries: dict[tuple[int, int], Entry] = {}
        """By stage and step."""
        self._fetches: dict[tuple[int, int], asyncio.Task[None]] = {}

    def fetch(self, step: int, keepers: Mapping[int, str]) -> None:
        """Begin to fetch what the stages have made a step with, each from one of its workers."""
        for stage, keeper in keepers.items():
            self._fetches[stage, step] = asyncio.create_task(self._fetch(stage, step, keeper), name="gradient log")

    async def settle(self) -> None:
        """Until all is here that will come."""
        if self._fetches:
            await asyncio.wait(self._fetches.values())

    def covers(self, stage: int, steps: range) -> bool:
        """Whether all steps of a stage are here."""
        return all((stage, step) in self._entries for step in steps)

    def may_cover(self, stage: int, steps: range) -> bool:
        """Whether they are, or are under way."""
        return all((stage, step) in self._entries or (stage, step) in self._fetches for step in steps)

    def entry(self, stage: int, step: int) -> Entry | None:
        """What a stage has made a step with, if it is here: :class:`~lightning_swarm.swarm.calls.LoggedSums`."""
        return self._entries.get((stage, step))

    def forget(self, version: int) -> None:
        """The trainer's copy of the model is that of step ``version`` now."""
        self._entries = {key: entry for key, entry in self._entries.items() if key[1] >= version}

    def drop(self, stage: int) -> None:
        """The gradients of a stage are of no use."""
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] != stage}

    def clear(self) -> None:
        """The stages are others, or go back."""
        for task in self._fetches.values():
            task.cancel()
        self._fetches.clear()
        self._entries.clear()

    async def _fetch(self, stage: int, step: int, keeper: str) -> None:
        request = FetchRequest(log_key(step)).to_dict()
        try:
            header, tensors = await call_watched(self._node, keeper, "fetch", request, deadline_s=_DEADLINE_S)
            self._entries[stage, step] = fetched(header, tensors)
        except SwarmError as error:
            log.info("The gradients of stage %d in step %d are not logged: %s", stage, step, error)
        finally:
            self._fetches.pop((stage, step), None)
