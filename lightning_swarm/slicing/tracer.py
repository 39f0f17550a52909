"""Writes down a dry run: a dispatch mode that sees every operation, real or ghost, and asks nothing of user code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_swarm.slicing import frames
from lightning_swarm.slicing._compat import DisableTorchFunction, TorchDispatchMode, tree_flatten
from lightning_swarm.slicing.ghost import is_ghost
from lightning_swarm.slicing.points import LeafSpec
from lightning_swarm.slicing.trace import Call, Kept, Op, Place, Trace, Value

_BLANK = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
}  # fmt: skip


class Tracer(TorchDispatchMode):
    """Records a `Trace`. All tensors of the run stay alive until the tracer goes, so an ``id`` names one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self._ids: dict[int, int] = {}
        self._geometry: dict[tuple[Any, ...], int] = {}
        self._storages: dict[int, int] = {}
        self._alive: list[Any] = []
        self._journal: list[tuple[Tensor, Tensor]] = []
        self._frame: Call | None = None
        self._arrived: Call | None = None
        self._counts: dict[str, int] = {}

    # -- what the dry run tells us

    def declare(self, tensor: Tensor, kind: str, key: str | int) -> None:
        """Introduces a parameter, a buffer or a leaf of the batch before the step starts."""
        self._new(tensor, kind, key=key)

    def alias(self, tensor: Tensor, of: Tensor) -> None:
        """From now on ``tensor`` is the same value as ``of``: a real stand-in for a ghost."""
        index = self.index(of)
        self._remember(tensor, index)
        self._storages[_storage_key(tensor)] = self.trace.values[index].storage

    def derive(self, name: str, sources: Iterable[Tensor], results: Iterable[Tensor], *, looks: bool = False) -> None:
        """Records an operation that we did ourselves."""
        reads = tuple(self.index(tensor) for tensor in sources)
        place = frames.place()
        makes = tuple(self._new(tensor, "made", place=place) for tensor in results)
        contained = looks and frames.in_a_metric()
        self.trace.events.append(
            Op(name, reads, makes=makes, looks=looks, contained=contained, place=place, frame=self._frame)
        )

    def look(self, tensors: Iterable[Tensor]) -> None:
        """Records that Python saw the data of these tensors."""
        self.derive("look", tensors, (), looks=True)

    def keep(self, structure: Any, *, returned: bool = False) -> None:
        """Records that these values leave the step."""
        tensors = [leaf for leaf in tree_flatten(structure)[0] if isinstance(leaf, Tensor)]
        self.trace.events.append(Kept(tuple(self.index(tensor) for tensor in tensors), returned))

    def arrive(self, module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Records that a submodule is called with these arguments."""
        with DisableTorchFunction():
            leaves = [leaf if isinstance(leaf, Tensor) else None for leaf in tree_flatten((args, kwargs))[0]]
            call = Call(
                module=module,
                call=self._counts.get(module, 0),
                leaves=tuple(None if leaf is None else self.index(leaf) for leaf in leaves),
                specs=tuple(None if leaf is None else LeafSpec.of(leaf) for leaf in leaves),
                parent=self._frame,
                checkpoint=frames.checkpoint(),
            )
        self._counts[module] = call.call + 1
        self._arrived = call
        self.trace.events.append(call)
        return call

    def enter(self) -> Call | None:
        """Records that the call which arrived last runs now; None if a forward was called past ``__call__``."""
        call, self._arrived = self._arrived, None
        if call is not None:
            self._frame = call
        return call

    def leave(self, call: Call | None, output: Any) -> None:
        """Records the end of a submodule's call."""
        if call is None:
            return
        call.closed_at = len(self.trace.events)
        call.leaks_numbers = any(type(leaf) in (int, float) for leaf in tree_flatten(output)[0])
        self._frame = call.parent

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What is recorded inside is forgotten when it raises."""
        mark, counts, frame = len(self.trace.events), dict(self._counts), self._frame
        try:
            yield
        except Exception:
            del self.trace.events[mark:]
            self._counts, self._frame = counts, frame
            raise

    def undo_writes(self) -> None:
        """Gives real tensors that existed before the step, and that it changed in place, their content back."""
        with torch.no_grad():
            for tensor, before in reversed(self._journal):
                tensor.copy_(before)
        self._journal.clear()

    # -- what torch tells us

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        reads = tuple(dict.fromkeys(self.index(tensor) for tensor in inputs))
        written = [tensor for tensor in _written(func, args, kwargs) if isinstance(tensor, Tensor)]
        for tensor in written:
            self._save(tensor)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        place = frames.place()
        makes = tuple(self._new(tensor, "made", place=place) for tensor in outputs if id(tensor) not in self._ids)
        name = func._opname
        looks = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
        event = Op(
            name=name,
            reads=reads,
            writes=tuple(self.index(tensor) for tensor in written),
            makes=makes,
            flops=_flops(func, args, kwargs, out, outputs, inputs),
            random=torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs),
            blank=name in _BLANK,
            own_generator=kwargs.get("generator") is not None,
            looks=looks,
            contained=looks and frames.in_a_metric(),
            custom=not torch.is_grad_enabled() and frames.in_custom_function(),
            place=place,
            frame=self._frame,
        )
        self.trace.events.append(event)
        return out

    def _save(self, tensor: Tensor) -> None:
        value = self.trace.values[self.index(tensor)]
        if is_ghost(tensor) or any(saved is tensor for saved, _ in self._journal):
            return
        origin = next(v for v in self.trace.values if v.storage == value.storage)
        if origin.kind != "made":
            self._journal.append((tensor, tensor.clone()))

    def index(self, tensor: Tensor) -> int:
        """The number of this tensor's value."""
        known = self._ids.get(id(tensor))
        if known is not None:
            return known
        # Autograd hands real views to Python as a new object that no operation announced: same memory, same geometry.
        known = self._geometry.get(_geometry_key(tensor))
        if known is not None:
            self._remember(tensor, known)
            return known
        return self._new(tensor, "outside")

    def _new(self, tensor: Tensor, kind: str, key: str | int | None = None, place: Place | None = None) -> int:
        storage = self._storages.setdefault(_storage_key(tensor), len(self._storages))
        index = len(self.trace.values)
        if kind == "outside" and any(value.storage == storage for value in self.trace.values):
            kind = "made"
        self.trace.values.append(Value(kind, storage, tuple(tensor.shape), tensor.dtype, key, place))
        self._remember(tensor, index)
        self._geometry[_geometry_key(tensor)] = index
        return index

    def _remember(self, tensor: Tensor, index: int) -> None:
        self._ids[id(tensor)] = index
        self._alive.append((tensor, tensor.untyped_storage()))


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry_key(tensor: Tensor) -> tuple[Any, ...]:
    return (_storage_key(tensor), tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    given = {
        argument.name: args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
    }
    # Batch normalisation changes its running statistics, but its schema does not say so.
    silent = ("running_mean", "running_var") if given.get("training") else ()
    for argument in func._schema.arguments:
        if argument.name in silent or (argument.alias_info is not None and argument.alias_info.is_write):
            value = given[argument.name]
            yield from value if isinstance(value, (list, tuple)) else (value,)


def _without_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention declares itself random because it could drop; it does not when its probability is 0."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return not value
    return False


def _flops(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, outputs: list[Tensor], inputs: list[Tensor]
) -> float:
    """Products count as torch's FLOP counter does, everything else one per element that it makes; views are free."""
    counter: Callable[..., float] | None = flop_registry.get(func._overloadpacket)
    if counter is not None:
        return float(counter(*args, **kwargs, out_val=out))
    if func._opname.startswith("_scaled_dot_product"):
        return float(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if func._opname == "mkldnn_rnn_layer":
        steps = out[0].numel() // out[0].shape[-1]
        return 2.0 * steps * sum(weight.numel() for weight in args[1:3])
    if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
        return 0.0
    return float(sum(tensor.numel() for tensor in outputs if tensor.is_floating_point()))
