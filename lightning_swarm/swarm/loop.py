"""An event loop on a thread of its own, and how other threads get things done there."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import uvloop

from lightning_swarm.swarm.errors import DeadlineExceeded, NodeClosed

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_CANCEL_S = 2.0
_SPELL_S = 1.0


class LoopThread:
    """A running event loop. Its thread is a daemon; it is closed at the end of the interpreter at the latest.

    Args:
        life: Entered on the loop before the constructor returns, left when the loop is closed.

    Raises:
        BaseException: What entering ``life`` raises.
    """

    def __init__(self, life: AbstractAsyncContextManager[Any]) -> None:
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._main: asyncio.Task[None] | None = None
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._live, args=(life,), name="lightning-swarm-node", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    def run(self, coro: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """See `Node.run`."""
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError(
                "The event-loop thread would wait for itself: await the coroutine instead of running it."
            )
        future = self._submit(coro)
        try:
            return result_of(future, timeout_s)
        except concurrent.futures.CancelledError as error:
            raise NodeClosed("This node was closed.") from error
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceeded(f"Not done within {timeout_s} s.") from error
        except BaseException:
            future.cancel()
            raise

    def spawn(self, coro: Coroutine[Any, Any, _T], name: str) -> "concurrent.futures.Future[_T]":
        """See `Node.spawn`."""

        async def supervised() -> _T:
            try:
                return await coro
            except Exception:
                _log.exception("The background task %r failed.", name)
                raise

        return self._submit(supervised(), also=coro)

    def _submit(self, coro: Coroutine[Any, Any, _T], also: Any = None) -> "concurrent.futures.Future[_T]":
        with self._lock:
            if self._closed:
                coro.close()
                if also is not None:
                    also.close()
                raise NodeClosed("This node is closed.")
            future = asyncio.run_coroutine_threadsafe(coro, self._loop)
            self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def close(self) -> None:
        """Leaves ``life``, cancels what still runs and ends the thread. Idempotent."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("The event-loop thread would wait for its own end.")
        with self._lock:
            self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join()
        for future in list(self._running):  # handed over too late to be started
            future.cancel()
        atexit.unregister(self.close)

    def _end(self) -> None:
        self._stop.set()
        if self._main is not None and not self._started.done():
            self._main.cancel()

    def _live(self, life: AbstractAsyncContextManager[Any]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._main = self._loop.create_task(self._in(life))
            self._loop.run_until_complete(self._main)
        except BaseException as error:
            if self._started.done():
                _log.exception("The event loop of a node failed.")
            else:
                self._started.set_exception(error)
        finally:
            self._loop.run_until_complete(cancel_all(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _in(self, life: AbstractAsyncContextManager[Any]) -> None:
        async with life:
            self._started.set_result(None)
            await self._stop.wait()
            await cancel_all(asyncio.all_tasks())


def result_of(future: "concurrent.futures.Future[_T]", timeout_s: float | None = None) -> _T:
    """As ``future.result(timeout_s)``, but in short spells.

    A signal that comes in the moment before the main thread begins to wait does not end the wait: Python looks after it
    when that is over. So Ctrl-C would be heard late, or never.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = _SPELL_S if until is None else until - time.monotonic()
        try:
            return future.result(min(max(left_s, 0.0), _SPELL_S))
        except concurrent.futures.TimeoutError:
            if future.done() or left_s <= 0:
                raise


def unheard(future: "asyncio.Future[Any]") -> None:
    """Nobody may be left to hear of this future's error, which is no mistake: asyncio shall not report it."""
    future.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())


async def together(coroutines: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """All results in order. Of those that still run when one fails, or when this is cancelled, none is left behind."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks and waits until they have ended, though not for ever: one may not listen."""
    pending = [task for task in tasks if task is not asyncio.current_task()]
    for task in pending:
        task.cancel()
    if pending:
        _, deaf = await asyncio.wait(pending, timeout=_CANCEL_S)
        for task in deaf:
            _log.warning("A task does not end although it was cancelled: %r", task)
