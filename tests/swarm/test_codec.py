"""Tensors come back as they were, and no description of a tensor does harm."""

import math
import random

import msgpack
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_swarm.swarm.codec import CODECS, Slot, decode, encode, is_cheap
from lightning_swarm.swarm.errors import CallerError, ProtocolError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def round_trip(tensor: torch.Tensor, codec: str = "none") -> torch.Tensor:
    buffers, meta = encode(tensor, codec)
    meta = msgpack.unpackb(msgpack.packb(meta), use_list=False)
    return decode(meta, b"".join(buffers))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (4, 5), (2, 1, 3, 1)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    back = round_trip(tensor)
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6).t(),
        torch.randn(8)[::2],
        torch.randn(1, 4).expand(3, 4),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "channels last"],
)
def test_any_layout_comes_back_with_its_values(tensor: torch.Tensor) -> None:
    assert torch.equal(round_trip(tensor), tensor)


def test_what_comes_is_ours_to_write_and_to_train() -> None:
    parameter = torch.nn.Parameter(torch.randn(5))
    back = round_trip(parameter)
    before = parameter.detach().clone()
    back.add_(1)
    assert torch.equal(parameter, before) and back.is_leaf and not back.requires_grad and not back._is_view()
    back.requires_grad_().sum().backward()


def test_a_contiguous_cpu_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4)
    (buffer,), _ = encode(tensor)
    tensor[0] = 1
    assert bytes(buffer)[:4] == torch.ones(1).numpy().tobytes()


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_byte_codecs_cost_two_bytes_and_round_as_a_cast(codec: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 33, dtype=dtype)
    buffers, meta = encode(tensor, codec)
    assert sum(map(len, buffers)) == Slot(meta).bytes == 2 * tensor.numel()
    wire = torch.float16 if codec == "fp16" else torch.bfloat16
    assert torch.equal(round_trip(tensor, codec), tensor.to(wire).to(dtype))


@pytest.mark.parametrize("codec", CODECS)
def test_values_that_are_not_finite_stay_visible(codec: str) -> None:
    back = round_trip(torch.tensor([1.0, float("inf"), float("nan"), -float("inf")]), codec)
    assert back.isinf().tolist() == [False, True, False, True] and back.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.float8_e5m2], ids=str)
def test_only_floating_point_is_ever_compressed(codec: str, dtype: torch.dtype) -> None:
    _, meta = encode(torch.zeros(3, dtype=dtype), codec)
    assert len(meta) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000])
def test_int8_costs_one_byte_and_errs_by_a_percent(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size).to(dtype)
    buffers, meta = encode(tensor, "int8")
    assert sum(map(len, buffers)) == Slot(meta).bytes == size + 4 * math.ceil(size / 256)
    back = round_trip(tensor, "int8")
    assert back.dtype == dtype
    assert (back.double() - tensor.double()).norm() <= 0.03 * tensor.double().norm()


def test_int8_gives_the_same_bytes_every_time() -> None:
    tensor = torch.randn(1000)
    assert b"".join(encode(tensor, "int8")[0]) == b"".join(encode(tensor.clone(), "int8")[0])


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, device="meta"), torch.zeros(3).to_sparse(), fake()], ids=["meta", "sparse", "fake"]
)
def test_tensors_without_plain_memory_are_the_callers_mistake(tensor: torch.Tensor) -> None:
    with pytest.raises(CallerError, match="no plain memory"):
        encode(tensor)


def test_a_tensor_with_a_class_of_its_own_arrives_as_a_tensor() -> None:
    class Image(torch.Tensor):
        pass

    image = torch.randn(3, 2).as_subclass(Image)
    assert type(round_trip(image)) is torch.Tensor and torch.equal(round_trip(image), image.as_subclass(torch.Tensor))


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(CallerError, match="zip.*none, fp16, bf16, int8"):
        encode(torch.zeros(1), "zip")


def test_a_loop_may_encode_what_is_small_or_free() -> None:
    large = torch.empty(1 << 20)
    assert is_cheap(large, "none") and not is_cheap(large, "bf16") and is_cheap(large[:1000], "bf16")
    assert not is_cheap(large.view(1024, 1024).t(), "none")


@pytest.mark.parametrize(
    "meta",
    [
        None,
        (),
        ("float32",),
        ("float33", ()),
        (b"float32", ()),
        (["float32"], ()),
        ("float32", 3),
        ("float32", (-1,)),
        ("float32", (True,)),
        ("float32", (1.0,)),
        ("float32", (1 << 40, 1 << 40)),
        ("float32", (1 << 47,)),
        ("float32", tuple([1] * 100)),
        ("float32", (2,), "zip"),
        ("float32", (2,), ["fp16"]),
        ("int64", (2,), "fp16"),
        ("float32", (0,), "int8"),
        ("bool", (2,), "int8"),
        ("float32", (2,), "none", 1),
    ],
    ids=repr,
)
def test_a_malformed_description_allocates_nothing(meta: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("allocated"))
    with pytest.raises(ProtocolError):
        Slot(meta)


def test_bytes_that_do_not_fit_are_refused() -> None:
    buffers, meta = encode(torch.zeros(4))
    with pytest.raises(ProtocolError, match="16 bytes, 15 came"):
        decode(meta, b"".join(buffers)[:-1])


def random_value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind < 7:
        return rng.choice(
            ["float32", "int8", "fp16", "none", "", None, True, 0, 1, 3, -1, 2**63, 1.5, float("nan"), b"x", "bfloat16"]
        )
    items = [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return tuple(items) if kind == 7 else {str(index): item for index, item in enumerate(items)}


def test_random_descriptions_are_refused_or_harmless() -> None:
    rng = random.Random(0)
    for _ in range(10_000):
        meta = tuple(random_value(rng) for _ in range(rng.randrange(1, 5)))
        try:
            size = Slot(meta).bytes
        except ProtocolError:
            continue
        assert decode(meta, bytes(size)).numel() < 1000
