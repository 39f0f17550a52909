"""What else a step's end needs from a stage's workers: the norm of the gradients, and running buffers averaged.

Both must come out the same whoever computes them: replicas of a stage stay bit-identical, and a reproducible run clips
alike whatever its workers are. So values are added in float64, in blocks of a fixed size, and the blocks' sums exactly.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

# The blocks fit a core's cache as float64. A block's length must not change: it decides how the sum is rounded.
_BLOCK = 1 << 14
_BLOCKS_AT_ONCE = 8


def squared_norm(*gradients: Tensor) -> float:
    """The sum of the squares of all values, in float64.

    Finite exactly if every value is, which is the flag that a loss scale needs (float64 gradients beyond 1e150 aside).

    Args:
        gradients: Real floating-point tensors of any shape and device.
    """
    sums: list[float] = []
    for gradient in gradients:
        flat = gradient.detach().reshape(-1)
        whole = len(flat) - len(flat) % _BLOCK
        rows = flat[:whole].view(-1, _BLOCK)
        buffer = torch.empty(min(_BLOCKS_AT_ONCE, len(rows)), _BLOCK, dtype=torch.float64, device=flat.device)
        partial = [flat[whole:].double().square().sum().view(1)]
        for some in rows.split(_BLOCKS_AT_ONCE):
            squares = buffer[: len(some)].copy_(some).square_()
            partial.append(squares.sum(dim=1))
        sums += torch.cat(partial).tolist()
    return math.fsum(sums)


def weighted_buffers(before: Mapping[str, Tensor], now: Mapping[str, Tensor], samples: int) -> Tensor:
    """A worker's running buffers (BatchNorm's mean and variance) as a vector to sum over the stage's workers.

    Args:
        before: The buffers at the beginning of the step, the same on every replica, in the same order.
        now: The buffers at its end.
        samples: How many samples this worker's buffers have seen in the step; without any, it need not contribute.
    """
    parts = [
        _values(now[name]) * samples if _is_averaged(old) else _values(now[name]) - _values(old)
        for name, old in before.items()
    ]
    return torch.cat([*parts, torch.tensor([samples], dtype=torch.float64)])


def averaged_buffers(before: Mapping[str, Tensor], vector: Tensor) -> dict[str, Tensor]:
    """The buffers after the step; bit-identical on all replicas.

    Floating-point buffers become the mean over the workers, weighted by samples; those that count (integers such as
    ``num_batches_tracked``) grow by what all workers counted together. Where nobody saw a sample they stay as before.

    Args:
        before: As given to `weighted_buffers`.
        vector: The sum of `weighted_buffers` over the workers.

    Returns:
        New tensors, on the buffers' devices.
    """
    samples = vector[-1]
    result, start = {}, 0
    for name, old in before.items():
        values = _values(old)
        came = vector[start : start + len(values)]
        start += len(values)
        if not samples > 0:
            values = values.clone()
        else:
            values = came / samples if _is_averaged(old) else values + came
        if old.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        elif old.dtype == torch.bool:
            values = values > 0
        result[name] = values.view(old.shape).to(old.device, old.dtype)
    return result


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _values(buffer: Tensor) -> Tensor:
    buffer = buffer.detach().cpu()
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).to(torch.float64).reshape(-1)
