"""One compute thread a device, backward first.

The event loop never computes and the compute thread never does I/O. Whoever calls :meth:`Executor.run` lends its thread
(a worker lends its main thread, so that user code runs where users expect it); coroutines hand it closures and await
the results. A closure with the smaller priority goes first: finishing the backward pass of an old microbatch frees
memory and feeds the stage in front, starting a new forward pass does neither.
"""

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")

# torch's, random's and NumPy's generators are one per process and re-seeded for every microbatch: when several workers
# share a process, their computations must not interleave.
PROCESS_GENERATORS = threading.Lock()


class Priority(IntEnum):
    """What goes first when several closures wait."""

    COMMIT = 0
    BACKWARD = 1
    FORWARD = 2


class Executor:
    """A priority queue of closures, worked off by the one thread that calls :meth:`run`.

    Example:
        >>> import asyncio, threading
        >>> executor = Executor()
        >>> thread = threading.Thread(target=executor.run)
        >>> thread.start()
        >>> asyncio.run(executor.do(Priority.FORWARD, lambda: 1 + 1))
        2
        >>> executor.stop(); thread.join()
    """

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, int, Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future]] = []
        self._count = itertools.count()
        self._wake = threading.Condition()
        self._stopped = False
        self.owns_process = False
        """Whether the compute thread is the main thread, so that the process is of no use without it."""
        self._progress_s: float | None = None
        self.busy_s = dict.fromkeys(Priority, 0.0)
        self._ran = dict.fromkeys(Priority, 0)

    async def do(self, priority: Priority, function: Callable[[], T], order: int = 0) -> T:
        """Run ``function`` on the compute thread and return its result; closures of one priority go by ``order``.

        A cancelled call is not started; one that runs already ends and its result is dropped, so a closure that must
        not be repeated has to remember that it ran.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._wake:
            if self._stopped:
                raise asyncio.CancelledError("the compute thread has stopped")
            heapq.heappush(self._queue, (priority, order, next(self._count), function, loop, future))
            self._wake.notify()
        return await future

    @property
    def queued(self) -> int:
        """Closures that wait for the compute thread."""
        return len(self._queue)

    @property
    def queue_s(self) -> float:
        """Seconds of computing that wait for the compute thread, by what closures of their priority took so far."""
        with self._wake:
            waiting = [Priority(priority) for priority, *_ in self._queue]
        return sum(self.busy_s[priority] / max(1, self._ran[priority]) for priority in waiting)

    def computing_s(self) -> float:
        """For how long the closure that runs now has got no further; 0 between closures."""
        began = self._progress_s
        return 0.0 if began is None else time.perf_counter() - began

    @property
    def usual_s(self) -> float:
        """How long the slowest kind of closures took on average so far."""
        return max(self.busy_s[priority] / max(1, ran) for priority, ran in self._ran.items())

    def progressed(self) -> None:
        """The closure that runs now is long because it has much to do, and has done a part: it does not hang."""
        self._progress_s = time.perf_counter()

    def run(self) -> None:
        """Work until :meth:`stop`. Exceptions of closures go to whoever awaits them."""
        self.owns_process = threading.current_thread() is threading.main_thread()
        while True:
            with self._wake:
                while not self._queue and not self._stopped:
                    # A bounded wait lets signal handlers of the main thread run.
                    self._wake.wait(1.0)
                if self._stopped:
                    self._abandon()
                    return
                priority, _, _, function, loop, future = heapq.heappop(self._queue)
            if future.cancelled():
                continue
            with PROCESS_GENERATORS:
                self._progress_s = started = time.perf_counter()
                try:
                    result, error = function(), None
                except Exception as exception:
                    result, error = None, exception
                self._progress_s = None
                self.busy_s[Priority(priority)] += time.perf_counter() - started
                self._ran[Priority(priority)] += 1
            self._settle(loop, future, result, error)
            del function, result, error, future

    def stop(self) -> None:
        """Let :meth:`run` return after the running closure; what waits is cancelled. From any thread."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()

    def _abandon(self) -> None:
        while self._queue:
            *_, loop, future = self._queue.pop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(future.cancel)

    @staticmethod
    def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future, result: Any, error: Exception | None) -> None:
        def settle() -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)
