"""Whatever bytes come, in whatever pieces, end in a handler's call or in a closed stream."""

import asyncio
import gc
import math
import os
import random
import time
import tracemalloc
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import uvloop

from lightning_swarm._compat_hivemind import PeerID, p2pd_pb2
from lightning_swarm.swarm import answering
from lightning_swarm.swarm.answering import Answerer, _Answering, _AnsweringNeighbour
from lightning_swarm.swarm.calling import Caller
from lightning_swarm.swarm.codec import encode
from lightning_swarm.swarm.errors import ProtocolError
from lightning_swarm.swarm.frames import (
    FAILURE,
    PREFIX_BYTES,
    REPLY,
    REQUEST,
    Limits,
    pack,
    unpack_header,
    unpack_prefix,
)
from lightning_swarm.swarm.opening import CallingStream
from lightning_swarm.swarm.rpc import Context
from lightning_swarm.swarm.shortcut import Shortcut, machine
from lightning_swarm.swarm.stream import length_prefixed

CALLER = PeerID(b"\x12\x20" + bytes(32))
NOWHERE = os.open(os.devnull, os.O_RDONLY)
LIMITS = Limits(header_bytes=10_000, body_bytes=100_000, streams_per_peer=2)


class Wire:
    """Stands for the socket: what is sent is kept."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def writelines(self, buffers: Sequence[bytes]) -> None:
        for buffer in buffers:
            self.sent += buffer

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return self

    def fileno(self) -> int:
        return NOWHERE

    def abort(self) -> None:
        self.closed = True

    close = abort


class Peer:
    """An answering peer without a network."""

    def __init__(self, secret: bytes | None = None, limits: Limits = LIMITS) -> None:
        self.context = Context("run", "me", secret, "/nowhere", limits, ThreadPoolExecutor(1))
        self.answerer = Answerer(self.context)
        self.calls: list[tuple[str, dict, list[torch.Tensor]]] = []
        self.answerer.handlers["echo"] = self.echo
        self.token = self.context.token_of(CALLER.to_base58())

    async def echo(self, caller: str, header: dict, tensors: list[torch.Tensor]) -> tuple[dict, list[torch.Tensor]]:
        self.calls.append((caller, header, tensors))
        return header, tensors

    def stream(self) -> tuple[_Answering, Wire]:
        stream, wire = _Answering(self.answerer), Wire()
        stream.connection_made(wire)  # type: ignore[arg-type]
        hello = p2pd_pb2.StreamInfo(peer=CALLER.to_bytes(), addr=b"", proto="p")
        self.feed(stream, wire, length_prefixed(hello.SerializeToString()))
        return stream, wire

    @staticmethod
    def feed(stream: _Answering, wire: Wire, data: bytes, piece: Callable[[], int] = lambda: 1 << 20) -> None:
        while data and not wire.closed:
            buffer = stream.get_buffer(65_536)
            size = min(len(buffer), len(data), piece())
            buffer[:size] = data[:size]
            stream.buffer_updated(size)
            data = data[size:]

    def request(self, header: Any, tensors: Sequence[torch.Tensor] = (), codec: str = "none") -> bytes:
        parts = [encode(tensor, codec) for tensor in tensors]
        buffers = [buffer for part, _ in parts for buffer in part]
        content = ("echo", header, [meta for _, meta in parts], codec, 5.0)
        return b"".join(pack(REQUEST, self.token, content, buffers, Limits()))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(test())


def answer(wire: Wire) -> tuple[int, Any]:
    prefix = unpack_prefix(bytes(wire.sent[:PREFIX_BYTES]))
    return prefix.kind, unpack_header(bytes(wire.sent[PREFIX_BYTES : PREFIX_BYTES + prefix.header_bytes]))


@pytest.mark.parametrize("piece", [1, 7, 51, 52, 53, 1 << 20])
def test_requests_are_read_in_pieces_of_any_size(piece: int) -> None:
    tensors = [torch.arange(10.0), torch.zeros(0), torch.arange(20_000, dtype=torch.int32), torch.tensor(True)]

    async def test() -> None:
        peer = Peer()
        stream, wire = peer.stream()
        for number in range(2):
            wire.sent.clear()
            peer.feed(stream, wire, peer.request({"n": number}, tensors), lambda: piece)
            await asyncio.sleep(0.01)
            assert answer(wire)[0] == REPLY
        assert [header["n"] for _, header, _ in peer.calls] == [0, 1]
        assert all(torch.equal(*pair) for pair in zip(peer.calls[1][2], tensors, strict=True))
        assert peer.calls[0][0] == CALLER.to_base58() and stream.is_clean

    run(test)


def test_a_second_request_before_the_answer_ends_the_stream_and_the_handler() -> None:
    async def test() -> None:
        peer = Peer()
        cancelled = asyncio.Event()

        async def wait(*_: Any) -> Any:
            try:
                await asyncio.sleep(100)
            finally:
                cancelled.set()

        peer.answerer.handlers["echo"] = wait
        stream, wire = peer.stream()
        peer.feed(stream, wire, peer.request({}))
        await asyncio.sleep(0)
        peer.feed(stream, wire, peer.request({}))
        assert wire.closed and not wire.sent
        await asyncio.wait_for(cancelled.wait(), 5)
        assert not peer.answerer.streams and not peer.answerer.streams_of

    run(test)


def test_a_handler_whose_caller_is_cut_off_ends_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_GRACE_S", -4.99)

    async def test() -> None:
        peer = Peer()
        peer.answerer.handlers["echo"] = lambda *_: asyncio.sleep(100)  # type: ignore[assignment]
        stream, wire = peer.stream()
        peer.feed(stream, wire, peer.request({}))
        (task,) = asyncio.all_tasks() - {asyncio.current_task()}
        await task
        assert answer(wire)[1]["kind"] == "DeadlineExceeded" and stream.is_clean

    run(test)


def test_nothing_is_answered_without_the_secret() -> None:
    async def test() -> None:
        peer = Peer(secret=b"secret")
        for request in (Peer().request({}), Peer(secret=b"other").request({}, [torch.zeros(3)])):
            stream, wire = peer.stream()
            peer.feed(stream, wire, request)
            await asyncio.sleep(0)
            assert wire.closed and not wire.sent
        stream, wire = peer.stream()
        peer.feed(stream, wire, peer.request({}))
        await asyncio.sleep(0.01)
        assert answer(wire)[0] == REPLY and len(peer.calls) == 1 and peer.answerer.refused == 2

    run(test)


@pytest.mark.parametrize(
    ("request_bytes", "kind", "message"),
    [
        (lambda peer: peer.request({"x": "x" * 10_000}), "CallerError", "1 to 10000 are accepted"),
        (lambda peer: peer.request({}, [torch.zeros(30_000)]), "CallerError", "at most 100000 are accepted"),
        (lambda peer: b"".join(pack(REQUEST, peer.token, 3, [], LIMITS)), "CallerError", "malformed"),
        (
            lambda peer: b"".join(pack(REQUEST, peer.token, ("echo", {}, [], "none", -1), [], LIMITS)),
            "CallerError",
            "deadline",
        ),
        (
            lambda peer: b"".join(pack(REQUEST, peer.token, ("no", {}, [], "none", 1), [], LIMITS)),
            "CallerError",
            "'no'",
        ),
    ],
    ids=["header", "body", "shape", "deadline", "method"],
)
def test_a_caller_with_the_secret_hears_what_is_wrong(request_bytes: Any, kind: str, message: str) -> None:
    async def test() -> None:
        peer = Peer(secret=b"secret")
        stream, wire = peer.stream()
        peer.feed(stream, wire, request_bytes(peer))
        await asyncio.sleep(0.01)
        code, error = answer(wire)
        assert code == FAILURE and error["kind"] == kind and message in error["message"] and not peer.calls

    run(test)


def test_too_many_streams_of_one_peer_are_told_that_it_is_busy() -> None:
    async def test() -> None:
        peer = Peer()
        streams = [peer.stream() for _ in range(3)]
        stream, wire = streams[-1]
        peer.feed(stream, wire, peer.request({}))
        assert answer(wire)[1]["kind"] == "PeerBusy" and wire.closed

    run(test)


def test_a_frame_that_stands_still_is_given_up() -> None:
    async def test() -> None:
        peer = Peer()
        half, half_wire = peer.stream()
        _, idle_wire = peer.stream()
        peer.feed(half, half_wire, peer.request({}, [torch.zeros(1000)])[:-1])
        peer.answerer.sweep()
        assert not half_wire.closed
        peer.answerer.sweep()
        assert half_wire.closed and not idle_wire.closed

    run(test)


def mutations(rng: random.Random, valid: bytes) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 200))
    data = bytearray(valid)
    if kind == 1:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.randrange(1, 8)):
        start = 0 if kind == 2 else PREFIX_BYTES if kind == 3 else 5
        data[rng.randrange(start, len(data))] = rng.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("secret", [None, b"secret"], ids=["open run", "with secret"])
def test_ten_thousand_random_messages_do_nothing(secret: bytes | None) -> None:
    async def test() -> None:
        rng = random.Random(0)
        peer, stranger = Peer(secret), Peer(b"another" if secret else None)
        peer.answerer.handlers["echo"] = stranger.echo
        valid = stranger.request({"key": (1, "a"), "n": [None, 2.5]}, [torch.arange(5.0), torch.zeros(3)])

        async def send(count: int) -> None:
            for _ in range(count):
                stream, wire = peer.stream()
                peer.feed(stream, wire, mutations(rng, valid), lambda: rng.randrange(1, 300))
                await asyncio.sleep(0)
                if not wire.closed:
                    stream.abort()
                stream.connection_lost(None)
            stranger.calls.clear()
            await asyncio.sleep(0)
            gc.collect()

        await send(1000)
        tracemalloc.start()
        await send(500)
        before = tracemalloc.get_traced_memory()[0]
        await send(500)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        await send(8000)
        assert grown < 20_000 and not peer.answerer.streams and not peer.answerer.streams_of
        assert peer.answerer.refused > 3000
        if secret:
            assert not stranger.calls and not peer.context.sent and not peer.context.received
        stream, wire = peer.stream()
        peer.feed(stream, wire, peer.request({}))
        await asyncio.sleep(0.01)
        assert answer(wire)[0] == REPLY

    run(test)


def test_the_shortcut_is_for_those_with_a_ticket() -> None:
    async def test() -> None:
        peer = Peer()
        tickets = peer.answerer.tickets
        request = {"machine": machine()}
        ticket = Shortcut.from_dict(tickets.answer(CALLER.to_base58(), request)).ticket
        assert tickets.answer("any", {"machine": "another"}) == tickets.answer("any", {}) == {}
        assert tickets.answer(CALLER.to_base58(), request)["ticket"] == ticket
        for shown in (ticket, ticket[:-1], bytes(40), b"\x00", ticket[:32] + b"somebody else"):
            stream, wire = _AnsweringNeighbour(peer.answerer), Wire()
            stream.connection_made(wire)  # type: ignore[arg-type]
            peer.feed(stream, wire, length_prefixed(shown))
            assert wire.closed == (shown != ticket)
            peer.feed(stream, wire, peer.request({}))
            await asyncio.sleep(0)
        assert [caller for caller, _, _ in peer.calls] == [CALLER.to_base58()]

    run(test)


@pytest.mark.parametrize(
    ("path", "ticket"),
    [
        ("/var/run/docker.sock", bytes(32) + b"me"),
        ("/tmp/lightning-swarm-x/p2pd.sock", bytes(32) + b"me"),
        ("/tmp/lightning-swarm-x/../direct.sock", bytes(32) + b"me"),
        ("/tmp/lightning-swarm-x/direct.sock", bytes(32) + b"you"),
        ("/tmp/lightning-swarm-x/direct.sock", b"me"),
    ],
)
def test_a_liar_cannot_lead_us_into_other_programs_sockets(path: str, ticket: bytes) -> None:
    Shortcut("/tmp/lightning-swarm-x/direct.sock", bytes(32) + b"me").check("me")
    with pytest.raises(ProtocolError):
        Shortcut(path, ticket).check("me")


def test_a_caller_knows_for_how_long_a_peer_that_owes_an_answer_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caller, peer = Caller(Peer().context, shortcuts=False), CALLER.to_base58()
    assert caller.silent_s(peer) == math.inf
    one, other = (CallingStream(Peer().context, peer) for _ in range(2))
    caller._busy |= {one, other, CallingStream(Peer().context, PeerID(b"\x12\x20" + bytes(31) + b"1").to_base58())}
    now = 130.0
    assert caller.silent_s(peer) == 30.0
    other.get_buffer(1)[0] = 5
    other.buffer_updated(1)
    now = 131.0
    assert caller.silent_s(peer) == 1.0
