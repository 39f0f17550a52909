"""A worker's life: ask the trainer for a stage, fetch its state, serve until told otherwise, ask again.

The compute thread is the thread that calls :meth:`Member.serve` (a worker's main thread, inside ``trainer.fit``); the
coroutine that lives this life runs on the node's event loop beside it.

A worker may be moved to another stage. It goes on serving its own while it fetches the state of the other one and
receives that stage's steps (:mod:`~lightning_swarm.worker.incoming`). It says when it is ready, and at the beginning of
a step the trainer lets it switch: it serves nothing for as long as it takes to build the new stage and to apply the
steps that came after the state, which needs nothing from the network.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_swarm.swarm.calls import (
    Assignment,
    Context,
    FinishRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LogRequest,
    MoveRequest,
    PreparedRequest,
    ReadyRequest,
    StateRequest,
)
from lightning_swarm.swarm.errors import (
    NOT_NOW,
    CallerError,
    DeadlineExceeded,
    PeerBusy,
    PeerStale,
    SwarmError,
)
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.parts import take
from lightning_swarm.swarm.switchboard import Switchboard
from lightning_swarm.swarm.watched import is_stuck
from lightning_swarm.worker.executor import Executor, Priority
from lightning_swarm.worker.incoming import Incoming, Shapes
from lightning_swarm.worker.service import Commit, Reply, WorkerService, logged_commit
from lightning_swarm.worker.stage_server import StageServer
from lightning_swarm.worker.state import StageState, StateRejected, fetch_state

log = logging.getLogger(__name__)

_ASK_DEADLINE_S = 30.0
_PING_EVERY_S = 5.0
_AGAIN_AFTER_S = 0.5
_MOST_TELLS = 5
_LINGER_S = 1.0
_CALLS_OF_TRAINER = ("process", "reduce", "commit", "move", "finish")


@dataclass(frozen=True)
class Hosted:
    """What Lightning has set up in this process for the worker to serve with.

    Args:
        module: The user's LightningModule.
        device: Where to compute.
        optimizer: The user's optimizer over all of the module's parameters; ``None`` outside ``fit``.
        mirror: Applies a task's context to the module and its Lightning trainer.
        step_context: The precision's context manager for a step, by step name.
        request: What to ask the trainer with.
    """

    module: nn.Module
    device: torch.device
    optimizer: Optimizer | None
    mirror: Callable[[Context], None]
    step_context: Callable[[str], contextlib.AbstractContextManager[Any]]
    request: JoinRequest


class TrainerGone(SwarmError):
    """The trainer has not been reachable for ``trainer_timeout``."""


class Member:
    """One session of a worker.

    Args:
        node: This peer.
        hosted: What Lightning has set up.
        switchboard: Its calls.
        trainer: The trainer's peer id.
        find_trainer: Asks the DHT and other peers for a trainer that is not the given one.
        trainer_timeout_s: How long to keep the state of a run whose trainer is gone.
    """

    def __init__(
        self,
        node: Node,
        switchboard: Switchboard,
        hosted: Hosted,
        trainer: str,
        find_trainer: Callable[[str], Awaitable[str | None]],
        trainer_timeout_s: float,
    ) -> None:
        self._node = node
        self._switchboard = switchboard
        self._hosted = hosted
        self.trainer = trainer
        self._find_trainer = find_trainer
        self._trainer_timeout_s = trainer_timeout_s
        self._executor = Executor()
        self.service = WorkerService(node, self._executor)
        self._names = _names_by_group(hosted.module, hosted.optimizer)
        self._shapes = Shapes.of(hosted.module)
        self._taking: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._leaving = False
        self._claim = asyncio.Lock()

    def serve(self) -> FinishRequest:
        """Work on the calling thread until the trainer ends the session.

        Returns:
            How it ended.

        Raises:
            MisconfigurationException: The trainer refuses this worker; says what differs.
            TrainerGone: Nobody to work for.
            NodeClosed: This worker's own node is of no use any more; a new process gets a new one.
        """
        life = self._node.spawn(self._node.while_alive(self._live()), "membership")
        life.add_done_callback(lambda _: self._executor.stop())
        try:
            self._executor.run()
        finally:
            life.cancel()
        try:
            return life.result()
        finally:
            self._switchboard.unplug()
            self.service.end()
            self.service.leave_module()

    async def leave_soon(self) -> None:
        """Tell the trainer that this worker will leave; it serves until :meth:`drain`."""
        try:
            header = LeaveRequest(soon=True).to_dict()
            await self._node.call(self.trainer, "leave", header, deadline_s=_PING_EVERY_S)
        except SwarmError as error:
            log.info("The trainer has not heard that this worker leaves: %s", error)

    def drain(self) -> None:
        """Leave: tell the trainer, then end the session."""
        self._leaving = True

        async def leave() -> None:
            with contextlib.suppress(SwarmError):
                await self._node.call(self.trainer, "leave", LeaveRequest().to_dict(), deadline_s=_PING_EVERY_S)
            # Others may be fetching from us; a fetch that breaks off is blamed on somebody.
            await asyncio.sleep(_LINGER_S)
            finished = self.service.finished
            if finished is not None and not finished.done():
                finished.set_result(FinishRequest(self._hosted.request.session, False, True, None))

        self._node.spawn(leave(), "leaving")

    async def _live(self) -> FinishRequest:
        handlers: dict[str, Any] = {**self.service.handlers(), "move": self._move, "finish": self._finish}
        handlers.update({call: self._of_trainer(handlers[call]) for call in _CALLS_OF_TRAINER})
        self._switchboard.plug({**handlers, "hold": self._hold})
        loop = asyncio.get_running_loop()
        while True:
            await self._until_free()
            asked_s = loop.time()
            reply = await self._ask()
            if reply is None or self._leaving:
                return FinishRequest(self._hosted.request.session, False, True, None)
            if reply.action == "wait":
                # Mostly the trainer has waited before it says so, but not while nobody could give us a stage's state.
                await asyncio.sleep(asked_s + _AGAIN_AFTER_S - loop.time())
                continue
            if reply.action in ("skip", "end"):
                return FinishRequest(self._hosted.request.session, False, reply.action == "end", None)
            assert reply.assignment is not None
            self.service.finished = loop.create_future()
            self._taking = asyncio.create_task(self._take(Assignment.from_dict(reply.assignment)))
            try:
                finish = await self._until_finished()
            finally:
                self._taking.cancel()
                self._stay()
            if not finish.reassign:
                return finish

    async def _until_free(self) -> None:
        """Until the compute thread has ended what this worker was given up for.

        Where it never does (a driver that hangs, a deadlock in the user's code), the process cannot even end as others
        do, and ends at once, for another one to be started.
        """
        while (computing_s := self._executor.computing_s()) > _PING_EVERY_S:
            if self._executor.owns_process and is_stuck(computing_s, self._executor.usual_s):
                log.critical("The compute thread has got no further for %.0f s; this process ends.", computing_s)
                logging.shutdown()
                os._exit(NOT_NOW)
            await asyncio.sleep(_AGAIN_AFTER_S)

    def _of_trainer(self, handler: Callable[..., Awaitable[Reply]]) -> Callable[..., Awaitable[Reply]]:
        """A trainer that was given up may live still: it has no say any more."""

        async def handle(caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
            if caller != self.trainer:
                raise PeerStale(f"this worker works for trainer {self.trainer}")
            return await handler(caller, header, tensors)

        return handle

    async def _hold(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """A trainer that was started again asks what there is; it is this worker's trainer from now on."""
        # One at a time: the trainer would refuse some of very many pings, as if it were gone.
        async with self._claim:
            if caller != self.trainer and await self._answers(self.trainer):
                raise CallerError(
                    f"Run {self._node.run_id!r} has a trainer already, {self.trainer}, and it is alive. Stop it before "
                    "you start it again, or give the other run another run_id."
                )
            self._follow(caller)
        return (await self.service.holding()).to_dict(), []

    def _follow(self, trainer: str) -> None:
        """Work for this trainer from now on, beginning with asking it for work."""
        if trainer != self.trainer:
            log.warning("Trainer %s is gone; this worker works for %s now.", self.trainer[-6:], trainer[-6:])
        self.trainer = trainer
        self.service.pause()
        finished = self.service.finished
        if finished is not None and not finished.done():
            finished.set_result(FinishRequest(self._hosted.request.session, True, False, None))

    async def _answers(self, trainer: str) -> bool:
        try:
            await self._node.call(trainer, "ping", {}, deadline_s=_PING_EVERY_S)
        except PeerBusy:
            pass  # It says so itself.
        except SwarmError:
            return False
        return True

    async def _look_for_another(self) -> None:
        """Follow another trainer, if the run has one that answers."""
        found = await self._find_trainer(self.trainer)
        if found is not None and await self._answers(found):
            self._follow(found)

    async def _ask(self) -> JoinReply | None:
        """The trainer's answer; ``None`` if this worker leaves before there is one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._trainer_timeout_s
        while not self._leaving:
            trainer = self.trainer
            try:
                header, _ = await self._node.call(
                    trainer, "join", self._hosted.request.to_dict(), deadline_s=_ASK_DEADLINE_S
                )
                if trainer == self.trainer:
                    return JoinReply.from_dict(header)
            except CallerError as error:
                raise MisconfigurationException(str(error)) from error
            except SwarmError as error:
                if isinstance(error, DeadlineExceeded | PeerBusy) and await self._answers(trainer):
                    # It lets nobody in before the step under way has ended, however long that takes.
                    deadline = loop.time() + self._trainer_timeout_s
                elif loop.time() > deadline:
                    raise TrainerGone(
                        f"The trainer does not answer: {error} Nobody has started it again within "
                        f"{self._trainer_timeout_s:.0f} s (trainer_timeout).",
                        trainer,
                    ) from error
                else:
                    await self._look_for_another()
                await asyncio.sleep(_AGAIN_AFTER_S)
        return None

    async def _take(self, assignment: Assignment, incoming: Incoming | None = None) -> None:
        """Become a worker of the assigned stage; its state is there already if it was incoming, or is held."""
        hosted = self._hosted
        state = incoming.state if incoming is not None else None
        if self._node.peer_id in assignment.donors:
            state = await self.service.held_state(assignment)
        self.service.end()

        def enter() -> StageServer:
            self.service.leave_module()
            return StageServer(
                hosted.module,
                assignment,
                hosted.device,
                self._executor,
                self.service.outbox,
                self.service.fetch_from,
                hosted.mirror,
                hosted.step_context,
            )

        server = await self._executor.do(Priority.COMMIT, enter)
        if hosted.optimizer is not None:
            _narrow(hosted.optimizer, self._names, server.stage.owned_parameters())
        self.service.begin(server, hosted.optimizer, incoming)
        donor = self._node.peer_id
        if state is None:
            state, donor = await self._download(assignment)
        await self.service.load(state, partial(self._logged, donor, assignment))
        while True:
            version = server.version
            ready = ReadyRequest(assignment.session, assignment.plan_version, assignment.stage, version or 0)
            try:
                await self._node.call(self.trainer, "ready", ready.to_dict(), deadline_s=_ASK_DEADLINE_S)
                return
            except PeerStale:
                # A commit may have come while we asked; if none has, we are where the swarm is not.
                if server.version == version:
                    raise
            except (DeadlineExceeded, PeerBusy) as error:
                # It answers between two steps only, and over slow links the end of one takes long. Whether it lives is
                # for those to find out who wait for the session's end.
                log.info("The trainer has not yet heard that this worker is ready: %s", error)
                await asyncio.sleep(_AGAIN_AFTER_S)

    async def _finish(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """The session is over, or another stage awaits this worker."""
        request = FinishRequest.from_dict(header)
        if request.session != self._hosted.request.session:
            raise PeerStale(f"this worker is in session {self._hosted.request.session}")
        if self.service.finished is not None and not self.service.finished.done():
            self.service.finished.set_result(request)
        return {}, []

    async def _move(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Reply:
        """The trainer wants this worker at another stage."""
        request = MoveRequest.from_dict(header)
        service, incoming = self.service, self.service.incoming
        ours = service.server.assignment if service.server is not None else None
        if ours is None or (ours.session, ours.plan_version) != (request.session, request.plan_version):
            raise PeerStale("this worker serves no stage of that plan")
        if request.action == "prepare":
            if service.server is None or service.server.version != request.step or request.assignment is None:
                raise PeerStale(f"this worker is not at step {request.step}")
            self._stay()
            assignment = Assignment.from_dict(request.assignment)
            service.incoming = Incoming(assignment, self._shapes)
            self._preparing = asyncio.create_task(self._prepare(service.incoming))
        elif ours.stage != request.stage:
            if incoming is None or incoming.index != request.stage or not incoming.is_of(request.step):
                raise PeerStale(f"this worker does not hold stage {request.stage} of step {request.step}")
            log.info("Moving from stage %d to stage %d", ours.stage, request.stage)
            self._stay()
            service.end()
            self._taking = asyncio.create_task(self._take(incoming.assignment, incoming))
        return {}, []

    def _stay(self) -> None:
        """Let go of the stage that was to come."""
        self.service.incoming = None
        if self._preparing is not None:
            self._preparing.cancel()

    async def _prepare(self, incoming: Incoming) -> None:
        """Fetch the state of the stage to move to, and tell the trainer how that went."""
        problem = ""
        try:
            state, _ = await self._download(incoming.assignment)
            incoming.arrived(state)
        except Exception as error:  # To be out of memory is one.
            problem = f"{type(error).__name__}: {error}"
        assignment = incoming.assignment
        request = PreparedRequest(assignment.session, assignment.plan_version, assignment.stage, problem)
        for _ in range(_MOST_TELLS):
            try:
                await self._node.call(self.trainer, "prepared", request.to_dict(), deadline_s=_ASK_DEADLINE_S)
                return
            except PeerStale as error:
                # What was prepared goes with the next commit that does not concern it; a reduction may still do so.
                log.info("The move to stage %d is off: %s", assignment.stage, error)
                return
            except SwarmError as error:
                log.info("The trainer does not hear that stage %d is prepared: %s", assignment.stage, error)
                await asyncio.sleep(_AGAIN_AFTER_S)
        # It would be made up for commits that never end. If the trainer counts on it all the same, it joins again.
        if self.service.incoming is incoming:
            self.service.incoming = None

    async def _download(self, assignment: Assignment) -> tuple[StageState, str]:
        """The stage's state, and who gave it."""
        request = StateRequest(assignment.session, assignment.plan_version, assignment.stage)
        problems = []
        for donor in assignment.donors:
            if donor == self._node.peer_id:
                continue
            self.service.downloads += 1
            try:
                state = await fetch_state(self._node, donor, request)
                if not await asyncio.to_thread(state.is_finite):
                    raise StateRejected("it has parameters that are not finite")
                return state, donor
            except SwarmError as error:
                log.warning("No state of stage %d from %s: %s", assignment.stage, donor, error)
                problems.append(f"{donor}: {error}")
        raise SwarmError(f"Nobody could give the state of stage {assignment.stage}: {'; '.join(problems)}")

    async def _logged(self, donor: str, assignment: Assignment, step: int) -> Commit:
        """What the stage made a step with that the donor's state lacks."""
        request = LogRequest(assignment.session, assignment.plan_version, assignment.stage, step)
        return logged_commit(*await take(self._node, donor, "log", request.to_dict(), computes=False))

    async def _until_finished(self) -> FinishRequest:
        """Wait for the end of the session; look after the trainer when it is silent.

        A stage that could not be taken (no donor is left, the swarm went on without us) is a reason to ask for another.
        """
        finished = self.service.finished
        assert finished is not None
        loop = asyncio.get_running_loop()
        heard = loop.time()
        again = FinishRequest(self._hosted.request.session, True, False, None)
        while True:
            assert self._taking is not None
            taking = self._taking  # A move replaces it.
            await asyncio.wait(
                {finished, *({taking} if not taking.done() else ())},
                timeout=_PING_EVERY_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if finished.done():
                return finished.result()
            if taking.done():
                error = taking.exception()
                if isinstance(error, SwarmError):
                    log.warning("This worker could not take its stage and asks for another: %s", error)
                    await asyncio.sleep(_AGAIN_AFTER_S)
                    return again
                taking.result()
            heard = max(heard, self.service.last_call_s)
            if loop.time() - heard < _PING_EVERY_S:
                continue
            try:
                session = {"session": self._hosted.request.session}
                answer, _ = await self._node.call(self.trainer, "ping", session, deadline_s=_PING_EVERY_S)
                heard = loop.time()
                if not answer["member"]:
                    log.warning("The trainer does not count on this worker any more; it joins again.")
                    return again
            except SwarmError as error:
                if loop.time() - heard > self._trainer_timeout_s:
                    raise TrainerGone(
                        f"The trainer has been silent for {loop.time() - heard:.0f} s (trainer_timeout is "
                        f"{self._trainer_timeout_s:.0f} s), and nobody has started it again.",
                        self.trainer,
                    ) from error
                await self._look_for_another()


def _names_by_group(module: nn.Module, optimizer: Optimizer | None) -> list[list[str]]:
    """The parameters' names in each group of the optimizer, before any of them becomes a ghost."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = optimizer.param_groups if optimizer is not None else []
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def _narrow(optimizer: Optimizer, names: list[list[str]], owned: dict[str, nn.Parameter]) -> None:
    """Leave only this stage's parameters in the optimizer's groups, and no state."""
    optimizer.state.clear()
    for group, group_names in zip(optimizer.param_groups, names):
        group["params"] = [owned[name] for name in group_names if name in owned]
