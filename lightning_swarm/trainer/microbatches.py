"""One Lightning batch becomes several microbatches, and what their steps return becomes one step's result again.

A tensor whose first dimension is the batch size is cut along it, as is a plain list of that length; everything else
goes to every microbatch whole. Results are put together so that a loss that is a mean over samples comes out as that of
the whole batch: numbers are averaged with the microbatches' shares as weights, tensors with one row a sample are
concatenated.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._pytree import tree_flatten


@dataclass(frozen=True)
class Microbatch:
    """A part of a Lightning batch."""

    batch: Any
    """The part, of the same structure as the whole."""
    samples: int
    """How many samples it holds."""
    share: float
    """Its samples as a fraction of the whole batch."""


def batch_size(batch: Any) -> int:
    """The size that the first dimensions of the batch's tensors agree on.

    Raises:
        MisconfigurationException: No tensor of the batch has a dimension.
    """
    sizes = Counter(leaf.shape[0] for leaf in tree_flatten(_plain(batch))[0] if _has_rows(leaf))
    if not sizes:
        raise MisconfigurationException(
            f"The batch (a {type(batch).__name__}) has no tensor with a batch dimension, so it cannot be cut into "
            "microbatches. Let the first dimension of its tensors count the samples, or pass "
            "SwarmStrategy(microbatches=1) to send every batch as one piece."
        )
    return sizes.most_common(1)[0][0]


def split(batch: Any, count: int) -> list[Microbatch]:
    """Cut a batch into ``count`` microbatches whose sizes differ by one sample at most.

    Args:
        batch: Any nesting of tensors; tensors of shape ``(samples, ...)`` are cut, others are shared.
        count: How many; at most the batch size (the caller clamps it).
    """
    if count == 1:
        sizes = Counter(leaf.shape[0] for leaf in tree_flatten(_plain(batch))[0] if _has_rows(leaf))
        return [Microbatch(batch, sizes.most_common(1)[0][0] if sizes else 1, 1.0)]
    total = batch_size(batch)
    bounds = [total * i // count for i in range(count + 1)]
    return [
        Microbatch(_part(batch, total, low, high), high - low, (high - low) / total)
        for low, high in itertools.pairwise(bounds)
    ]


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _plain(value: Any) -> Any:
    """Mapping classes that pytree does not know (a Hugging Face ``BatchEncoding``) as dicts."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _part(value: Any, total: int, low: int, high: int) -> Any:
    if isinstance(value, Tensor):
        return value[low:high] if value.dim() > 0 and value.shape[0] == total else value
    if isinstance(value, list) and len(value) == total and not any(_holds_tensor(item) for item in value):
        return value[low:high]
    return _map(value, lambda item: _part(item, total, low, high))


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_flatten(_plain(value))[0])


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict) and type(value) is not dict:
        copied = value.copy()
        copied.update({k: function(v) for k, v in value.items()})
        return copied
    if isinstance(value, Mapping):
        return type(value)({k: function(v) for k, v in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(function(v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(function(v) for v in value)
    return value


def merge(results: Sequence[Any], microbatches: Sequence[Microbatch]) -> Any:
    """One result from those of a batch's microbatches, in their order.

    Zero-dimensional floating tensors and floats become their mean weighted by the microbatches' shares; tensors and
    lists with one row a sample are concatenated; containers are merged entry by entry; of anything else the last one
    counts.
    """
    if len(results) == 1:
        return results[0]
    first = results[0]
    present = [(r, m) for r, m in zip(results, microbatches) if r is not None]
    if first is None or len(present) < len(results):
        return merge([r for r, _ in present], [m for _, m in present]) if present else None
    if isinstance(first, Tensor):
        return _merge_tensors(results, microbatches)
    if isinstance(first, float):
        return sum(r * m.share for r, m in zip(results, microbatches)) / sum(m.share for m in microbatches)
    if isinstance(first, Mapping):
        merged = {k: merge([r[k] for r in results], microbatches) for k in first if all(k in r for r in results)}
        return merged if type(first) is dict else _map(first, lambda v: v).__class__(merged)
    if isinstance(first, list) and all(len(r) == m.samples for r, m in zip(results, microbatches)):
        return [item for r in results for item in r]
    if isinstance(first, (list, tuple)) and all(len(r) == len(first) for r in results):
        items = [merge(list(column), microbatches) for column in zip(*results)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return results[-1]


def _merge_tensors(results: Sequence[Tensor], microbatches: Sequence[Microbatch]) -> Any:
    if all(r.dim() > 0 and r.shape[0] == m.samples for r, m in zip(results, microbatches)):
        return torch.cat(list(results))
    same_shape = all(r.shape == results[0].shape for r in results)
    if same_shape and results[0].is_floating_point():
        total = sum(m.share for m in microbatches)
        return torch.stack([r * (m.share / total) for r, m in zip(results, microbatches)]).sum(0)
    return results[-1]
