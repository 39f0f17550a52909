"""The gradients of one worker's part of a step, and exactly which microbatches they are the sum of.

Autograd itself adds the microbatches up in ``p.grad``; what must not happen is that one is added twice, so every
microbatch is counted by name. With ``reproducible=True`` each microbatch's gradient is moved into a float64 sum
instead: sums of float32 numbers are exact there but for rare last bits, whoever computed which of them, and are rounded
to the parameter's dtype once, after the reduction.

For the reduction the gradients become one vector on the CPU, in an order of names that all replicas share, and the sum
comes back the same way. ``None`` gradients stay ``None``: optimizers skip those (no weight decay, no momentum).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor, nn

from lightning_swarm.worker.statistics import squared_norm


class Accumulator:
    """Sums and counts the gradients of a step's microbatches. Not thread-safe: it lives on the compute thread.

    Frozen parameters (``requires_grad=False``) have no place in the vector, so which ones are frozen must agree among
    the replicas. Sparse gradients (``nn.Embedding(sparse=True)``) become dense ones, as the layout of a sum must not
    depend on how many workers it comes from; an optimizer that insists on sparse ones (``SparseAdam``) cannot be used.

    Args:
        parameters: The stage's own parameters by name. Their gradients belong to the accumulator from here on; those
            that exist already are dropped.
        reproducible: Sum in float64, so that the result does not depend on who computed what. Costs 8 bytes a value and
            one more pass over the gradients of every microbatch; leave it off unless runs must be equal bit for bit.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> accumulator = Accumulator(dict(layer.named_parameters()))
        >>> with accumulator.counting("0:0"):
        ...     layer(torch.ones(3, 2)).sum().backward()
        >>> accumulator.flat(["weight", "bias"])[0]
        tensor([3., 3., 3.])
        >>> sorted(accumulator.accumulated)
        ['0:0']
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, reproducible: bool = False) -> None:
        self._parameters = dict(parameters)
        self._reproducible = reproducible
        self._sums: dict[str, Tensor] = {}
        self._accumulated: set[str] = set()
        self.reset()

    @property
    def accumulated(self) -> frozenset[str]:
        """The microbatches whose gradients are in the sum."""
        return frozenset(self._accumulated)

    @contextmanager
    def counting(self, microbatch: str) -> Iterator[None]:
        """Wraps the backward pass of one microbatch.

        A backward pass that fails midway leaves gradients of some parameters behind. In ``p.grad`` they cannot be told
        from the whole ones, so everything accumulated is given up, as `accumulated` then says; a float64 sum is not
        touched by them.

        Raises:
            ValueError: The microbatch is counted already; nothing was computed.
        """
        if microbatch in self._accumulated:
            raise ValueError(f"Microbatch {microbatch!r} is accumulated already and must not count twice.")
        try:
            yield
        except BaseException:
            self._give_up_last()
            raise
        self.add(microbatch)

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Wraps the backward pass of a microbatch that is counted already, or elsewhere: its gradients are dropped."""
        kept = [(parameter, parameter.grad) for parameter in self._parameters.values()]
        self._clear_gradients()
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def add(self, microbatch: str) -> None:
        """Count one microbatch, right after its backward pass and before the next one's.

        Raises:
            ValueError: The microbatch is counted already. What its second backward pass added to ``p.grad`` cannot be
                taken out again, so everything accumulated is given up, unless the sums are float64.
        """
        if microbatch in self._accumulated:
            self._give_up_last()
            raise ValueError(
                f"Microbatch {microbatch!r} is accumulated already and must not count twice. This worker holds "
                f"{len(self._accumulated)} microbatches of the step now."
            )
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                gradient = parameter.grad = gradient.to_dense()
            if self._reproducible:
                parameter.grad = None
                if name in self._sums:
                    self._sums[name].add_(gradient)
                else:
                    self._sums[name] = gradient.to(torch.promote_types(gradient.dtype, torch.float64))
        self._accumulated.add(microbatch)

    def reset(self) -> None:
        """Begin a step: no gradients, no microbatches."""
        self._sums.clear()
        self._accumulated.clear()
        self._clear_gradients()

    def absent(self, names: Sequence[str]) -> list[str]:
        """The parameters that have no gradient at this worker."""
        return [name for name in names if self._gradient(name) is None]

    def squared_norm(self, names: Sequence[str]) -> float:
        """The squared norm of this worker's own sums, for a group of one; see `statistics.squared_norm`.

        When reproducible it is that of the rounded vector, bit for bit what a larger group would find.
        """
        if self._reproducible:
            return squared_norm(self.flat(names)[0].to(self.dtype(names)))
        return squared_norm(*(_real(p.grad) for p in map(self._parameters.__getitem__, names) if p.grad is not None))

    def dtype(self, names: Sequence[str]) -> torch.dtype:
        """What the sum over the workers is to be rounded to: the real dtype that holds all these parameters' values."""
        parameters = [self._parameters[name] for name in names]
        dtypes = [parameter.dtype.to_real() for parameter in parameters if parameter.requires_grad]
        return reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    def flat(self, names: Sequence[str]) -> tuple[Tensor, tuple[bool, ...]]:
        """This worker's own sums as one vector: a snapshot, which later microbatches do not change.

        Args:
            names: The parameters, in the order that all members of the group share.

        Returns:
            The vector, on the CPU, in float64 when reproducible and else in `dtype`, with zeros where there is no
            gradient; and for every name whether there is one. A worker that has none at all gets a vector that takes no
            memory.
        """
        places, length = self._places(names)
        dtype = torch.promote_types(self.dtype(names), torch.float64) if self._reproducible else self.dtype(names)
        present = tuple(self._gradient(name) is not None for name in names)
        if not any(present):
            return torch.zeros(1, dtype=dtype).expand(length), present
        vector = torch.empty(length, dtype=dtype)
        for name, start, stop in places:
            gradient = self._gradient(name)
            if gradient is None:
                vector[start:stop].zero_()
            else:
                gradient = _real(gradient)
                vector[start:stop].view(gradient.shape).copy_(gradient)
        return vector, present

    def install(self, names: Sequence[str], vector: Tensor | None, present: Sequence[bool]) -> None:
        """Make a reduced vector the gradients that the optimizer sees.

        Where dtype, device and layout allow, ``p.grad`` becomes a view of the vector and nothing is copied.

        Args:
            names: As given to `flat`.
            vector: What the reduction returned; ``None`` for a group of one, whose sum is here already.
            present: For every name, whether any member has a gradient; the others get ``None``.

        Raises:
            ValueError: The vector has not the length that these parameters need; nothing was changed.
        """
        if vector is None and self._reproducible:
            vector = self.flat(names)[0]
        places, length = self._places(names)
        if len(present) != len(names) or (vector is not None and vector.shape != (length,)):
            came = len(present) if vector is None else tuple(vector.shape)
            raise ValueError(f"The gradients of {len(names)} parameters need a vector of {length} values, not {came}.")
        there = {name for name, is_present in zip(names, present) if is_present}
        on_device: dict[torch.device, Tensor] = {}
        for name, start, stop in places:
            parameter = self._parameters[name]
            if name not in there:
                parameter.grad = None
            elif vector is not None:
                if parameter.device not in on_device:
                    on_device[parameter.device] = vector.to(parameter.device)
                parameter.grad = _shaped_like(parameter, on_device[parameter.device][start:stop])

    def _places(self, names: Sequence[str]) -> tuple[list[tuple[str, int, int]], int]:
        places, start = [], 0
        for name in names:
            parameter = self._parameters[name]
            if parameter.requires_grad:
                stop = start + parameter.numel() * (2 if parameter.is_complex() else 1)
                places.append((name, start, stop))
                start = stop
        return places, start

    def _gradient(self, name: str) -> Tensor | None:
        return self._sums.get(name) if self._reproducible else self._parameters[name].grad

    def _give_up_last(self) -> None:
        if self._reproducible:
            self._clear_gradients()
        else:
            self.reset()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _shaped_like(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """The values with the parameter's shape and dtype, and with its strides, which optimizers' fast paths want."""
    if parameter.is_complex():
        values = torch.view_as_complex(values.clone().view(-1, 2))
    shaped = values.view(parameter.shape).to(parameter.dtype)
    return shaped if parameter.is_contiguous() else torch.empty_like(parameter, requires_grad=False).copy_(shaped)
