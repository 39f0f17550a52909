"""Faults on schedule: what happens to a worker, and at which moment of the protocol.

Every call to a worker passes :meth:`Faults.around`, which knows from the call and its header which moment it is. So a
fault strikes at the same point of the protocol in every run, whatever the machine's speed. A fault harms the worker
that it strikes and nobody else: what the swarm makes of it is for the swarm to show.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from lightning_swarm.swarm.errors import PeerBusy, SwarmError
from lightning_swarm.swarm.loop import unheard
from lightning_swarm.swarm.parts import is_part
from lightning_swarm.worker.executor import PROCESS_GENERATORS, Priority

if TYPE_CHECKING:
    from lightning_swarm.strategy import SwarmStrategy
    from lightning_swarm.worker.peer import WorkerPeer

Kind = Literal["kill", "hang", "slow", "cut", "corrupt", "nan", "duplicate", "refuse"]
Moment = Literal[
    "forward",
    "forwarded",
    "fetched",
    "accumulated",
    "reduce",
    "reducing",
    "reduced",
    "commit",
    "committed",
    "state",
    "snapshot",
    "drain",
]

Reply = tuple[dict[str, Any], Sequence[Tensor]]
Handle = Callable[[], Awaitable[Reply]]

_ARRIVALS: dict[str, Moment] = {"process": "forward", "reduce": "reduce", "commit": "commit", "finish": "drain"}
_ENDS: dict[str, Moment] = {"process": "accumulated", "reduce": "reduced", "commit": "committed"}
_WITH_TENSORS = ("fetched", "reducing", "state", "snapshot")
_BETWEEN_WORKERS = ("fetched", "reducing")


@dataclass(frozen=True)
class Fault:
    """One fault; it strikes once, at the first call that fits.

    Args:
        kind: ``"kill"``: the worker vanishes without a word. ``"hang"``: it stands still, answers nothing and asks
            nothing. ``"slow"``: its compute thread is occupied for ``seconds``. ``"cut"``: the worker that fetches gets
            nothing from this one any more, while all other links work. ``"corrupt"``: the tensors that it gives are of
            other shapes and dtypes. ``"nan"``: they hold NaN. ``"duplicate"``: the call arrives twice. ``"refuse"``:
            the worker says that it is busy.
        moment: ``"forward"``: a microbatch arrives. ``"forwarded"``: its activation, or the last stage's gradient, is
            in the outbox. ``"fetched"``: another worker fetches one of them. ``"accumulated"``: the microbatch is done,
            the answer not sent. ``"reduce"``, ``"reduced"``: the first phase of the step's end arrives, and is done.
            ``"reducing"``: another worker fetches gradients. ``"commit"``, ``"committed"``: the second phase arrives,
            and is done. ``"state"``, ``"snapshot"``: another worker, or the trainer, fetches the stage's state.
            ``"drain"``: the worker is told to leave its stage.
        stage: At which stage; any by default.
        step: In which step; any by default.
        microbatch: Of which of the step's microbatches, from 0; any by default.
        seconds: How long ``"slow"`` takes.

    Raises:
        ValueError: There is no such kind or moment, or the kind makes no sense at the moment.
    """

    kind: Kind
    moment: Moment
    stage: int | None = None
    step: int | None = None
    microbatch: int | None = None
    seconds: float = 5.0

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, get_args(Kind)), ("moment", self.moment, get_args(Moment))):
            if value not in known:
                raise ValueError(f"Fault({name}={value!r}) is unknown; there are: {', '.join(known)}.")
        needed = {"corrupt": _WITH_TENSORS, "nan": _WITH_TENSORS, "cut": _BETWEEN_WORKERS}.get(self.kind)
        if needed is not None and self.moment not in needed:
            raise ValueError(
                f"Fault({self.kind!r}, {self.moment!r}) makes no sense: {self.kind!r} goes with {', '.join(needed)}."
            )


@dataclass(frozen=True)
class _Scene:
    """Where and when a call takes place."""

    peer: str
    caller: str
    stage: int | None
    step: int | None
    microbatch: int | None

    def fits(self, fault: Fault) -> bool:
        return all(
            wanted is None or wanted == is_
            for wanted, is_ in (
                (fault.stage, self.stage),
                (fault.step, self.step),
                (fault.microbatch, self.microbatch),
            )
        )


class Faults:
    """A schedule of faults.

    Args:
        schedule: The faults; of several that fit a call at a moment, the first one strikes.

    Example:
        >>> from lightning_swarm.testing import Fault, Faults, ThreadSwarmStrategy
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> faults = Faults([Fault("duplicate", "forward", stage=1, step=1)])
        >>> trainer = Trainer(strategy=ThreadSwarmStrategy(BoringModel, faults=faults), max_steps=2, accelerator="cpu")
        >>> trainer.fit(BoringModel())
        >>> [fault.kind for fault in faults.fired]
        ['duplicate']
    """

    def __init__(self, schedule: Sequence[Fault]) -> None:
        self._waiting = list(schedule)
        self._lock = threading.Lock()
        self._hung: set[str] = set()
        self._cut: set[tuple[str, str]] = set()
        self._over = threading.Event()
        self._kill: Callable[[str], None] = _kill_this_process
        self.fired: list[Fault] = []
        """What has struck so far, in this order."""

    def inject(self, strategy: "SwarmStrategy") -> None:
        """Let the faults happen to the worker that this strategy will be, in a process of its own."""
        strategy._faults = self

    def kill_with(self, kill: Callable[[str], None]) -> None:
        """Let workers vanish by this, called with the peer id on a thread of its own, instead of ``SIGKILL``."""
        self._kill = kill

    def end(self) -> None:
        """The run is over: workers that are slow go on, those that hang vanish."""
        self._over.set()
        for peer in list(self._hung):
            self._kill(peer)

    async def around(
        self,
        worker: "WorkerPeer",
        call: str,
        caller: str,
        header: dict[str, Any],
        tensors: list[Tensor],
        handler: Callable[..., Awaitable[Reply]],
    ) -> Reply:
        """Answer a call to a worker, as its handler would or as a fault wants it."""
        peer = worker.node.peer_id
        if call == "fetch" and (peer, caller) in self._cut and not is_part(header.get("key")):
            await _for_ever()
        scene = _scene(worker, call, caller, header)

        def handle() -> Awaitable[Reply]:
            return handler(caller, header, tensors)

        arrival = self._take(_ARRIVALS.get(call), scene)
        if arrival is not None and arrival.kind == "duplicate":
            return await _both(handle)
        if arrival is not None:
            await self._strike(arrival, worker, scene)
        reply = await self._until_forwarded(worker, scene, handle) if call == "process" else await handle()
        end = self._take(_end(worker, call, caller, header), scene)
        if end is None:
            return reply
        if end.kind == "duplicate":
            return await handle()
        if end.kind in ("corrupt", "nan"):
            return reply[0], [_harmed(tensor, end.kind) for tensor in reply[1]]
        await self._strike(end, worker, scene)
        return reply

    async def _until_forwarded(self, worker: "WorkerPeer", scene: _Scene, handle: Handle) -> Reply:
        """The handler's reply; but a fault may strike as soon as the microbatch has something in the outbox."""
        service = worker.service
        if service is None or service.server is None or self._find("forwarded", scene) is None:
            return await handle()
        server = service.server
        name = f"{scene.step}:{scene.microbatch}"
        key = f"{name}/g{server.index}" if server.last else f"{name}/a{server.index + 1}"
        handling = asyncio.ensure_future(handle())
        offered = asyncio.ensure_future(service.outbox.get(key))
        try:
            await asyncio.wait({handling, offered}, return_when=asyncio.FIRST_COMPLETED)
            if offered.done() and offered.exception() is None:
                fault = self._take("forwarded", scene)
                if fault is not None and fault.kind == "duplicate":
                    return await _both(handle, handling)
                if fault is not None:
                    await self._strike(fault, worker, scene)
            return await handling
        finally:
            offered.cancel()
            handling.cancel()

    def _find(self, moment: Moment | None, scene: _Scene) -> Fault | None:
        return next((fault for fault in self._waiting if fault.moment == moment and scene.fits(fault)), None)

    def _take(self, moment: Moment | None, scene: _Scene) -> Fault | None:
        with self._lock:
            fault = self._find(moment, scene)
            if fault is not None:
                self._waiting.remove(fault)
                self.fired.append(fault)
            return fault

    async def _strike(self, fault: Fault, worker: "WorkerPeer", scene: _Scene) -> None:
        """Returns if the call goes on."""
        if fault.kind == "refuse":
            raise PeerBusy("this worker was told to refuse a call")
        if fault.kind == "slow":
            self._occupy(worker, fault.seconds)
            return
        if fault.kind == "kill":
            threading.Thread(target=self._kill, args=(scene.peer,), daemon=True).start()
        elif fault.kind == "hang":
            self._hung.add(scene.peer)
            # This blocks the worker's event loop: it asks nobody anything, either, as a machine that stands still.
            self._over.wait()
        elif fault.kind == "cut":
            self._cut.add((scene.peer, scene.caller))
        await _for_ever()

    def _occupy(self, worker: "WorkerPeer", seconds: float) -> None:
        def wait() -> None:
            # Workers that are threads of one process share the lock that is held here, and they are not slow.
            PROCESS_GENERATORS.release()
            try:
                self._over.wait(seconds)
            finally:
                PROCESS_GENERATORS.acquire()

        if worker.service is not None:
            waiting = asyncio.ensure_future(worker.service.executor.do(Priority.COMMIT, wait))
            unheard(waiting)


def _scene(worker: "WorkerPeer", call: str, caller: str, header: dict[str, Any]) -> _Scene:
    service = worker.service
    server = service.server if service is not None else None
    stage = server.index if server is not None else None
    step, microbatch = server.version if server is not None else None, None
    if call in ("process", "reduce", "commit"):
        step = _number(header.get("step"))
    name = str(header.get("microbatch" if call == "process" else "key", ""))
    if name.startswith("reduce/"):
        step = _number(name.split("/")[1])
    elif call in ("process", "fetch") and not is_part(name):
        of_step, _, of_microbatch = name.partition("/")[0].partition(":")
        step, microbatch = _number(of_step), _number(of_microbatch)
    return _Scene(worker.node.peer_id, caller, stage, step, microbatch)


def _end(worker: "WorkerPeer", call: str, caller: str, header: dict[str, Any]) -> Moment | None:
    if call == "fetch" and is_part(header.get("key"), "state"):
        return "snapshot" if caller == worker.trainer else "state"
    if call == "fetch":
        return "reducing" if str(header.get("key")).startswith("reduce/") else "fetched"
    return _ENDS.get(call)


def _number(text: Any) -> int | None:
    return int(text) if str(text).isdigit() else None


async def _both(handle: Handle, first: "asyncio.Future[Reply] | None" = None) -> Reply:
    """Two deliveries at once. The caller gets the second one's answer, or the first one's if the second fails."""
    calls = [first or asyncio.ensure_future(handle()), asyncio.ensure_future(handle())]
    try:
        first_answer, answer = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        for call in calls:
            call.cancel()
    if isinstance(answer, SwarmError) and not isinstance(first_answer, BaseException):
        return first_answer
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _harmed(tensor: Tensor, kind: str) -> Tensor:
    if kind == "nan":
        return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor
    return tensor.double().unsqueeze(0) if tensor.dtype != torch.float64 else tensor.float().unsqueeze(0)


async def _for_ever() -> None:
    """Until the caller lets go or the worker is gone."""
    await asyncio.Event().wait()


def _kill_this_process(peer: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
