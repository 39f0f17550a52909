"""The part of the step in front of a stage's split point: run over ghosts, cheap, and without consequences.

While it lasts a `MemoMode` is active, parameters that earlier stages hold too are veiled by ghosts, and modules whose
code runs are watched. What was stored on them is taken back when the step is over, not at the split point: code
behind it may read what code in front of it noted down (a mask kept on the module), as in the whole step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.slicing._compat import current_function_mode
from lightning_swarm.slicing.bind import bind
from lightning_swarm.slicing.ghost import Entry, Ghosts, is_ghost, parameter_entries, put
from lightning_swarm.slicing.memo import MemoMode
from lightning_swarm.slicing.rehearsal import Part
from lightning_swarm.slicing.undo import Attributes, Changes


class Prefix:
    """What a stage does until its split point.

    Args:
        module: The user's module.
        ghosts: The stage's maker of ghosts.
        split: The submodules whose calls begin and end the stage; what contains them cannot be skipped.
        device: Where the stage computes.

    """

    def __init__(
        self,
        module: nn.Module,
        ghosts: Ghosts,
        split: Iterable[nn.Module],
        device: torch.device,
    ) -> None:
        self._module = module
        self._entries = parameter_entries(module)
        self._ghosts, self._device = ghosts, device
        self._veils: dict[str, nn.Parameter] = {}
        self._veiled: list[Entry] = []
        self._mode = _PrefixMode(ghosts, module, self._before_write, lambda part: self._before.add(part))
        self._open = False
        self._step = ""
        self._known: set[str] = set()
        self._watched: dict[int, nn.Module] = {}
        self._before = Attributes()
        self._changes = Changes()
        self._journal: list[tuple[Tensor, Tensor, int]] = []
        self._kept: set[int] | None = None
        self._wrapped: list[nn.Module] = []
        self._wrap(list(split))

    @property
    def asleep(self) -> bool:
        """Whether a submodule is being rehearsed: its calls are not the step's."""
        return self._mode.asleep

    def enter(self, step: str, veiled: Iterable[str]) -> None:
        """The step begins."""
        # Which modules code in front of the split point stores things on shows the first time.
        self._before = Attributes(self._module.modules() if step not in self._known else self._watched.values())
        for name in veiled:
            entry = self._entries[name]
            assert isinstance(entry.tensor, nn.Parameter)
            if name not in self._veils:
                self._veils[name] = self._ghosts.parameter(entry.tensor, self._device)
            put(entry, self._veils[name])
            self._veiled.append(entry)
        self._kept = None
        self._mode.begin()
        self._open = True
        self._step = step

    def leave(self) -> None:
        """The split point is reached: from here on everything is real."""
        if not self._open:
            return
        self._open = False
        self._mode.end()
        for entry in self._veiled:
            put(entry, entry.tensor)
        self._veiled.clear()
        self._changes = self._before.changes()
        if self._step not in self._known:
            self._known.add(self._step)
            self._watched.update((id(part), part) for part in self._before.changed_modules())
        self._journal = [(tensor, before, tensor._version) for tensor, before, _ in self._journal]

    def bind(self, stand_in: Tensor, real: Tensor, seed: int) -> None:
        """Makes all references to a value of the code in front of the split point mean a real tensor."""
        if is_ghost(stand_in):
            self._mode.disown(stand_in)
        bind(stand_in, real, seed)

    def finish(self) -> None:
        """The step is over, however it ended."""
        self.leave()
        self._mode.end()
        self._changes.revert()
        self._changes = Changes()
        self._before = Attributes()
        with torch.no_grad():
            for tensor, before, version in reversed(self._journal):
                if tensor._version == version:
                    tensor.copy_(before)
        self._journal.clear()

    def forget(self) -> None:
        """Learns everything anew."""
        self._mode.forget()

    def close(self) -> None:
        """Takes the wrappers off."""
        for part in self._wrapped:
            part.__dict__.pop("forward", None)
        self._wrapped.clear()

    def _wrap(self, split: list[nn.Module]) -> None:
        total = sum(parameter.numel() for parameter in self._module.parameters())
        for part in self._module.modules():
            inside = set(part.modules()) - {part}
            if part is self._module or any(point in inside for point in split):
                self._watched[id(part)] = part
            elif "forward" not in part.__dict__:
                part.__dict__["forward"] = _Forward(self._mode, Part.of(part, total))
                self._wrapped.append(part)

    def _before_write(self, tensor: Tensor) -> None:
        """Remembers the content of a tensor that a module keeps, before code in front of the split point changes it."""
        if any(saved is tensor for saved, _, _ in self._journal):
            return
        if self._kept is None:
            self._kept = {kept.untyped_storage()._cdata for kept in _kept_by(self._module)}
        if tensor.untyped_storage()._cdata in self._kept:
            self._journal.append((tensor, tensor.clone(), 0))


class _PrefixMode(MemoMode):
    """A `MemoMode` that can be left in the middle of the step, and that knows what may not be skipped."""

    def __init__(
        self,
        ghosts: Ghosts,
        root: nn.Module,
        before_write: Callable[[Tensor], None],
        before_call: Callable[[nn.Module], None],
    ) -> None:
        super().__init__(ghosts, before_write)
        self._root = root
        self._before_call = before_call
        self._entered = False

    def begin(self) -> None:
        super().begin()
        self.__enter__()
        self._entered = True

    def end(self) -> None:
        self.active = False
        if self._entered and current_function_mode() is self:
            self.__exit__(None, None, None)
            self._entered = False

    def perform(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before_call(part.module)
        return super().perform(part, args, kwargs)

    def learn(self, run: Callable[[], Any]) -> tuple[Any, bool]:
        before = Attributes(self._root.modules())
        result, learnt = super().learn(run)
        return result, learnt and not before.changed()


class _Forward:
    """A submodule's ``forward``, looked up instead of run while the stage is in front of its split point."""

    def __init__(self, mode: _PrefixMode, part: Part) -> None:
        self.mode, self.part, self.forward = mode, part, part.forward
        self.__wrapped__ = part.forward  # models look at their parts' signatures

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.mode.active or self.mode.asleep:
            return self.forward(*args, **kwargs)
        return self.mode.call(self.part, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.part.module))
        return self if copied is None else types.MethodType(type(copied).forward, copied)


def _kept_by(module: nn.Module) -> Iterator[Tensor]:
    """All real tensors that modules keep, other than parameters."""
    for part in module.modules():
        for value in (*part._buffers.values(), *part.__dict__.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor) and not is_ghost(item):
                    yield item
