"""How a tensor becomes bytes and comes back.

`encode` gives a tensor's bytes, without a copy where its memory can be sent as it is, and the small `meta` that travels
in a frame's header. `Slot` is the way back: it checks a meta, then makes the tensor's memory, once, and offers it as
buffers for the socket to read into. Nothing here does I/O.

Codecs: ``"none"`` sends the bytes as they are, ``"fp16"`` and ``"bf16"`` cast wider floating-point tensors to two bytes
(what overflows in fp16 becomes infinite, so that a loss scale still sees it), ``"int8"`` quantizes blocks of 256 values
with bitsandbytes (relative error about 1 %, 1.016 bytes a value). What a codec would not make smaller, integers, bool,
and for ``"int8"`` tensors with values that are not finite, travels raw.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_swarm.swarm.errors import CallerError, ProtocolError

Buffer: TypeAlias = bytes | memoryview
Meta: TypeAlias = Sequence[Any]

CODECS = ("none", "fp16", "bf16", "int8")
MAX_DIMENSIONS = 32
_BLOCK = 256
_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 "
    "float16 bfloat16 float32 float64 complex32 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}
_WIDE = (torch.float32, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)
_NUMPY = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}


def encode(tensor: Tensor, codec: str = "none") -> tuple[list[Buffer], Meta]:
    """A tensor's bytes and the meta that describes them.

    Args:
        tensor: Any dense tensor on any device. With ``"none"`` a contiguous CPU tensor is not copied: it must not be
            changed until its bytes were sent.
        codec: One of `CODECS`.

    Returns:
        The buffers, to be sent in order, and ``[dtype, shape]`` or ``[dtype, shape, codec]``.

    Raises:
        CallerError: For an unknown codec or a tensor that has no plain memory (sparse, quantized, fake, meta).
    """
    dtype = tensor.dtype
    if codec not in CODECS:
        raise CallerError(f"Unknown codec {codec!r}; known are: {', '.join(CODECS)}.")
    name = _NAME_OF.get(dtype)
    if type(tensor) not in _PLAIN and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        tensor = tensor.as_subclass(Tensor)  # an image or a mask is a tensor with a name; it arrives without it
    if name is None or tensor.layout != torch.strided or tensor.is_meta or type(tensor) not in _PLAIN:
        raise CallerError(f"A {type(tensor).__name__} of {dtype} on {tensor.device} has no plain memory to send.")
    plain = tensor.detach().resolve_conj().resolve_neg()
    shape = tuple(tensor.shape)
    if codec in _CASTS and dtype in _WIDE:
        return [_bytes_of(plain.to(_CASTS[codec]))], [name, shape, codec]
    if codec == "int8" and dtype.is_floating_point and dtype.itemsize > 1 and plain.numel():
        wide = plain.to("cpu", torch.float32).contiguous().view(-1)
        if math.isfinite(wide.sum().item()):
            from bitsandbytes.functional import quantize_blockwise

            codes, state = quantize_blockwise(wide, blocksize=_BLOCK)
            return [_bytes_of(state.absmax), _bytes_of(codes)], [name, shape, codec]
    return [_bytes_of(plain)], [name, shape]


def _bytes_of(tensor: Tensor) -> Buffer:
    return _memory_of(tensor.cpu().contiguous()) if tensor.numel() else b""


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor that has some. NumPy's way is the fastest, for the dtypes that it knows."""
    if tensor.dtype in _NUMPY:
        return tensor.numpy().data.cast("B")
    return tensor.view(-1).view(torch.uint8).numpy().data


def is_cheap(tensor: Tensor, codec: str, limit_bytes: int = 1 << 20) -> bool:
    """Whether `encode` takes so little time that an event loop may do it: no copy, or a small one."""
    if tensor.device.type != "cpu":
        return False
    return tensor.nbytes <= limit_bytes or (codec == "none" and tensor.is_contiguous())


def _wire(
    meta: Any,
) -> tuple[torch.dtype, tuple[int, ...], str, list[tuple[int, torch.dtype]]]:
    """A checked meta as dtype, shape, codec, and the (number of elements, dtype) of each array on the wire."""
    if not isinstance(meta, (list, tuple)) or len(meta) not in (2, 3):
        raise ProtocolError("The description of a tensor is not [dtype, shape] or [dtype, shape, codec].")
    name, shape = meta[0], meta[1]
    codec = meta[2] if len(meta) == 3 else "none"
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ProtocolError(f"A tensor is said to be of an unknown dtype {str(name)[:40]!r}.")
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMENSIONS:
        raise ProtocolError("A tensor's shape is not a short list of integers.")
    for size in shape:
        if type(size) is not int or not 0 <= size < 1 << 48:
            raise ProtocolError("A tensor's shape is not a short list of sizes.")
    numel = math.prod(shape)
    if numel * dtype.itemsize >= 1 << 48:
        raise ProtocolError("A tensor is said to be larger than any memory.")
    if not isinstance(codec, str):
        raise ProtocolError("A tensor's codec is not named by a string.")
    if codec == "none":
        arrays = [(numel, dtype)]
    elif codec in _CASTS and dtype in _WIDE:
        arrays = [(numel, _CASTS[codec])]
    elif codec == "int8" and dtype.is_floating_point and dtype.itemsize > 1 and numel:
        arrays = [(-(-numel // _BLOCK), torch.float32), (numel, torch.uint8)]
    else:
        raise ProtocolError(f"A tensor of {dtype} is said to be encoded as {codec[:40]!r}.")
    return dtype, tuple(shape), codec, arrays


class Slot:
    """The place of one tensor that is about to arrive.

    Args:
        meta: What `encode` gave on the other side.

    Attributes:
        bytes: How many will come for it.
        buffers: Once `allocate` was called: writable buffers to fill, in order; none for a tensor without elements.
        heavy: Whether `tensor` has to compute (anything but the codec ``"none"``) on more than about 1 MB.

    Raises:
        ProtocolError: When the meta is malformed.
    """

    __slots__ = ("_arrays", "_codec", "_dtype", "_layout", "_shape", "buffers", "bytes")

    def __init__(self, meta: Any) -> None:
        self._dtype, self._shape, self._codec, self._layout = _wire(meta)
        self.bytes = sum([numel * dtype.itemsize for numel, dtype in self._layout])
        self.buffers: list[memoryview] = []

    @property
    def heavy(self) -> bool:
        return self._codec != "none" and self.bytes > 1 << 19

    def allocate(self) -> None:
        """Makes the memory."""
        shapes = [self._shape] if self._codec == "none" else [(numel,) for numel, _ in self._layout]
        try:
            self._arrays = [torch.empty(shape, dtype=dtype) for shape, (_, dtype) in zip(shapes, self._layout)]
        except RuntimeError as error:
            raise ProtocolError(f"There is no memory for a tensor of {self._dtype} and shape {self._shape}.") from error
        if self.bytes:
            self.buffers = [_memory_of(array) for array in self._arrays]

    def tensor(self) -> Tensor:
        """The tensor, on CPU, in memory of its own, once the buffers are full."""
        self.buffers = []
        if self._codec == "none":
            return self._arrays[0]
        if self._codec == "int8":
            from bitsandbytes.functional import (
                QuantState,
                create_dynamic_map,
                dequantize_blockwise,
            )

            absmax, codes = self._arrays
            state = QuantState(absmax, code=create_dynamic_map(), blocksize=_BLOCK, dtype=torch.float32)
            values = dequantize_blockwise(codes, quant_state=state)
        else:
            values = self._arrays[0]
        return values.to(self._dtype).view(self._shape)


def decode(meta: Meta, data: bytes) -> Tensor:
    """The tensor that `encode` turned into ``meta`` and ``data`` (its buffers joined).

    Raises:
        ProtocolError: When they do not fit each other.
    """
    slot, start = Slot(meta), 0
    if slot.bytes != len(data):
        raise ProtocolError(f"A tensor needs {slot.bytes} bytes, {len(data)} came.")
    slot.allocate()
    for buffer in slot.buffers:
        buffer[:] = data[start : start + len(buffer)]
        start += len(buffer)
    return slot.tensor()
