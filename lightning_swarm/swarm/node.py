"""One peer of the swarm: its libp2p identity, its calls and its part of the DHT, on one event-loop thread.

A `Node` starts in its constructor and is at once fit to serve and call. Everything of it runs on its own event loop:
coroutines get there through `run`, from any other thread, or `spawn`. The loop never computes, so handlers hand work to
the threads that own it and await the outcome. Nothing is global: any number of nodes live in one process.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from torch import Tensor

from lightning_swarm._compat_hivemind import P2P, attach
from lightning_swarm.swarm.answering import Answerer
from lightning_swarm.swarm.bootstrap import connect_initial, join_dht, parse_initial_peers
from lightning_swarm.swarm.calling import Caller
from lightning_swarm.swarm.daemon import Daemon
from lightning_swarm.swarm.directory import Directory
from lightning_swarm.swarm.errors import DeadlineExceeded, NodeClosed, SwarmError
from lightning_swarm.swarm.frames import Limits
from lightning_swarm.swarm.rpc import Context, Handler

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Node:
    """One peer.

    Args:
        run_id: Names the run; peers of other runs are refused.
        initial_peers: Addresses (with ``/p2p/<peer id>``) of any live peers. One that answers is enough.
        host_maddrs: Where to listen. Give ``"/ip4/0.0.0.0/tcp/0"`` to be reachable from other machines.
        announce_maddrs: What to tell others instead, where the host's own addresses do not work from outside.
        identity_path: File of the private key, made when missing, for a peer id that survives restarts.
        secret: With it, no call is answered and no DHT record believed that does not come from who has it too.
        startup_timeout_s: How long the start may take, unreachable initial peers included.
        runtime_dir: Where sockets go, in a directory of their own; the system's temporary directory by default.
        limits: What is accepted from other peers.

    Raises:
        MisconfigurationException: For an address that is malformed, in use or unreachable; names it.

    Example::

        async def hello(caller, header, tensors):
            return {"hello": header["name"]}, [tensor * 2 for tensor in tensors]

        with Node(run_id="example") as first:
            first.serve({"hello": hello})
            with Node(run_id="example", initial_peers=first.maddrs) as second:
                call = second.call(first.peer_id, "hello", {"name": "swarm"}, [torch.ones(2)], deadline_s=5)
                print(second.run(call))  # ({'hello': 'swarm'}, [tensor([2., 2.])])
    """

    def __init__(
        self,
        *,
        run_id: str,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[str] | None = None,
        identity_path: Path | None = None,
        secret: bytes | None = None,
        startup_timeout_s: float = 15.0,
        runtime_dir: Path | None = None,
        limits: Limits = Limits(),
    ) -> None:
        self.run_id = run_id
        self.peer_id = ""
        self.maddrs: list[str] = []
        self.directory: Directory
        self._secret = secret
        self._limits = limits
        self._initial_peers = parse_initial_peers(initial_peers)
        self._daemon_arguments = (
            list(host_maddrs),
            announce_maddrs,
            identity_path,
            runtime_dir,
        )
        self._startup_timeout_s = startup_timeout_s
        self._codec_thread = ThreadPoolExecutor(1, thread_name_prefix="lightning-swarm-codec")
        self._tasks: set[asyncio.Task] = set()
        self._failure: str | None = None
        self._closed = False
        self._close_lock = threading.Lock()
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._live, args=(started,), name="lightning-swarm-node", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            started.result()
        except BaseException:
            self.close()
            raise

    def run(self, coro: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Runs a coroutine on the node's event loop and waits for it, from any thread but the loop's.

        Ctrl-C, or whatever else interrupts the waiting thread, cancels the coroutine.

        Raises:
            DeadlineExceeded: After ``timeout_s``.
            NodeClosed: When the node is closed, before or meanwhile.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("Node.run would wait for itself on the event-loop thread; await the coroutine instead.")
        if self._closed:
            coro.close()
            raise NodeClosed("This node is closed.")
        future = asyncio.run_coroutine_threadsafe(self._owned(coro), self._loop)
        try:
            return future.result(timeout_s)
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

    async def _owned(self, coro: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await coro

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> "concurrent.futures.Future[Any]":
        """Runs a coroutine in the background until it ends, its future is cancelled or the node is closed.

        What it raises is logged under ``name``, whether or not anybody waits for it.
        """
        return asyncio.run_coroutine_threadsafe(self._supervised(coro, name), self._loop)

    async def _supervised(self, coro: Coroutine[Any, Any, _T], name: str) -> _T:
        try:
            return await self._owned(coro)
        except Exception:
            _log.exception("The background task %r of peer %s failed.", name, self.peer_id)
            raise

    def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Answers these calls from now on.

        Args:
            handlers: By method: ``async (caller's peer id, header, tensors) -> (header, tensors)``. The tensors that
                come own their memory; those returned must not change until they were sent. A handler is cancelled when
                its caller lets go or its deadline passes. What it raises reaches the caller, see `errors.pack_error`.
        """
        if taken := handlers.keys() & self._answerer.handlers.keys():
            raise ValueError(f"Calls that are served already: {sorted(taken)}.")
        self._answerer.handlers.update(handlers)

    async def call(
        self,
        peer: str,
        method: str,
        header: dict,
        tensors: Sequence[Tensor] = (),
        *,
        deadline_s: float,
        codec: str = "none",
    ) -> tuple[dict, list[Tensor]]:
        """Calls a method of another peer. To be awaited on the node's event loop.

        Args:
            peer: Peer id. A peer calls itself as it would others, without the network.
            method: Which of its handlers.
            header: What msgpack carries. Lists arrive as tuples.
            tensors: Sent as they are; must not change until the call returns.
            deadline_s: When to give up, everything included. The handler is told to be done by then, too.
            codec: How floating-point tensors travel, in both directions.

        Raises:
            PeerUnreachable, DeadlineExceeded, ProtocolError, PeerBusy, CallerError, SourceFailed, Dropped: See `errors`.
            RemoteError: The handler raised something else.
        """
        if self._failure is not None:
            raise NodeClosed(self._failure)
        if peer == self.peer_id:
            return await self._answerer.answer_self(method, header, tensors, deadline_s)
        return await self._caller.call(peer, method, header, tensors, deadline_s, codec)

    def close(self) -> None:
        """Ends everything: calls fail, tasks are cancelled, ``p2pd`` and its files are gone on return. Idempotent."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("Node.close would wait for itself on the event-loop thread.")
        with self._close_lock:
            self._closed = True
            if self._thread.is_alive():
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._stop.set)
                self._thread.join()
            self._codec_thread.shutdown(wait=False)
            atexit.unregister(self.close)

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def traffic(
        self,
    ) -> "tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]":
        """Bytes sent and received so far, each by (peer, method); a request and its reply count under its method."""
        return dict(self._context.sent), dict(self._context.received)

    def _live(self, started: "concurrent.futures.Future[None]") -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main(started))
        except BaseException as error:
            if started.done():
                _log.exception("The event loop of peer %s failed.", self.peer_id)
            else:
                started.set_exception(error)
        finally:
            self._loop.run_until_complete(_cancel(asyncio.all_tasks(self._loop)))  # hivemind leaves some behind
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _main(self, started: "concurrent.futures.Future[None]") -> None:
        async with contextlib.AsyncExitStack() as stack:
            starting = asyncio.create_task(self._start(stack))
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
            try:
                await starting
            except TimeoutError as error:
                raise SwarmError(f"This peer did not start within {self._startup_timeout_s} s.") from error
            started.set_result(None)
            while not self._stop.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._limits.stall_s)
                self._answerer.sweep()
                self._caller.sweep()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        until = time.monotonic() + self._startup_timeout_s
        daemon = Daemon(*self._daemon_arguments)
        stack.callback(daemon.close)
        await asyncio.wait_for(daemon.start(self._daemon_ended), self._startup_timeout_s)
        self._daemon = daemon
        p2p: P2P = await attach(f"/unix{daemon.control_path}", daemon.directory)
        stack.push_async_callback(p2p.shutdown)
        stack.push_async_callback(_cancel, self._tasks)
        self._p2p = p2p
        self.peer_id = p2p.peer_id.to_base58()
        self.maddrs = [str(maddr) for maddr in await p2p.get_visible_maddrs()]
        self._context = Context(
            self.run_id,
            self.peer_id,
            self._secret,
            daemon.control_path,
            self._limits,
            self._codec_thread,
        )
        self._answerer, self._caller = Answerer(self._context), Caller(self._context)
        stack.push_async_callback(self._answerer.close)
        stack.callback(self._caller.close)
        await self._answerer.start(daemon.calls_path)
        live = await connect_initial(p2p, self._initial_peers, until - time.monotonic())
        dht = await join_dht(p2p, live, self.run_id, self._secret)
        stack.callback(setattr, dht, "is_alive", False)  # dht.shutdown would wait for p2pd, even for a dead one
        self.directory = Directory(dht, self.run_id, self.peer_id)

    def _daemon_ended(self) -> None:
        if not self._stop.is_set():
            self._failure = "This node's libp2p daemon p2pd ended unexpectedly; the node is of no use any more."
            _log.error(self._failure)


async def _cancel(tasks: Iterable[asyncio.Task]) -> None:
    pending = [task for task in tasks if task is not asyncio.current_task()]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
