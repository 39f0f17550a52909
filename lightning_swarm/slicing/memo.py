"""Ghosts made cheap: what a call over ghosts gives is learnt once and looked up from then on.

An operation on a ghost costs about 0.15 ms, and a stage runs through all of the model in front of it for every
microbatch. But what comes out depends on shapes, types and plain arguments only. `MemoMode` keeps the results of whole
submodules, and of single operations where a submodule cannot be skipped, by the signature of what went in.

Never remembered: calls with arguments that are neither tensors nor plain values, calls that give real tensors (they
depend on the batch alone and must be computed), calls that look at real data, calls that store something on a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_swarm.slicing._compat import DisableTorchFunction, FakeTensor, tree_flatten, tree_unflatten
from lightning_swarm.slicing.ghost import Ghosts, is_ghost
from lightning_swarm.slicing.rehearsal import GhostMode, Part
from lightning_swarm.slicing.seeds import untouched_generators
from lightning_swarm.slicing.signing import PLAIN, Kind, classify, keepable, sign, surroundings
from lightning_swarm.slicing.watch import DataWatch

_RESHAPING = frozenset(
    {
        "resize_", "resize_as_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "set_",
        "as_strided_", "requires_grad_", "detach_", "rename_", "share_memory_", "apply_", "map_", "sparse_resize_",
    }
)  # fmt: skip
_CAPACITY = 4096
_UNKNOWN = object()


class _Recipe:
    """What a call gave: a structure of ghosts, plain values and arguments handed through."""

    __slots__ = ("grads", "leaves", "same", "spec")

    def __init__(self, leaves: list[Any], same: dict[int, int], spec: Any) -> None:
        self.leaves, self.same, self.spec = leaves, same, spec
        self.grads = [leaf.requires_grad if type(leaf) is FakeTensor else None for leaf in leaves]
        for index, leaf in enumerate(leaves):
            if type(leaf) is FakeTensor:
                leaf.__dict__["_recipe"] = (self, index)

    def fresh(self) -> bool:
        """Whether nobody changed the ghosts in place, or bound them, since."""
        for leaf, grad in zip(self.leaves, self.grads, strict=True):
            if grad is not None and (type(leaf) is not FakeTensor or leaf._version or leaf.requires_grad is not grad):
                return False
        return True

    def replace(self, index: int, ghost: Tensor) -> None:
        """Serves another ghost from now on."""
        self.leaves[index] = ghost
        ghost.__dict__["_recipe"] = (self, index)

    def serve(self, tensors: list[Tensor]) -> Any:
        """What the call gives, if these are the tensors among its arguments."""
        if self.spec is None:
            return self.leaves[0] if not self.same else tensors[self.same[0]]
        leaves = self.leaves
        if self.same:
            leaves = [tensors[self.same[i]] if i in self.same else leaf for i, leaf in enumerate(leaves)]
        return tree_unflatten(leaves, self.spec)


class _Latest(NamedTuple):
    """The last call of a submodule. Ghosts come from memory too, so the next call often has the very same arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mood: tuple[Any, ...]
    tensors: list[Tensor]
    recipe: _Recipe

    def repeats(self, args: tuple[Any, ...], kwargs: dict[str, Any], mood: tuple[Any, ...]) -> bool:
        """Whether a call is this one again."""
        if len(args) != len(self.args) or not all(map(is_, args, self.args)) or mood != self.mood:
            return False
        if not kwargs:
            return not self.kwargs
        return kwargs.keys() == self.kwargs.keys() and all(map(is_, kwargs.values(), self.kwargs.values()))


class MemoMode(GhostMode):
    """The `GhostMode` of a stage in front of its split point: remembers, and touches nothing that is real.

    It does nothing unless ``active``: the user's code may have entered another mode since, and then this one cannot be
    left before that.

    Args:
        ghosts: Who makes ghosts.
        before_write: Called with a real tensor that an operation is about to change.

    """

    def __init__(self, ghosts: Ghosts, before_write: Callable[[Tensor], None]) -> None:
        super().__init__(ghosts)
        self.active = False
        self.learning = False
        self._before_write = before_write
        self._kinds: dict[Any, Kind] = {}
        self._recipes: dict[Any, _Recipe | None] = {}
        self._latest: dict[int, _Latest] = {}
        self._refused: set[Any] = set()
        self._made_here: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = classify(func)
        kwargs = kwargs or {}
        if kind is Kind.DIRECT or self.asleep or not self.active:
            return func(*args, **kwargs)
        if kind is Kind.HOOK:
            # Memory serves the same ghost again and again; what is hooked to it would pile up.
            return func(self.ghosts.inner(args[0]) if is_ghost(args[0]) else args[0], *args[1:], **kwargs)
        if kind is Kind.SPECIAL:
            return self._note(super().__torch_function__(func, types, args, kwargs), args)
        if kind is Kind.IN_PLACE or "out" in kwargs:
            return self._change(func, args, kwargs)
        return self._recall(func, args, kwargs)

    def begin(self) -> None:
        """A new run begins."""
        self._made_here.clear()
        self.active = True

    def call(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A submodule's call, from memory if possible."""
        if self.learning:
            return self.perform(part, args, kwargs)
        mood = (part.module.training, *surroundings())
        latest = self._latest.get(id(part))
        key: list[Any] = [id(part), mood]
        tensors: list[Tensor] = []
        with DisableTorchFunction():
            if latest is not None and latest.repeats(args, kwargs, mood) and latest.recipe.fresh():
                return latest.recipe.serve(latest.tensors)
            plain = sign(args, key, tensors) and (not kwargs or sign((kwargs,), key, tensors))
            recipe = self._recipes.get(tuple(key), _UNKNOWN) if plain else None
            if isinstance(recipe, _Recipe) and recipe.fresh():
                if keepable(key, tensors):
                    self._latest[id(part)] = _Latest(args, kwargs, mood, tensors, recipe)
                return recipe.serve(tensors)
        if recipe is None:
            return self.perform(part, args, kwargs)
        result, learnt = self.learn(lambda: self.perform(part, args, kwargs))
        with DisableTorchFunction():
            recipe = self._remember(tuple(key), result, tensors) if learnt else None
            if recipe is not None:
                return recipe.serve(tensors)
        # Once is no proof: a module that makes a table when it is first called can be remembered from then on.
        if tuple(key) in self._refused:
            self._recipes[tuple(key)] = None
        self._refused.add(tuple(key))
        return result

    def learn(self, run: Callable[[], Any]) -> tuple[Any, bool]:
        """Runs a submodule's call; says whether its outcome may be remembered.

        What it draws at random is taken back: another worker, or this one the next time, will not draw it.
        """
        outer, watch = self.recorder, DataWatch()
        self.recorder, self.learning = watch, True
        try:
            with watch, untouched_generators():
                result = run()
        finally:
            self.recorder, self.learning = outer, False
        return result, not watch.saw_data

    def forget(self) -> None:
        """Remembers nothing any more."""
        self._recipes.clear()
        self._latest.clear()
        self._refused.clear()

    def disown(self, ghost: Tensor) -> None:
        """This ghost is about to be bound: memory must not serve it again."""
        recipe, index = ghost.__dict__.pop("_recipe", (None, 0))
        if recipe is not None:
            recipe.replace(index, self.ghosts.inner(ghost))

    def _recall(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation, from memory if possible."""
        key: list[Any] = [func]
        tensors: list[Tensor] = []
        if not sign(args, key, tensors) or (kwargs and not sign((kwargs,), key, tensors)):
            return self.compute(func, args, kwargs)
        if not any(type(tensor) is FakeTensor for tensor in tensors):
            return self._note(func(*args, **kwargs), tensors)
        key.append(surroundings())
        known = self._recipes.get(tuple(key))
        if known is not None and known.fresh():
            return known.serve(tensors)
        result = self.compute(func, args, kwargs)
        with DisableTorchFunction():
            recipe = self._remember(tuple(key), result, tensors)
            if recipe is not None:
                return recipe.serve(tensors)
            if not any(isinstance(leaf, Tensor) for leaf in tree_flatten(result)[0]):
                self._kinds[func] = Kind.DIRECT
        return result

    def _note(self, result: Any, inputs: Sequence[Any]) -> Any:
        """Notes that a real tensor was made in this run: it belongs to no module, so it may be written to."""
        if type(result) is Tensor:
            with DisableTorchFunction():
                if not result._is_view() and not any(result is tensor for tensor in inputs):
                    self._made_here.add(result.untyped_storage()._cdata)
        return result

    def _remember(self, key: tuple[Any, ...], result: Any, tensors: list[Tensor]) -> _Recipe | None:
        leaves: list[Any] = [result] if isinstance(result, Tensor) else tree_flatten(result)[0]
        spec = None if isinstance(result, Tensor) else tree_flatten(result)[1]
        same: dict[int, int] = {}
        positions = {id(tensor): position for position, tensor in enumerate(tensors)}
        ghostly = False
        for index, leaf in enumerate(leaves):
            if id(leaf) in positions:
                same[index] = positions[id(leaf)]
                leaves[index] = None
                ghostly = ghostly or is_ghost(leaf)
            elif type(leaf) is FakeTensor:
                leaves[index] = self.ghosts.inner(leaf)
                ghostly = True
            elif type(leaf) not in PLAIN:
                return None
        if not ghostly:
            return None
        if len(self._recipes) >= _CAPACITY:
            self.forget()
        recipe = self._recipes[key] = _Recipe(leaves, same, spec)
        return recipe

    def _change(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operation in place. On a ghost it changes nothing worth knowing; a real tensor must not become a ghost."""
        target = kwargs.get("out", args[0] if args else None)
        with DisableTorchFunction():
            tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            ghosts = any(type(tensor) is FakeTensor for tensor in tensors)
            grads = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        name = func.__name__
        if not isinstance(target, Tensor) or name in _RESHAPING:
            return func(*args, **kwargs)
        if not ghosts:
            if target.untyped_storage()._cdata not in self._made_here:
                self._before_write(target)
            return func(*args, **kwargs)
        if is_ghost(target) and grads and not target.requires_grad:
            return self.compute(func, args, dict(kwargs))
        return None if name == "__setitem__" else target
