"""Summing the gradients of a group of workers: everybody gets the same bytes, or nobody gets anything.

The vector is divided into parts, one a member, proportional to the members' weights, and the parts into chunks; both
follow from the group and the vector's length alone. Per chunk:

1. every contributor puts its slice of the chunk into its outbox,
2. the chunk's owner fetches the slices, adds them in the order of the group and puts the sum into its own outbox,
3. everybody else fetches the sum.

A fetch waits until the entry is there, so there are no rounds and no barrier: chunks flow, and adding and encoding (on
threads) overlap with the transfer. A member sends its slices of the others' parts and ``n - 1`` copies of its own part:
``2 (n - 1) / n`` of the vector when parts are equal, which is the least possible.

All members end with identical bits because a chunk is added by one member, in a fixed order, and because its owner,
too, applies what the encoded sum decodes to. A member that fails replaces its entries by the name of whoever failed it,
so that the others, who wait for them, end at once and blame the same peer.

"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_swarm.swarm.calls import Group
from lightning_swarm.swarm.errors import CallerError, DeadlineExceeded, NodeClosed, NotFinite, ProtocolError
from lightning_swarm.swarm.loop import together
from lightning_swarm.worker.checks import check_finite
from lightning_swarm.worker.entries import Chunk, ReductionFailed, blame, blamed, chunks, header_of, pack, unpack

T = TypeVar("T")

Fetch = Callable[[str, str, float], Awaitable[Sequence[Tensor]]]
"""``(peer, key, deadline_s) -> tensors``: an entry of another peer's outbox, as soon as it is there."""

# Chunks under way at a time, for every peer and direction: one travels while another one is computed.
_AHEAD = 2
# The share of the deadline in which the slices have to come. Whoever waits for a sum waits longer than its owner waits
# for a slice, so the one that hangs is blamed, not the one that waits for it.
_SLICES_SHARE = 0.75


class Entries(Protocol):
    """What a reduction needs of an outbox."""

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Offer tensors under a key; what stood there is replaced."""


async def all_reduce(
    vector: Tensor,
    group: Group,
    *,
    step: int,
    attempt: int,
    me: str,
    fetch: Fetch,
    outbox: Entries,
    codec: str = "none",
    deadline_s: float,
    dtype: torch.dtype | None = None,
    executor: Executor | None = None,
    allow_nan: bool = True,
) -> Tensor:
    """Sum a vector over a group; every member calls this with the same group, step, attempt, codec and dtype.

    The entries stay in the outbox, under ``reduce/{step}/{attempt}/``, as others may still fetch them: drop them when
    the step is committed or the attempt given up. Until then neither ``vector`` nor the result may be changed in place,
    because they are sent from where they are.

    Args:
        vector: One-dimensional, floating point, on the CPU. Of a member that does not contribute only length and dtype
            matter; it receives the sum like the others.
        group: Who takes part, in the order of the addition.
        step: Names the entries, with ``attempt``: one that failed must not be repeated under the same number.
        attempt: See ``step``.
        me: This member's peer id.
        fetch: Gets another member's entry, waiting for it no longer than it is told; must not encode it again.
        outbox: Where the others fetch from.
        codec: ``"none"``, ``"fp16"``, ``"bf16"`` or ``"int8"``: what slices and sums travel as. Additions are in
            float32, or in float64 if the vector is, whatever the codec.
        deadline_s: For the whole reduction. Slices have to come within three quarters of it.
        dtype: Of the result; the vector's own if ``None``. With a float64 vector, the parameters' dtype halves the
            bytes of the sums, which their owners round once.
        executor: Where to add and encode, instead of the event loop's default threads.
        allow_nan: Whether NaN in what others send is added as it is; otherwise its sender has failed.

    Returns:
        The sum, bit-identical at all members, in memory of its own.

    Raises:
        ReductionFailed: Names the member that did not deliver. The attempt is lost for all members then.
        CallerError: The arguments make no sense; nothing was sent.
    """
    work = _Reduction(vector, group, f"reduce/{step}/{attempt}/{group.name}", me, codec, dtype or vector.dtype)
    work.connect(fetch, outbox, deadline_s, executor, allow_nan)
    return await work.run()


class _Reduction:
    """One member's side of one reduction."""

    def __init__(self, vector: Tensor, group: Group, prefix: str, me: str, codec: str, dtype: torch.dtype) -> None:
        peers = [member.peer for member in group.members]
        if me not in peers or len(set(peers)) < len(peers):
            raise CallerError(f"Group {group.name!r} must have {me} among its members, and each only once: {peers}.")
        if vector.ndim != 1 or not vector.is_floating_point() or vector.device.type != "cpu":
            raise CallerError(f"Cannot sum a {vector.dtype} tensor of shape {tuple(vector.shape)} on {vector.device}.")
        if codec != "none" and vector.dtype == torch.float64:
            raise CallerError(f"A reproducible sum needs the codec 'none': {codec!r} rounds what each worker sends.")
        self._vector, self._prefix, self._me = vector, prefix, me
        # Everybody begins with another peer, so that not all ask the same one first.
        self._others = peers[peers.index(me) + 1 :] + peers[: peers.index(me)]
        self._codec = codec if self._others else "none"
        self._contributors = [member.peer for member in group.members if member.contributes]
        self._chunks = chunks(group, len(vector))
        self._wide = torch.promote_types(vector.dtype, torch.float32)
        self._result = torch.empty(len(vector), dtype=dtype)

    def connect(
        self, fetch: Fetch, outbox: Entries, deadline_s: float, executor: Executor | None, allow_nan: bool
    ) -> None:
        self._fetch_entry, self._outbox, self._executor, self._allow_nan = fetch, outbox, executor, allow_nan
        self._deadline_s, self._begun = deadline_s, asyncio.get_running_loop().time()

    async def run(self) -> Tensor:
        work = [self._offer()] if self._me in self._contributors else []
        work += self._lanes(self._add, self._chunks[self._me])
        for owner in self._others:
            work += self._lanes(self._collect, self._chunks[owner])
        try:
            await together(work)
        except (Exception, asyncio.CancelledError) as error:
            self._give_up(error)
            raise
        return self._result

    def _lanes(self, work: Callable[[Chunk], Awaitable[None]], pieces: list[Chunk]) -> list[Coroutine[Any, Any, None]]:
        async def lane() -> None:
            for chunk in queue:
                await work(chunk)

        queue = iter(pieces)
        return [lane() for _ in range(min(_AHEAD, len(pieces)))]

    async def _offer(self) -> None:
        """Put the slices of the others' parts into the outbox, everybody's first ones first."""
        for row in itertools.zip_longest(*(self._chunks[owner] for owner in self._others)):
            for chunk in filter(None, row):
                values = self._vector[chunk.start : chunk.stop]
                if self._codec == "none" and values.is_contiguous():
                    entry = [values]
                else:
                    entry = await self._compute(pack, values.contiguous(), self._codec)
                self._outbox.put(self._key(chunk), entry)

    async def _add(self, chunk: Chunk) -> None:
        """Sum one of this member's own chunks and offer the sum."""
        senders = [peer for peer in self._contributors if peer != self._me]
        slices = await together([self._fetch(peer, "slices", chunk) for peer in senders])
        entry = await self._compute(self._sum, chunk, dict(zip(senders, slices)))
        self._outbox.put(self._key(chunk), entry)

    def _sum(self, chunk: Chunk, entries: dict[str, Sequence[Tensor]]) -> list[Tensor]:
        """On a thread."""
        place = self._result[chunk.start : chunk.stop]
        direct = self._codec == "none" and place.dtype == self._wide
        total = place if direct else torch.empty(len(place), dtype=self._wide)
        for position, peer in enumerate(self._contributors):
            if peer == self._me:
                values = self._vector[chunk.start : chunk.stop]
            else:
                values = self._unpack(entries[peer], peer, "slices", chunk, self._vector.dtype)
            total.copy_(values) if position == 0 else total.add_(values)
        if not self._contributors:
            total.zero_()
        if direct:
            return [place]
        rounded = total.to(place.dtype)
        entry = pack(rounded, self._codec)
        place.copy_(unpack(entry, place.dtype, len(place), self._codec))
        return entry

    async def _collect(self, chunk: Chunk) -> None:
        """Fetch the sum of another member's chunk."""
        entry = await self._fetch(chunk.owner, "sums", chunk)
        await self._compute(self._store, chunk, entry)

    def _store(self, chunk: Chunk, entry: Sequence[Tensor]) -> None:
        """On a thread."""
        values = self._unpack(entry, chunk.owner, "sums", chunk, self._result.dtype)
        self._result[chunk.start : chunk.stop].copy_(values)

    async def _fetch(self, peer: str, phase: str, chunk: Chunk) -> Sequence[Tensor]:
        deadline_s = self._deadline_s * (_SLICES_SHARE if phase == "slices" else 1.0)
        left_s = self._begun + deadline_s - asyncio.get_running_loop().time()
        try:
            if left_s <= 0:
                raise DeadlineExceeded(f"It is later than {deadline_s:.3g} s.")
            return await self._fetch_entry(peer, self._key(chunk), left_s)
        except Exception as error:
            # Without a node of its own a member reaches nobody, and the others are well.
            culprit = self._me if isinstance(error, NodeClosed) and error.peer is None else peer
            raise ReductionFailed(culprit, phase, _name(error), str(error)) from error

    def _unpack(self, entry: Sequence[Tensor], peer: str, phase: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        try:
            header = header_of(entry)
            if isinstance(header, dict):
                raise blamed(header, peer, self._chunks)
            values = unpack(entry, dtype, chunk.stop - chunk.start, self._codec)
            if not self._allow_nan:
                check_finite([values], peer, self._key(chunk))
            return values
        except (ProtocolError, NotFinite) as error:
            raise ReductionFailed(peer, phase, _name(error), str(error)) from error

    def _give_up(self, error: BaseException) -> None:
        """Tell those who wait for this member's entries whom to blame; lets go of the memory, too."""
        entry = blame(error if isinstance(error, ReductionFailed) else ReductionFailed(self._me, "sums", _name(error)))
        for chunk in itertools.chain.from_iterable(self._chunks.values()):
            self._outbox.put(self._key(chunk), entry)

    def _key(self, chunk: Chunk) -> str:
        return f"{self._prefix}/{chunk.owner}/{chunk.number}"

    async def _compute(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)


def _name(error: BaseException) -> str:
    return type(error).__name__
