"""Starts local workers by running the script again, and decides what a Lightning call means in each role.

On the trainer a call (``trainer.fit``, ...) is a session: the launcher opens it, lets Lightning run and closes it. On a
worker the same call serves that session; then the script waits until the trainer's script calls Lightning again, and
exits with code 0 when that has ended.

Nothing outlives the trainer: local workers ask the kernel to end them with it, and every peer's libp2p daemon and
sockets go with their owner (``swarm/daemon.py``).
"""

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_swarm._compat import Launcher, choose_checkpoint, ignore_checkpoint_path, rerun_command

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_swarm.strategy import SwarmStrategy

log = logging.getLogger(__name__)

ROLE = "LIGHTNING_SWARM_ROLE"
INITIAL_PEERS = "LIGHTNING_SWARM_INITIAL_PEERS"
RUN_ID = "LIGHTNING_SWARM_RUN_ID"
SECRET = "LIGHTNING_SWARM_SECRET"
IDENTITY = "LIGHTNING_SWARM_IDENTITY"
HOST_MADDRS = "LIGHTNING_SWARM_HOST_MADDRS"
ANNOUNCE_MADDRS = "LIGHTNING_SWARM_ANNOUNCE_MADDRS"
LOCAL_INDEX = "LIGHTNING_SWARM_LOCAL_INDEX"
DEVICE = "LIGHTNING_SWARM_DEVICE"
THREADS = "LIGHTNING_SWARM_THREADS"
NOTICE = "LIGHTNING_SWARM_NOTICE"

# Runs before the worker's own Python: asks the kernel (prctl, PR_SET_PDEATHSIG = 1) for SIGKILL at the parent's death,
# which holds across exec. Done in a fresh interpreter, because code between fork and exec of a threaded process may
# deadlock.
_FOLLOW_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
_TAIL_LINES = 200
EXIT_WAIT_S = 20.0  # on a busy machine the interpreter alone takes seconds to end
_LOOK_EVERY_S = 0.2
_MOST_FAILURES = 3
_MOST_ENDS = 8
_LONGEST_PAUSE_S = 60.0
_NO_ROOM_PAUSE_S = 1.0
# Ends that are no failure of the process: it has left, or somebody, such as a kernel short of memory, has ended it.
_NO_FAILURES = (0, -signal.SIGHUP, -signal.SIGINT, -signal.SIGKILL, -signal.SIGTERM)


class WorkerDied(RuntimeError):
    """A local worker ended while the trainer counted on it."""


def following(command: Sequence[str]) -> list[str]:
    """The command, so that its process ends with the thread that starts it."""
    return [sys.executable, "-S", "-c", _FOLLOW_PARENT, str(os.getpid()), *command]


class Starts:
    """How the starts of one local worker went since it last joined, and when the next one is due.

    A worker that fails before it has joined shows that something is wrong with the script or the machine: at its very
    first start at once, later by a few failures in a row. That it was killed or has left shows nothing, unless it goes
    on and on. A failure ends no attempts, only the hope of those who wait: what was wrong may pass.
    """

    def __init__(self) -> None:
        self.joined = False
        self._ends = 0
        self._failures = _MOST_FAILURES - 1

    def join(self) -> None:
        """It has joined the swarm."""
        self.joined = True
        self._ends = self._failures = 0

    def end(self, code: int) -> float:
        """It has ended; gives the seconds to wait before it is started again."""
        if self.joined:
            self.joined = False
            return 0.0
        self._ends += 1
        self._failures += code not in _NO_FAILURES
        return _LONGEST_PAUSE_S if self._ends > _MOST_ENDS else min(_LONGEST_PAUSE_S, 2.0 ** (self._ends - 1))

    @property
    def in_vain(self) -> bool:
        """Whether there is no more hope that it will join."""
        return self._failures >= _MOST_FAILURES or self._ends >= _MOST_ENDS


class _LocalWorker:
    """One child process at a time, and the thread that passes its output on.

    Raises:
        OSError: The machine has no room for another process now.
    """

    def __init__(self, index: int, environment: dict[str, str], label: Callable[[int], str]) -> None:
        self.index = index
        self.starts = Starts()
        self.due_s: float | None = None
        """When it is to be started again, once it has ended."""
        self.last_words = ""
        """What it printed last before it ended."""
        self._environment = environment
        self._label = label
        self.start()

    def start(self) -> None:
        """Begin, or begin again after the end."""
        self.process = subprocess.Popen(
            following(rerun_command()),
            env={**os.environ, **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.due_s = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        arguments = (self.process.stdout, self._tail)
        self._reader = threading.Thread(
            target=self._pass_on, args=arguments, name=f"output of worker {self.index}", daemon=True
        )
        self._reader.start()

    def _pass_on(self, output: IO[bytes], tail: deque[str]) -> None:
        for raw in output:
            line = raw.decode(errors="replace").rstrip()
            tail.append(line)
            # Nobody may listen any more (``| head``, a closed terminal): the worker must not wait for that in a print.
            with contextlib.suppress(OSError, ValueError):
                # One write a line: others write at the same time.
                sys.stderr.write(f"[{self._label(self.index)}] {line}\n")
                sys.stderr.flush()

    def has_ended(self, code: int, now_s: float) -> None:
        """It has: note what it said, and when to start it again."""
        pause_s = self.starts.end(code)
        self.due_s = now_s + pause_s
        self._reader.join(timeout=2.0)
        said = "\n".join(self._tail)
        self.last_words = f"Local worker {self.index} has ended with exit code {code}. Its last output:\n\n{said}"
        log.warning(
            "Local worker %d (%s) has ended with exit code %d; it is started again%s.",
            self.index,
            self._label(self.index),
            code,
            f" in {pause_s:g} s, as it had not joined" if pause_s else "",
        )

    def end(self, wait_s: float) -> None:
        """Wait for it to end, then make it."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=1.0)


class LocalWorkers:
    """The workers that the trainer starts on its own machine; one that ends is started again.

    Args:
        environments: What each of them gets in its environment, by index.
        label: How to mark a worker's output.
        needed: Whether a worker that has left, with exit code 0, is wanted back. Others are started again until the
            end.
    """

    def __init__(
        self,
        environments: Sequence[dict[str, str]],
        label: Callable[[int], str],
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        if environments and (not sys.argv or not os.path.isfile(os.path.abspath(sys.argv[0]))):
            raise MisconfigurationException(
                "SwarmStrategy starts local workers by running the script again, but this Python was not started "
                "from a script "
                "(a notebook or a prompt?). Put the code into a file, or pass SwarmStrategy(workers=0) and start "
                "workers "
                "elsewhere with the join line."
            )
        self._needed = needed
        self._workers = [_LocalWorker(i, environment, label) for i, environment in enumerate(environments)]
        self._ending = threading.Event()
        self.restarts = 0
        # The kernel ends a child with the thread that started it, so restarts need a thread that stays.
        self._supervisor = threading.Thread(target=self._supervise, name="local workers", daemon=True)
        self._supervisor.start()

    def joined(self, index: int) -> None:
        """A worker has joined the swarm."""
        if 0 <= index < len(self._workers):
            self._workers[index].starts.join()

    def _supervise(self) -> None:
        while not self._ending.wait(_LOOK_EVERY_S):
            for worker in self._workers:
                self._look_after(worker, time.monotonic())

    def _look_after(self, worker: _LocalWorker, now_s: float) -> None:
        """Start a worker again that has ended, when it is time to."""
        code = worker.process.poll()
        if code is None or (code == 0 and not self._needed()):
            return
        if worker.due_s is None:
            worker.has_ended(code, now_s)
        if worker.due_s is None or worker.due_s > now_s:
            return
        try:
            worker.start()
        except OSError as error:
            worker.due_s = now_s + _NO_ROOM_PAUSE_S
            log.warning("Local worker %d cannot be started now, which is tried again: %s", worker.index, error)
        else:
            self.restarts += 1

    def check(self) -> None:
        """See that it is not in vain to wait for one of them.

        Raises:
            WorkerDied: It is, as those that have not joined die each time; has the last words, so the traceback.
        """
        away = [worker for worker in self._workers if not worker.starts.joined]
        if away and all(worker.starts.in_vain for worker in away):
            raise WorkerDied(away[0].last_words)

    def end(self, wait_s: float = EXIT_WAIT_S) -> None:
        """Give them a moment to exit by themselves, then kill."""
        self._ending.set()
        self._supervisor.join()
        until = time.monotonic() + wait_s
        for worker in self._workers:
            worker.end(max(0.0, until - time.monotonic()))
        self._workers = []


class SwarmLauncher(Launcher):
    """What ``Trainer`` calls instead of its loops' functions.

    Args:
        strategy: The strategy that it launches for.
    """

    calls = 0
    """How many Lightning calls this process has made with any SwarmStrategy; ``lightning-swarm run`` asks."""

    def __init__(self, strategy: "SwarmStrategy") -> None:
        self._strategy = strategy

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: "Trainer | None" = None, **kwargs: Any) -> Any:
        """Run one Lightning call in this process's role."""
        assert trainer is not None
        SwarmLauncher.calls += 1
        if self._strategy.role == "worker":
            return self._serve(function, trainer, args, kwargs)
        choose_checkpoint(trainer, self._strategy.choose_checkpoint)
        try:
            self._begin()
            results = function(*args, **kwargs)
        except BaseException as error:
            # The session lives on: Lightning calls on_exception now, where callbacks may save a checkpoint, then
            # teardown.
            self._strategy.fail(error)
            raise
        self._strategy.end_call(failed=False, results=results)
        return results

    def _begin(self) -> None:
        try:
            self._strategy.begin_call()
        finally:
            # Last, as what was registered last is called first: a node that has been closed can tell nobody of the end.
            atexit.unregister(self._strategy.shutdown)
            atexit.register(self._strategy.shutdown)

    def _serve(self, function: Callable[..., Any], trainer: "Trainer", args: Any, kwargs: Any) -> Any:
        ignore_checkpoint_path(trainer)
        try:
            self._begin()
            results = function(*args, **kwargs)
            if self._strategy.await_next_call():
                return results
        except BaseException:
            self._strategy.shutdown()
            raise
        self._strategy.shutdown()
        # Lightning would tell them of an exception, but this is the end of a run that went well.
        trainer.callbacks, trainer.loggers = [], []  # type: ignore[attr-defined]
        sys.exit(0)

    @override
    def kill(self, signum: int) -> None:
        """Lightning got SIGTERM: a worker hands its work back; the trainer's loops end by themselves."""
        if not self._strategy.drain() and self._strategy.role == "worker":
            sys.exit(0)
