"""How much memory a microbatch takes between its forward and its backward pass."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd saves for the backward pass inside of a ``with`` block.

    Memory that several saved tensors share counts once, and that of parameters not at all.

    Args:
        parameters: What is there anyway.

    Attributes:
        bytes: The sum so far.

    Example:
        >>> x = torch.ones(10, requires_grad=True)
        >>> saved = SavedBytes([x])
        >>> with saved:
        ...     y = (x.exp() * x).sum()
        >>> saved.bytes
        40
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self.bytes = 0
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        super().__init__(self._pack, lambda saved: saved)

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return tensor  # A ghost, which has no memory.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor.detach()  # The tensor itself would keep its own graph alive.
