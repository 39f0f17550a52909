"""What the user's step does besides computing: ``self.log``, torchmetrics updates, plain attributes of the module.

On a worker these effects are recorded while the stage is in its own range (before its split point the code runs over
ghosts and its effects belong to the stages in front), undone, and sent with the reply; the trainer replays them, in the
order of the microbatches, where Lightning expects them. So every effect happens once, whoever computed it and however
often.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

_SCALARS = (bool, int, float, str, type(None))


@dataclass
class Recorded:
    """The effects of one run of the step; all fields can cross the network (``swarm/tree.py``)."""

    logs: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    """``(name, value, keyword arguments)`` of every ``self.log``; a metric's value is ``("metric", path)``."""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per updated metric, by path in the module: ``state``, ``count`` and ``value`` of this microbatch."""
    assigned: dict[str, Any] = field(default_factory=dict)
    """Plain attributes of the module that the step assigned."""
    appended: dict[str, list[Any]] = field(default_factory=dict)
    """What the step appended to plain lists of the module."""


class Recorder:
    """Shadows ``module.log`` and watches the module's metrics and plain attributes.

    Args:
        module: The LightningModule of a worker.
        active: Says whether the running step has passed its stage's split point.
    """

    def __init__(self, module: nn.Module, active: Callable[[], bool]) -> None:
        self._module = module
        self._active = active
        self._recorded = Recorded()
        self._metrics = {name: m for name, m in module.named_modules() if isinstance(m, Metric)}
        self._metric_names = {id(m): name for name, m in self._metrics.items()}
        self._before: dict[str, Any] = {}
        self._lengths: dict[str, int] = {}
        object.__setattr__(module, "log", self._log)

    def close(self) -> None:
        """Give the module its own ``log`` back."""
        self._module.__dict__.pop("log", None)

    def begin(self, attributes: dict[str, Any]) -> None:
        """Before a run: the trainer's attributes are set, metrics start from nothing."""
        self._recorded = Recorded()
        for metric in self._metrics.values():
            metric.reset()
        self._before = dict(plain_attributes(self._module))
        for name, value in attributes.items():
            setattr(self._module, name, value)
        self._before.update(attributes)
        self._lengths = {name: len(v) for name, v in vars(self._module).items() if _is_plain_list(name, v)}

    def end(self) -> Recorded:
        """After a run: what it did, with the module's attributes and lists as they were."""
        recorded = self._recorded
        for name, metric in self._metrics.items():
            if metric._update_count:
                recorded.metrics[name] = {
                    "state": {k: _copied(v) for k, v in metric.metric_state.items()},
                    "count": metric._update_count,
                    "value": _copied(metric._forward_cache),
                }
                metric.reset()
        for name, value in list(vars(self._module).items()):
            if name in self._lengths and isinstance(value, list) and len(value) > self._lengths[name]:
                recorded.appended[name] = [_copied(item) for item in value[self._lengths[name] :]]
                del value[self._lengths[name] :]
            elif _is_public(name) and isinstance(value, (*_SCALARS, Tensor)):
                before = self._before.get(name, _MISSING)
                if value is not before and not _same(value, before):
                    recorded.assigned[name] = _copied(value)
                    if before is _MISSING:
                        delattr(self._module, name)
                    else:
                        setattr(self._module, name, before)
        return recorded

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self._active():
            return
        if isinstance(value, Metric):
            if id(value) not in self._metric_names:
                raise TypeError(
                    f"self.log({name!r}, ...) got a {type(value).__name__} that is not an attribute of the "
                    f"LightningModule; "
                    "assign it in __init__ so that every peer knows it by its name."
                )
            entry: Any = ("metric", self._metric_names[id(value)])
        elif isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"`self.log({name}, {value})` was called, but the tensor must have a single element.")
            entry = value.detach().clone().cpu()
        elif isinstance(value, dict):
            raise TypeError(f"`self.log({name}, ...)` was called with a dictionary; use `self.log_dict` instead.")
        else:
            entry = value
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        options = {**dict(zip(names, args)), **kwargs}
        options.pop("metric_attribute", None)
        options.pop("sync_dist_group", None)
        reduce = options.get("reduce_fx")
        if callable(reduce):
            options["reduce_fx"] = getattr(reduce, "__name__", "mean")
        self._recorded.logs.append((name, entry, options))


class _Missing:
    pass


_MISSING = _Missing()


def _is_public(name: str) -> bool:
    return not name.startswith("_") and name not in (
        "training",
        "log",
        "prepare_data_per_node",
        "allow_zero_length_dataloader_with_multiple_devices",
    )


def _is_plain_list(name: str, value: Any) -> bool:
    return _is_public(name) and type(value) is list


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The public attributes of a module that are numbers, strings, booleans or ``None``."""
    for name, value in vars(module).items():
        if _is_public(name) and isinstance(value, (*_SCALARS, Tensor)):
            yield name, value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().cpu()
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_copied(v) for v in value)
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return value
