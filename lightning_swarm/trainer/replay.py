"""What the workers' steps did besides computing, done on the trainer where Lightning expects it.

The records of a batch's microbatches become one record a call: a logged number is their mean weighted by samples (or
their sum, minimum or maximum, as its ``reduce_fx`` says), a metric's state is merged microbatch by microbatch.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_swarm.trainer.microbatches import Microbatch

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max", "amin": "min", "amax": "max"}


def replay(
    module: LightningModule, effects: Sequence[Sequence[dict[str, Any]]], microbatches: Sequence[Microbatch]
) -> None:
    """Apply the effects of one batch.

    Args:
        module: The trainer's module; its ``log`` is called, its metrics and plain attributes are updated.
        effects: By microbatch and then by stage, what the workers recorded (``worker/recorder.py``).
        microbatches: Their sizes.
    """
    metrics = {name: m for name, m in module.named_modules() if isinstance(m, Metric)}
    _replay_metrics(metrics, effects)
    for of_stages in effects:
        for effect in of_stages:
            for name, value in effect.get("assigned", {}).items():
                setattr(module, name, value)
            for name, items in effect.get("appended", {}).items():
                getattr(module, name).extend(items)
    for name, value, options in merged_logs(effects, microbatches):
        is_metric = isinstance(value, tuple) and value[:1] == ("metric",)
        module.log(name, metrics[value[1]] if is_metric else value, **options)


def merged_logs(
    effects: Sequence[Sequence[dict[str, Any]]], microbatches: Sequence[Microbatch]
) -> list[tuple[str, Any, dict[str, Any]]]:
    """One ``(name, value, options)`` for every call of ``self.log`` that the step makes."""
    calls: dict[tuple[str, int], list[tuple[Any, float, dict[str, Any]]]] = defaultdict(list)
    for of_stages, microbatch in zip(effects, microbatches):
        seen: dict[str, int] = defaultdict(int)
        for effect in of_stages:
            for name, value, options in effect.get("logs", ()):
                weight = options.get("batch_size") or microbatch.samples
                calls[name, seen[name]].append((value, weight, options))
                seen[name] += 1
    merged = []
    for (name, _), values in calls.items():
        options = dict(values[0][2])
        options["batch_size"] = int(sum(weight for _, weight, _ in values)) or 1
        merged.append((name, _reduced(values, options.get("reduce_fx", "mean")), options))
    return merged


def _reduced(values: list[tuple[Any, float, dict[str, Any]]], reduce_fx: str) -> Any:
    first = values[0][0]
    if len(values) == 1 or isinstance(first, tuple):
        return first
    numbers = torch.stack([torch.as_tensor(v, dtype=_float_of(v)) for v, _, _ in values])
    how = _REDUCTIONS.get(reduce_fx, "mean")
    if how == "mean":
        weights = torch.tensor([w for _, w, _ in values], dtype=numbers.dtype)
        return (numbers * weights.view(-1, *[1] * (numbers.dim() - 1))).sum(0) / weights.sum()
    return getattr(torch, {"sum": "sum", "min": "amin", "max": "amax"}[how])(numbers, 0)


def _float_of(value: Any) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else torch.float32


def _replay_metrics(metrics: dict[str, Metric], effects: Sequence[Sequence[dict[str, Any]]]) -> None:
    deltas: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for of_stages in effects:
        for effect in of_stages:
            for name, delta in effect.get("metrics", {}).items():
                deltas[name].append(delta)
    for name, of_metric in deltas.items():
        metric = metrics[name]
        value = of_metric[-1]["value"]
        if value is not None and len(of_metric) > 1:
            batch = metric.clone()
            batch.reset()
            for delta in of_metric:
                _merge(batch, delta)
            value = batch.compute()
        for delta in of_metric:
            _merge(metric, delta)
        metric._computed = None
        metric._forward_cache = value


def _merge(metric: Metric, delta: dict[str, Any]) -> None:
    """Add a microbatch's state to a metric, as if the metric had been updated with that microbatch itself."""
    if metric._update_count == 0:
        for name, value in delta["state"].items():
            setattr(metric, name, value)
        metric._update_count = delta["count"]
        return
    before = {name: getattr(metric, name) for name in metric._defaults}
    for name, value in delta["state"].items():
        setattr(metric, name, value)
    # _reduce_states keeps running means by the update count, and puts the incoming (here: the earlier) state first.
    metric._update_count += delta["count"]
    metric._reduce_states(before)
