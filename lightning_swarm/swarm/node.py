"""One peer of the swarm: its libp2p identity, its calls and its part of the DHT, on one event-loop thread.

A `Node` starts in its constructor and is at once fit to serve and call. Everything of it runs on its own event loop:
coroutines get there through `run`, from any other thread, or `spawn`. The loop never computes, so handlers hand work to
the threads that own it and await the outcome. Nothing is global: any number of nodes live in one process.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from lightning_swarm._compat_hivemind import Multiaddr, attach
from lightning_swarm.swarm.answering import Answerer
from lightning_swarm.swarm.bootstrap import connect_initial, join_dht, parse_initial_peers
from lightning_swarm.swarm.calling import Caller
from lightning_swarm.swarm.daemon import Daemon
from lightning_swarm.swarm.directory import Directory
from lightning_swarm.swarm.errors import NodeClosed
from lightning_swarm.swarm.frames import Limits
from lightning_swarm.swarm.loop import LoopThread
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
        limits: What is accepted from other peers; the defaults suit all but very large models.
        shortcuts: Let calls between peers of one machine, once libp2p has proved who they are, go through a unix socket
            of their own instead of libp2p's daemons. ``False`` sends everything through libp2p.

    Attributes:
        run_id: As given.
        peer_id: This peer's name (base58).
        maddrs: This peer's addresses, ready to be another's ``initial_peers``.
        directory: The run's records in the DHT.

    Raises:
        MisconfigurationException: For an address that is malformed, or of another run; names it.
        NotNow: For a port that is in use, or when no initial peer can be reached; names them.

    Example::

        async def double(caller, header, tensors):
            return {"hello": header["name"]}, [tensor * 2 for tensor in tensors]

        with Node(run_id="example") as first:
            first.serve({"double": double})
            with Node(run_id="example", initial_peers=first.maddrs) as second:
                call = second.call(first.peer_id, "double", {"name": "swarm"}, [torch.ones(2)], deadline_s=5)
                print(second.run(call))  # ({'hello': 'swarm'}, [tensor([2., 2.])])
    """

    peer_id: str
    maddrs: list[str]
    directory: Directory

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
        limits: Limits | None = None,
        shortcuts: bool = True,
    ) -> None:
        self.run_id = run_id
        self._secret = secret
        self._limits = limits or Limits()
        self._shortcuts = shortcuts
        initial = parse_initial_peers(initial_peers)
        daemon = Daemon(host_maddrs, announce_maddrs, identity_path, runtime_dir)
        self._loop = LoopThread(self._life(daemon, initial, startup_timeout_s))

    def run(self, coro: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Runs a coroutine on the node's event loop and waits for it, from any thread but the loop's.

        Ctrl-C, or whatever else interrupts the waiting thread, cancels the coroutine.

        Raises:
            DeadlineExceeded: After ``timeout_s``.
            NodeClosed: When the node is closed, before or meanwhile.
        """
        return self._loop.run(coro, timeout_s)

    def spawn(self, coro: Coroutine[Any, Any, _T], name: str) -> "concurrent.futures.Future[_T]":
        """Runs a coroutine in the background until it ends, its future is cancelled or the node is closed.

        May be called from any thread, the loop's included. What the coroutine raises is logged under ``name``, whether
        or not anybody waits for it.
        """
        return self._loop.spawn(coro, name)

    async def while_alive(self, coro: Coroutine[Any, Any, _T]) -> _T:
        """Awaits a coroutine that would go on in vain without the network. To be awaited on the node's event loop.

        Raises:
            NodeClosed: The node's libp2p daemon has ended, before or meanwhile; the coroutine is cancelled.
        """
        work: asyncio.Future[Any] = asyncio.ensure_future(coro)
        try:
            await asyncio.wait({work, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():  # What the work has met with, if it is done as well, comes of that.
                raise NodeClosed(self._ended.result())
            return work.result()
        finally:
            work.cancel()

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
        header: dict[str, Any],
        tensors: Sequence[Tensor] = (),
        *,
        deadline_s: float,
        codec: str = "none",
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Calls a method of another peer. To be awaited on the node's event loop.

        Args:
            peer: Peer id. A peer calls itself as it would others, without the network.
            method: Which of its handlers.
            header: What msgpack carries. Lists arrive as tuples.
            tensors: Sent as they are; must not change until the call returns.
            deadline_s: When to give up, everything included. The handler is told to be done by then, too.
            codec: How floating-point tensors travel, in both directions.

        Raises:
            SwarmError: PeerUnreachable, DeadlineExceeded, ProtocolError, PeerBusy, PeerStale, CallerError, Dropped,
                SourceFailed or NodeClosed, as `errors` says.
            RemoteError: The handler raised something else.
        """
        if self._ended.done():
            raise NodeClosed(self._ended.result())
        if peer == self.peer_id:
            return await self._answerer.answer_self(method, header, tensors, deadline_s)
        return await self._caller.call(peer, method, header, tensors, deadline_s, codec)

    def silent_s(self, peer: str) -> float:
        """For how many seconds nothing has come from a peer that owes this one an answer; infinite if it owes none."""
        return self._caller.silent_s(peer)

    @property
    def traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes sent and received so far, each by method; a request and its reply count under its method."""
        return dict(self._context.sent), dict(self._context.received)

    @property
    def refused(self) -> int:
        """How many streams of other peers were ended, because what came was not a valid request."""
        return self._answerer.refused

    def close(self) -> None:
        """Ends everything: calls fail, tasks are cancelled, ``p2pd`` and its files are gone on return. Idempotent."""
        self._loop.close()

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextlib.asynccontextmanager
    async def _life(self, daemon: Daemon, initial: Sequence[Multiaddr], timeout_s: float) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            until = time.monotonic() + timeout_s
            self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # gives the reason
            stack.callback(daemon.close)
            await daemon.start(self._daemon_ended, timeout_s)
            p2p = await attach(daemon.control_maddr, daemon.directory)
            stack.push_async_callback(p2p.shutdown)
            stack.callback(daemon.expect_end)
            self.peer_id = p2p.peer_id.to_base58()
            self.maddrs = [str(maddr) for maddr in await p2p.get_visible_maddrs()]
            codecs = ThreadPoolExecutor(1, thread_name_prefix="lightning-swarm-codec")
            stack.callback(codecs.shutdown, wait=False)
            self._context = Context(self.run_id, self.peer_id, self._secret, daemon.control_path, self._limits, codecs)
            self._answerer, self._caller = Answerer(self._context), Caller(self._context, self._shortcuts)
            stack.callback(self._answerer.close)
            stack.callback(self._caller.close)
            await self._answerer.start(daemon.calls_path, daemon.shortcut_path if self._shortcuts else None)
            live = await connect_initial(p2p, initial, until - time.monotonic())
            dht = await join_dht(p2p, live, self.run_id, self._secret)
            stack.callback(setattr, dht, "is_alive", False)  # its shutdown would wait for p2pd, even for a dead one
            self.directory = Directory(dht, self.run_id, self.peer_id)
            sweeping = asyncio.create_task(self._sweep())
            stack.callback(sweeping.cancel)
            yield

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.stall_s)
            self._answerer.sweep()
            self._caller.sweep()

    def _daemon_ended(self) -> None:
        why = "This node's libp2p daemon p2pd ended unexpectedly; the node is of no use any more."
        _log.error(why)
        self._ended.set_result(why)
