"""What another worker sent is looked at before it is computed with: a peer that sends what cannot be right is blamed,
not the step that would fail because of it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_swarm.slicing.points import LeafSpec
from lightning_swarm.swarm.errors import NotFinite, ProtocolError

_CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(tensors: Sequence[Tensor], specs: Sequence[LeafSpec], source: str) -> None:
    """An activation has as many tensors as the plan says, each of its dtype and number of dimensions.

    Raises:
        ProtocolError: Blames ``source``.
    """
    expected = [(spec.dtype, len(spec.shape)) for spec in specs]
    came = [(tensor.dtype, tensor.dim()) for tensor in tensors]
    if came != expected:
        raise ProtocolError(f"{source} sent an activation of {_words(came)}; the plan says {_words(expected)}", source)


def check_gradients(tensors: Sequence[Tensor], outputs: Sequence[Tensor], source: str) -> list[Tensor | None]:
    """The gradients of these outputs out of what came: first which of them have one, then those.

    Raises:
        ProtocolError: They are not of the outputs' shapes and dtypes; blames ``source``.
    """
    flags = tensors[0] if tensors else None
    if flags is None or flags.dtype != torch.bool or flags.shape != (len(outputs),):
        raise ProtocolError(f"{source} sent gradients that do not say of which of {len(outputs)} tensors", source)
    marked = [output for output, flag in zip(outputs, flags.tolist()) if flag]
    expected = [(output.dtype, tuple(output.shape)) for output in marked]
    came = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors[1:]]
    if came != expected:
        raise ProtocolError(f"{source} sent gradients of {_words(came)} for tensors of {_words(expected)}", source)
    gradients = iter(tensors[1:])
    return [next(gradients) if flag else None for flag in flags.tolist()]


def check_not_nan(tensors: Sequence[Tensor], source: str, key: str) -> None:
    """NaN is what a broken worker makes of everything; an activation's infinities can be the model's own, as in a mask.

    Raises:
        NotFinite: Blames ``source``.
    """
    if any(has_nan(tensor) for tensor in tensors):
        raise NotFinite(f"{source} sent NaN in {key!r}", source)


def check_finite(tensors: Sequence[Tensor], source: str, key: str) -> None:
    """Gradients have no infinities either.

    Raises:
        NotFinite: Blames ``source``.
    """
    if any(not is_finite(tensor) for tensor in tensors):
        raise NotFinite(f"{source} sent NaN or infinities in {key!r}", source)


def has_nan(tensor: Tensor) -> bool:
    """Whether a value is NaN."""
    # One pass without memory for those that have none: a sum is NaN if a value is.
    return tensor.dtype in _CHECKED and math.isnan(tensor.sum().item()) and bool(tensor.isnan().any())


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # As above; a sum of many finite values may be infinite, too.
    if tensor.dtype not in _CHECKED or math.isfinite(tensor.sum().item()):
        return True
    return bool(tensor.isfinite().all())


def _words(shapes: Sequence[tuple[torch.dtype, int | tuple[int, ...]]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for dtype, shape in shapes) or "nothing"
