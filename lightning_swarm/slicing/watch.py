"""Notices, while a call is learnt, whether real data decide something: then its outcome cannot be remembered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.slicing._compat import TorchDispatchMode, tree_flatten
from lightning_swarm.slicing.ghost import is_ghost
from lightning_swarm.slicing.rehearsal import NoRecorder


class DataWatch(TorchDispatchMode, NoRecorder):
    """Watches for numbers that Python reads from real tensors, and for results whose shape depends on real data.

    Zeros that a rehearsal puts in place of ghosts are no data, and neither is what derives from them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saw_data = False
        self._made_up: dict[int, Tensor] = {}

    def alias(self, tensor: Tensor, of: Tensor) -> None:
        """See `Recorder`."""
        if is_ghost(of) or id(of) in self._made_up:
            self._made_up[id(tensor)] = tensor

    def look(self, tensors: Iterable[Tensor]) -> None:
        """See `Recorder`."""
        if any(not is_ghost(tensor) and id(tensor) not in self._made_up for tensor in tensors):
            self.saw_data = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            self.look(inputs)
        out = func(*args, **kwargs)
        if any(id(tensor) in self._made_up for tensor in inputs):
            for leaf in tree_flatten(out)[0]:
                if isinstance(leaf, Tensor):
                    self._made_up[id(leaf)] = leaf
        return out
