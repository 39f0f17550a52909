"""What is larger than a message arrives whole or not at all, and stays at the giver only while it is fetched."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.swarm import parts
from lightning_swarm.swarm.errors import CallerError, PeerStale, ProtocolError, SwarmError
from lightning_swarm.swarm.frames import Limits
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import Outbox
from lightning_swarm.swarm.parts import Offer, _cut, _join, give, take

LIMITS = Limits(body_bytes=10_000)
TENSORS = [
    torch.arange(5000.0).view(50, 100),  # Larger than a message.
    torch.tensor(3.0),
    torch.randn(30, 40).T,
    torch.zeros(0, 4),
    torch.randn(700).to(torch.bfloat16),
    torch.arange(999) % 2 == 0,
    torch.randn(100, dtype=torch.complex64),
]


class Giver(Node):
    """A peer that has something large for others.

    Args:
        receiver: Who will ask for it.
        fetched: Called when a part is fetched, with its number, before it is sent.
    """

    def __init__(self, receiver: Node, fetched: Callable[[int], Awaitable[None]] | None = None) -> None:
        super().__init__(run_id="parts", limits=LIMITS, initial_peers=receiver.maddrs)
        self.outbox = Outbox()
        self.fetched = fetched
        self.largest_bytes = 0
        self.handling: asyncio.Task[Any] | None = None
        self.serve({"large": self.large, "other": self.other, "fetch": self.fetch})

    async def large(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Any:
        self.handling = asyncio.current_task()
        return await give(self.outbox, "large", caller, header["key"], {"asked": header["what"]}, TENSORS)

    async def other(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Any:
        if header["what"] == "refuse":
            raise PeerStale("not of this step")
        return {}, []

    async def fetch(self, caller: str, header: dict[str, Any], tensors: list[Tensor]) -> Any:
        reply = await self.outbox.answer_fetch(caller, header, tensors)
        self.largest_bytes = max(self.largest_bytes, sum(tensor.nbytes for tensor in reply[1]))
        if self.fetched is not None:
            await self.fetched(int(header["key"].rpartition("/")[2]))
        return reply

    async def kept(self) -> int:
        """How many parts there are, and who waits for some, when it has heard that nobody fetches any more."""
        assert self.handling is not None
        await asyncio.wait({self.handling})
        return len(self.outbox) + len(self.outbox._waiters)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_PART_BYTES", 4_000)


@pytest.fixture(params=[True, False], ids=["shortcut", "libp2p"])
def receiver(request: pytest.FixtureRequest) -> Iterator[Node]:
    with Node(run_id="parts", limits=LIMITS, shortcuts=request.param) as node:
        yield node


def taken(receiver: Node, giver: Node, method: str = "large", what: str = "all") -> tuple[dict[str, Any], list[Tensor]]:
    return receiver.run(take(receiver, giver.peer_id, method, {"what": what}), timeout_s=30)


def test_what_is_larger_than_a_message_arrives_bit_for_bit_and_leaves_nothing_behind(receiver: Node) -> None:
    with Giver(receiver) as giver:
        header, tensors = taken(receiver, giver)
        assert header == {"asked": "all"}
        for sent, came in zip(TENSORS, tensors, strict=True):
            assert torch.equal(sent, came) and sent.dtype == came.dtype and sent.shape == came.shape
        assert giver.largest_bytes <= 4_000
        assert giver.run(giver.kept(), timeout_s=20) == 0


def test_nothing_is_kept_for_a_receiver_that_lets_go(receiver: Node) -> None:
    under_way, release = threading.Event(), asyncio.Event()

    async def hold(number: int) -> None:
        if number == 3:
            under_way.set()
            await release.wait()

    with Giver(receiver, hold) as giver:
        taking = receiver.spawn(take(receiver, giver.peer_id, "large", {"what": "all"}), "taking")
        assert under_way.wait(20) and len(giver.outbox)
        taking.cancel()
        assert giver.run(giver.kept(), timeout_s=20) == 0


def test_nothing_is_kept_for_a_receiver_that_vanishes(receiver: Node) -> None:
    under_way, release = threading.Event(), asyncio.Event()

    async def hold(number: int) -> None:
        under_way.set()
        await release.wait()

    with Giver(receiver, hold) as giver, contextlib.suppress(SwarmError, concurrent.futures.CancelledError):
        taking = receiver.spawn(take(receiver, giver.peer_id, "large", {"what": "all"}), "taking")
        assert under_way.wait(20) and len(giver.outbox)
        receiver.close()
        assert giver.run(giver.kept(), timeout_s=20) == 0
        taking.result(20)


def test_a_giver_that_vanishes_after_some_parts_is_an_error(receiver: Node) -> None:
    giver = Giver(receiver)

    async def vanish(number: int) -> None:
        if number == 3:
            threading.Thread(target=giver.close).start()
            await asyncio.Event().wait()

    giver.fetched = vanish
    with giver, pytest.raises(SwarmError):
        taken(receiver, giver)


def test_a_call_that_is_refused_or_ends_early_says_so(receiver: Node) -> None:
    with Giver(receiver) as giver:
        with pytest.raises(PeerStale, match="not of this step"):
            taken(receiver, giver, "other", "refuse")
        with pytest.raises(ProtocolError, match="has ended 'other' before all parts were fetched"):
            taken(receiver, giver, "other")
        with pytest.raises(CallerError, match="does not answer 'unknown'"):
            taken(receiver, giver, "unknown")


SHAPES = ((2, 3), (), (2,))
PIECES = [torch.zeros(4), torch.zeros(2), torch.zeros(1), torch.zeros(2)]


@pytest.mark.parametrize(
    ("shapes", "pieces"),
    [
        (SHAPES, PIECES[:-1]),
        (SHAPES, [*PIECES, torch.zeros(1)]),
        (SHAPES, [PIECES[0].double(), *PIECES[1:]]),
        (SHAPES, [PIECES[0].unsqueeze(0), *PIECES[1:]]),
        (SHAPES, [torch.zeros(7), *PIECES[3:]]),
        (((1 << 40, 1 << 40), *SHAPES), PIECES),
        ((*SHAPES, (0, 4)), PIECES),
    ],
)
def test_parts_that_are_not_what_was_announced_are_refused(shapes: Any, pieces: list[Tensor]) -> None:
    assert [tuple(tensor.shape) for tensor in _join(deque(PIECES), SHAPES)] == list(SHAPES)
    with pytest.raises(ProtocolError, match="that were announced"):
        _join(deque(pieces), shapes)


@pytest.mark.parametrize("shape", [(2, -3), (-2, -3), (1,) * 33])
def test_impossible_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="not a short list of sizes"):
        Offer.from_dict({"header": {}, "shapes": [shape], "parts": 1})


def test_the_least_is_one_part() -> None:
    assert _cut([]) == [[]] and _join(deque(), ()) == []
