"""What a peer has produced and others may fetch, by key.

A producer puts tensors under a key such as ``(step, microbatch, "activation")``; whoever needs them fetches them from
here. A fetch for what is not there yet waits, so data leaves at the moment it exists. Entries stay until their step is
dropped, because a neighbour that dies and is replaced needs them again; dropping also fails those who still wait.

With a bound on its bytes, an outbox evicts entries that can be made again, the oldest first, but only those whose
consumer has them already: what is still awaited stays whatever the bound, or the consumer would wait for ever. A fetch
for an evicted entry fails at once with :class:`~lightning_swarm.swarm.errors.Evicted`, until it is put again.

Threads: `Outbox.put`, `Outbox.drop` and the counters may be used from any thread, `Outbox.get` on an event loop.
"""

import asyncio
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
)

from torch import Tensor

from lightning_swarm.swarm.errors import CallerError, DeadlineExceeded, Dropped, Evicted
from lightning_swarm.swarm.messages import Message

if TYPE_CHECKING:
    from lightning_swarm.swarm.node import Node

Key = Hashable
_WAITED = "waited_s"
_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Entry]"]


@dataclass(frozen=True)
class Entry:
    """What lies under one key.

    Attributes:
        tensors: Must not be changed any more: they are sent without a copy.
        header: Small things that go with them, as msgpack carries them.
        waited_s: Of a fetched entry: how long the fetch waited for it at the producer; the rest of its time was
            transfer.
        put_s: In an outbox: since when it is there, on the clock ``time.monotonic``.
    """

    tensors: tuple[Tensor, ...] = ()
    header: Mapping[str, Any] = field(default_factory=dict)
    waited_s: float = 0.0
    put_s: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Outbox:
    """A store of entries to fetch.

    Args:
        limit_bytes: What it may hold of entries that can be made again, besides those that are still awaited; ``None``:
            as much as comes.

    Attributes:
        limit_bytes: As given; what is over a new one is evicted with the next entry.
        bytes: Bytes of all tensors that are kept now.
        peak_bytes: The most that there ever were.
        evictable_bytes: Bytes of those entries among them that can be made again.
        evictable_peak_bytes: The most that there ever were of these.
        evictions: How many entries were evicted.

    Example:
        >>> outbox = Outbox(limit_bytes=0)
        >>> outbox.put("0:0/a1", [Tensor([1.0])], evictable=True)
        >>> outbox.bytes
        4
        >>> outbox.release("0:0/a1")
        >>> outbox.bytes
        0
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.peak_bytes = 0
        self.evictable_bytes = 0
        self.evictable_peak_bytes = 0
        self.evictions = 0
        self._entries: dict[Key, Entry] = {}
        self._evictable: set[Key] = set()
        self._released: set[Key] = set()
        self._evicted: set[Key] = set()
        self._waiters: dict[Key, list[_Waiter]] = defaultdict(list)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def keys(self) -> list[Key]:
        """The keys of all entries, oldest first."""
        with self._lock:
            return list(self._entries)

    def offered_s(self, key: Key) -> float | None:
        """For how many seconds the entry has been there; ``None`` if it is not."""
        with self._lock:
            entry = self._entries.get(key)
        return None if entry is None else time.monotonic() - entry.put_s

    def put(
        self,
        key: Key,
        tensors: Sequence[Tensor] = (),
        header: Mapping[str, Any] | None = None,
        *,
        evictable: bool = False,
    ) -> None:
        """Makes an entry, in place of one that may be there, and wakes those who wait for it.

        Args:
            key: Its key.
            tensors: See :class:`Entry`.
            header: See :class:`Entry`.
            evictable: Whether it can be made again, so that it need not be kept once it was fetched.
        """
        entry = Entry(tuple(tensor.detach() for tensor in tensors), header or {}, put_s=time.monotonic())
        with self._lock:
            self._remove(key)
            self._evicted.discard(key)
            self._entries[key] = entry
            self.bytes += entry.bytes
            if evictable:
                self._evictable.add(key)
                self.evictable_bytes += entry.bytes
                self._evict()
                self.evictable_peak_bytes = max(self.evictable_peak_bytes, self.evictable_bytes)
            self.peak_bytes = max(self.peak_bytes, self.bytes)
            waiters = self._waiters.pop(key, [])
        _settle(waiters, lambda future: future.set_result(entry))

    def release(self, key: Key) -> None:
        """Nobody waits for an entry any more: it may be evicted, if it is there and can be made again."""
        with self._lock:
            if key in self._evictable and key in self._entries:
                self._released.add(key)
                self._evict()

    def _evict(self) -> None:
        if self.limit_bytes is None or self.evictable_bytes <= self.limit_bytes:
            return
        for key in [key for key in self._entries if key in self._released]:
            self._remove(key)
            self._evicted.add(key)
            self.evictions += 1
            if self.evictable_bytes <= self.limit_bytes:
                return

    def _remove(self, key: Key) -> int:
        entry = self._entries.pop(key, None)
        freed = entry.bytes if entry is not None else 0
        self.bytes -= freed
        if key in self._evictable:
            self.evictable_bytes -= freed
        self._evictable.discard(key)
        self._released.discard(key)
        return freed

    async def get(self, key: Key, timeout_s: float | None = None) -> Entry:
        """The entry, as soon as there is one.

        Args:
            key: Its key.
            timeout_s: How long to wait; ``None`` for as long as the task that waits may live.

        Raises:
            DeadlineExceeded: When it has not come by then.
            Dropped: When it was dropped meanwhile.
            Evicted: When it was there, and was let go of.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                return entry
            if key in self._evicted:
                raise Evicted(f"{key!r} was fetched before and has been evicted.")
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Entry] = loop.create_future()
            self._waiters[key].append((loop, future))
        timer = None
        if timeout_s is not None:
            late = DeadlineExceeded(f"{key!r} did not come within {timeout_s:.3g} s.")
            timer = loop.call_later(timeout_s, _unless_done, future, functools.partial(_fail, late))
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            self._forget(key, future)

    def drop(self, predicate: Callable[[Key], bool]) -> int:
        """Lets go of all entries whose key satisfies the predicate, and fails those who wait for such.

        Returns:
            How many bytes of tensors that were.
        """
        with self._lock:
            freed = sum(self._remove(key) for key in [key for key in self._entries if predicate(key)])
            self._evicted = {key for key in self._evicted if not predicate(key)}
            given_up = {key: self._waiters.pop(key) for key in [key for key in self._waiters if predicate(key)]}
        for key, waiters in given_up.items():
            _settle(waiters, functools.partial(_fail, Dropped(f"{key!r} was dropped.")))
        return freed

    def _forget(self, key: Key, future: "asyncio.Future[Entry]") -> None:
        with self._lock:
            waiters = [waiter for waiter in self._waiters.pop(key, []) if waiter[1] is not future]
            if waiters:
                self._waiters[key] = waiters

    async def answer_fetch(self, caller: str, header: dict, tensors: list[Tensor]) -> tuple[dict, Sequence[Tensor]]:
        """The handler of the call ``fetch``: ``node.serve({"fetch": outbox.answer_fetch})``."""
        request = FetchRequest.from_dict(header)
        started = time.perf_counter()
        entry = await self.get(request.key)
        self.release(request.key)
        answer = {**entry.header, _WAITED: time.perf_counter() - started}
        if request.leaves is None:
            return answer, entry.tensors
        if not all(0 <= leaf < len(entry.tensors) for leaf in request.leaves):
            raise CallerError(f"{request.key!r} has {len(entry.tensors)} tensors; {request.leaves} were asked for.")
        return answer, [entry.tensors[leaf] for leaf in request.leaves]


@dataclass(frozen=True)
class FetchRequest(Message):
    """Asks for the entry under ``key``, or only for some of its tensors."""

    key: str | int | tuple[str | int | tuple[str | int, ...], ...]
    leaves: tuple[int, ...] | None = None


async def fetch(
    node: "Node",
    peer: str,
    key: Any,
    *,
    deadline_s: float,
    leaves: Sequence[int] | None = None,
    codec: str = "none",
) -> Entry:
    """Fetches an entry of another peer's outbox, waiting for it if it does not exist yet.

    Args:
        node: Our node; this must be awaited on its event loop.
        peer: Whose outbox.
        key: A string, an integer or a tuple of them.
        deadline_s: When to give up.
        leaves: Which of the entry's tensors; all by default.
        codec: How floating-point tensors travel.

    Raises:
        Dropped: The peer has dropped it.
        Evicted: The peer has let go of it, and can make it again. See `Node.call` for all others.
    """
    request = FetchRequest(key, None if leaves is None else tuple(leaves))
    header, tensors = await node.call(peer, "fetch", request.to_dict(), deadline_s=deadline_s, codec=codec)
    return Entry(tuple(tensors), header, float(header.pop(_WAITED, 0.0)))


def _settle(waiters: Sequence[_Waiter], action: Callable[["asyncio.Future[Entry]"], None]) -> None:
    for loop, future in waiters:
        try:
            loop.call_soon_threadsafe(_unless_done, future, action)
        except RuntimeError:  # the waiter's loop is closed, and the waiter with it
            continue


def _unless_done(future: "asyncio.Future[Entry]", action: Callable[["asyncio.Future[Entry]"], None]) -> None:
    if not future.done():
        action(future)


def _fail(error: Exception, future: "asyncio.Future[Entry]") -> None:
    future.set_exception(error)
