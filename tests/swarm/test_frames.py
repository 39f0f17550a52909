"""A frame is read as it was written, and what is no frame is refused before it costs anything."""

import random

import pytest
import torch

from lightning_swarm.swarm.codec import encode
from lightning_swarm.swarm.errors import CallerError, ProtocolError
from lightning_swarm.swarm.frames import (
    NO_TOKEN,
    PREFIX_BYTES,
    REQUEST,
    Limits,
    check_lengths,
    make_slots,
    make_token,
    pack,
    unpack_header,
    unpack_prefix,
)


def test_a_frame_comes_back() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    buffers, meta = encode(tensor)
    data = b"".join(pack(REQUEST, NO_TOKEN, ["echo", {"key": (1, "a"), 3: None}, [meta]], buffers, Limits()))
    prefix = unpack_prefix(data[:PREFIX_BYTES])
    body = PREFIX_BYTES + prefix.header_bytes
    assert prefix.kind == REQUEST and len(data) == body + prefix.body_bytes
    method, header, metas = unpack_header(data[PREFIX_BYTES:body])
    assert (method, header) == ("echo", {"key": (1, "a"), 3: None})
    (slot,) = make_slots(metas, prefix.body_bytes, Limits())
    slot.buffers[0][:] = data[body:]
    assert torch.equal(slot.tensor(), tensor)


def test_a_header_that_msgpack_cannot_carry_is_the_callers_mistake() -> None:
    with pytest.raises(CallerError, match="only numbers, strings"):
        pack(REQUEST, NO_TOKEN, {"x": object()}, [], Limits())


def test_too_much_is_refused_on_both_sides() -> None:
    limits = Limits(header_bytes=100, body_bytes=100)
    with pytest.raises(CallerError, match="at most 100 are accepted"):
        pack(REQUEST, NO_TOKEN, {}, [bytes(101)], limits)
    with pytest.raises(CallerError, match="1 to 100 are accepted"):
        pack(REQUEST, NO_TOKEN, {"x": "x" * 100}, [], limits)
    for lengths in ((0, 0), (101, 0), (1, 101)):
        with pytest.raises(ProtocolError):
            check_lengths(*lengths, limits)


def test_tensors_must_need_exactly_what_is_announced() -> None:
    with pytest.raises(ProtocolError, match="tensors of 12 bytes and announces 13"):
        make_slots((("float32", (3,)),), 13, Limits())
    with pytest.raises(ProtocolError):
        make_slots((("uint8", ()),) * 3, 3, Limits(tensors=2))


def test_another_version_is_named() -> None:
    data = bytearray(pack(REQUEST, NO_TOKEN, {}, [], Limits())[0])
    data[3] = 7
    with pytest.raises(ProtocolError, match="version 7 of the protocol, this one version 1"):
        unpack_prefix(bytes(data[:PREFIX_BYTES]))


def test_a_token_is_for_one_peer_of_one_run() -> None:
    token = make_token(b"secret", "run", "peer")
    others = [("secret", "run", "other"), ("secret", "other", "peer"), ("other", "run", "peer")]
    assert len(token) == 32
    assert all(make_token(secret.encode(), run, peer) != token for secret, run, peer in others)
    assert make_token(None, "run", "peer") == NO_TOKEN


def test_random_bytes_are_refused() -> None:
    rng = random.Random(0)
    for _ in range(10_000):
        with pytest.raises(ProtocolError):
            unpack_prefix(rng.randbytes(PREFIX_BYTES))
        data = rng.randbytes(rng.randrange(64))
        try:
            unpack_header(data)
        except ProtocolError:
            continue


def test_a_deeply_nested_header_is_refused() -> None:
    with pytest.raises(ProtocolError):
        unpack_header(b"\x91" * 100_000)
