"""When ghosts cannot compute: operations and submodules that look at data are rehearsed on zeros.

Ghosts have no data. `GhostMode` catches what asks them for some. A submodule that does (routing of a mixture of
experts, a fake kernel stricter than the real one) runs once on zeros in temporary storage; where no submodule can be
isolated, in the step itself or around a split point, the one operation runs on zeros that take no memory, and a
number that Python asks for is made up. Only shapes and types of the results are kept. Operations that need a ghost's
shape alone (``zeros_like``, ``x.new_ones``, ``mask.to(x)``) give real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from lightning_swarm.slicing._compat import quiet_fake_tensors, tree_flatten, tree_map
from lightning_swarm.slicing.ghost import Ghosts, buffer_entries, is_ghost, parameter_entries, put, stand_in
from lightning_swarm.slicing.seeds import untouched_generators
from lightning_swarm.slicing.splice import flatten
from lightning_swarm.slicing.undo import Attributes

LOOKS = frozenset(
    function
    for name in (
        "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__",
        "__format__", "__contains__", "equal", "allclose", "is_nonzero",
    )
    for owner in (torch, Tensor)
    if (function := getattr(owner, name, None)) is not None
)  # fmt: skip
BLANKS = frozenset(
    function
    for name in (
        "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "empty_like", "zeros_like", "ones_like",
        "full_like", "rand_like", "randn_like", "randint_like",
    )
    for owner in (torch, Tensor)
    if (function := getattr(owner, name, None)) is not None
)  # fmt: skip
AFTER_ANOTHER = frozenset({Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as})


class GhostHasNoData(RuntimeError):
    """Code asked a ghost for data inside a submodule that can be rehearsed."""


class Recorder(Protocol):
    """Who wants to know what is done in place of ghosts; the `Tracer` does."""

    def alias(self, tensor: Tensor, of: Tensor) -> None:
        """``tensor`` stands for ``of``."""

    def derive(self, name: str, sources: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """``results`` were made from ``sources``."""

    def look(self, tensors: Iterable[Tensor]) -> None:
        """Python saw the data of these."""

    def attempt(self) -> AbstractContextManager[None]:
        """What happens inside does not count if it raises."""
        return nullcontext()


class NoRecorder(Recorder):
    """Nobody wants to know."""

    def alias(self, tensor: Tensor, of: Tensor) -> None:
        """See `Recorder`."""

    def derive(self, name: str, sources: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """See `Recorder`."""

    def look(self, tensors: Iterable[Tensor]) -> None:
        """See `Recorder`."""


@dataclass(frozen=True)
class Part:
    """A submodule whose calls we see: its own ``forward``, and whether a failing call is rehearsed as a whole.

    Rehearsing hides what is inside, also the places to cut, and takes memory: not for what holds most of the model.
    """

    module: nn.Module
    forward: Callable[..., Any]
    isolated: bool

    @classmethod
    def of(cls, module: nn.Module, total: int) -> Part:
        """A part of a model with ``total`` parameter elements."""
        inside = sum(parameter.numel() for parameter in module.parameters())
        return cls(module, module.forward, 2 * inside <= total)


class GhostMode(TorchFunctionMode):
    """Active while a step runs over ghosts.

    Args:
        ghosts: Who makes ghosts for results.
        recorder: Who wants to know.
        fill: What number a ghost is taken for.

    """

    def __init__(self, ghosts: Ghosts, recorder: Recorder | None = None, fill: int = 0) -> None:
        super().__init__()
        self.ghosts = ghosts
        self.recorder: Recorder = recorder or NoRecorder()
        self.fill = fill
        self.asleep = False
        self.isolated: list[bool] = []  # for each submodule whose call we are in: will it be rehearsed if it fails?

    def __enter__(self) -> Self:
        quiet_fake_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        quiet_fake_tensors(False)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.asleep:
            return func(*args, **kwargs)
        if func in LOOKS:
            seen = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            if self._isolated() and any(is_ghost(leaf) for leaf in seen):
                raise GhostHasNoData(f"{func.__name__} of a ghost")
            self.recorder.look(seen)
            return func(*self._real(args), **self._real(kwargs))
        if func in BLANKS:
            return func(*self._real(args), **self._real(kwargs))
        if func in AFTER_ANOTHER and not is_ghost(args[0]):
            return func(args[0], *self._real(args[1:]), **self._real(kwargs))
        return self.compute(func, args, kwargs)

    def compute(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, on zeros if ghosts cannot."""
        try:
            return func(*args, **kwargs)
        except Exception:
            ghosts = [leaf for leaf in tree_flatten((args, kwargs))[0] if is_ghost(leaf)]
            # Zeros that stand for masks or indices give the wrong shape; real ones, as in x[labels > 0], the right one.
            guesswork = any(not leaf.is_floating_point() for leaf in ghosts)
            if not ghosts or (guesswork and self._isolated()):
                raise
            try:
                result = func(*self._real(args), **self._real(kwargs))
            except Exception as error:
                raise error from None  # in the real operation's words, which the user knows
            grad = torch.is_grad_enabled() and any(ghost.requires_grad for ghost in ghosts)
            return self.give_up(func.__name__, result, grad)

    def perform(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a submodule's call, on zeros if ghosts cannot."""
        self.isolated.append(part.isolated)
        try:
            with self.recorder.attempt():
                return part.forward(*args, **kwargs)
        except Exception as error:
            if not part.isolated:
                raise
            try:
                return self.rehearse(part.module, part.forward, args, kwargs)
            except Exception:
                raise error from None
        finally:
            self.isolated.pop()

    def rehearse(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a submodule's call on zeros, in temporary storage, leaving no trace; gives ghosts of its results."""
        inputs: dict[int, Tensor] = {}
        parameters = {name: entry for name, entry in parameter_entries(module).items() if is_ghost(entry.tensor)}
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if is_ghost(leaf)]
        tensors = [*leaves, *(entry.tensor for entry in parameter_entries(module).values())]
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        buffers = buffer_entries(module)
        attributes = Attributes(module.modules())
        self.asleep = True
        try:
            with torch.no_grad(), untouched_generators():
                for entry in parameters.values():
                    zeros = nn.Parameter(self._zeros(entry.tensor), requires_grad=False)
                    self.recorder.alias(zeros, entry.tensor)
                    put(entry, zeros)
                for entry in buffers.values():
                    copy = self._zeros(entry.tensor) if is_ghost(entry.tensor) else entry.tensor.clone()
                    self.recorder.alias(copy, entry.tensor)
                    put(entry, copy)
                for leaf in leaves:
                    if id(leaf) not in inputs:
                        inputs[id(leaf)] = self._zeros(leaf)
                        self.recorder.alias(inputs[id(leaf)], leaf)
                args, kwargs = tree_map(lambda leaf: inputs.get(id(leaf), leaf), (args, kwargs))
                result = forward(*args, **kwargs)
        finally:
            self.asleep = False
            for entry in (*parameters.values(), *buffers.values()):
                put(entry, entry.tensor)
            attributes.restore()
        return self.give_up(type(module).__name__, result, grad)

    def give_up(self, name: str, result: Any, grad: bool) -> Any:
        """Real results of a rehearsal become ghosts."""

        def ghost(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or is_ghost(leaf):
                return leaf
            wants = grad and (leaf.is_floating_point() or leaf.is_complex())
            made = self.ghosts.inner(self.ghosts.like(leaf, requires_grad=wants))
            self.recorder.derive(name, [leaf], [made])
            return made

        return tree_map(ghost, result)

    def _isolated(self) -> bool:
        return bool(self.isolated) and self.isolated[-1]

    def _real(self, structure: Any) -> Any:
        if not any(is_ghost(leaf) for leaf in flatten(structure, [])):
            return structure

        def real(leaf: Any) -> Any:
            if not is_ghost(leaf):
                return leaf
            made = stand_in(leaf, self.fill)
            self.recorder.alias(made, leaf)
            return made

        return tree_map(real, structure)

    def _zeros(self, ghost: Tensor) -> Tensor:
        size, stride = tuple(ghost.shape), ghost.stride()
        return torch.empty_strided(size, stride, dtype=ghost.dtype, device=ghost.device).zero_()
