"""Undoing what code stored on modules: plain attributes, their lists, dictionaries and sets, buffers that were
replaced.

A dry run must leave no trace at all; what a stage stores while it is in front of its split point belongs to the stage
that runs that part for real, so it is taken back when the step is over, and what was stored behind the split point
stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

_MISSING = object()
# torch's own bookkeeping, hooks among it, is not the user's; recurrent layers renew theirs when parameters change.
_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {"_flat_weights", "_flat_weight_refs"}
_TABLES = ("_buffers", "_modules")
_CONTAINERS = (list, dict, set, deque)
_SIMPLE = frozenset({int, float, bool, str, type(None), Tensor})
_DEPTH = 3
_LARGE = 1000  # of a list that is longer, an epoch's outputs or a data set, only the length is remembered


class _Length(int):
    """What is remembered of a long list: that it had this many items. Code appends to such lists, if anything."""


class Attributes:
    """The plain attributes of some modules at one moment."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules: list[nn.Module] = []
        self._tables: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        for module in modules:
            self.add(module)

    def add(self, module: nn.Module) -> None:
        """Remembers a module's attributes as they are now, unless it is known already."""
        table = module.__dict__
        if id(table) in self._tables:
            return
        self._modules.append(module)
        for live in (table, *(table[name] for name in _TABLES)):
            self._tables[id(live)] = (live, dict(live))
        for name, value in table.items():
            if type(value) not in _SIMPLE and name not in _OWN and isinstance(value, _CONTAINERS):
                self._remember(value, _DEPTH)

    def changed(self) -> bool:
        """Whether anything differs by now."""
        return any(True for _ in self._table_changes()) or any(True for _ in self._container_changes())

    def changed_modules(self) -> list[nn.Module]:
        """Which modules differ by now."""
        tables = {id(live) for live, _, _, _ in self._table_changes()}
        containers = {id(live) for live, _ in self._container_changes()}
        return [
            module
            for module in self._modules
            if tables & {id(module.__dict__), *(id(module.__dict__[name]) for name in _TABLES)}
            or (containers and containers & set(Attributes([module])._containers))
        ]

    def restore(self) -> None:
        """Makes everything as it was."""
        for live, name, before, _ in list(self._table_changes()):
            _set(live, name, before)
        for live, before in list(self._container_changes()):
            _fill(live, before)

    def changes(self) -> Changes:
        """What differs by now, for undoing it later."""
        return Changes(
            [(live, name, before, now) for live, name, before, now in self._table_changes()],
            [(live, before, _copy(live)) for live, before in self._container_changes()],
        )

    def _remember(self, value: Any, depth: int) -> None:
        if id(value) in self._containers or not depth:
            return
        self._containers[id(value)] = (value, _copy(value))
        if len(value) > _LARGE:
            return
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, _CONTAINERS):
                self._remember(item, depth - 1)

    def _table_changes(self) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
        for live, before in self._tables.values():
            if live.keys() == before.keys() and all(map(is_, live.values(), before.values())):
                continue
            for name in {**before, **live}:
                if name in _OWN:
                    continue
                old, new = before.get(name, _MISSING), live.get(name, _MISSING)
                if old is not new:
                    yield live, name, old, new

    def _container_changes(self) -> Iterator[tuple[Any, Any]]:
        for live, before in self._containers.values():
            if not _same(live, before):
                yield live, before


class Changes:
    """What happened to attributes between two moments; ``revert`` takes it back but keeps what happened later."""

    def __init__(
        self,
        tables: Sequence[tuple[dict[str, Any], str, Any, Any]] = (),
        containers: Sequence[tuple[Any, Any, Any]] = (),
    ) -> None:
        self._tables = tables
        self._containers = containers

    def revert(self) -> None:
        """Takes the changes back where nothing else happened since, and removes what they added where something did."""
        for live, name, before, after in self._tables:
            if live.get(name, _MISSING) is after:
                _set(live, name, before)
        for live, before, after in self._containers:
            if _same(live, after):
                _fill(live, before)
            elif isinstance(before, _Length) or isinstance(after, _Length):
                _remove(live, _count(before), _count(after))
            elif isinstance(live, (list, deque)):
                items = list(live)
                if _same(items[: len(after)], list(after)):
                    _fill(live, [*before, *items[len(after) :]])
            elif isinstance(live, dict):
                for name in {**before, **after}:
                    if live.get(name, _MISSING) is after.get(name, _MISSING):
                        _set(live, name, before.get(name, _MISSING))
            else:
                live -= after - before


def _set(table: dict[Any, Any], name: Any, value: Any) -> None:
    if value is _MISSING:
        table.pop(name, None)
    else:
        table[name] = value


def _copy(value: Any) -> Any:
    if len(value) > _LARGE:
        return _Length(len(value))
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _fill(live: Any, content: Any) -> None:
    if isinstance(content, _Length):
        _remove(live, content, len(live))
        return
    live.clear()
    if isinstance(live, (list, deque)):
        live.extend(content)
    else:
        live.update(content)


def _count(content: Any) -> int:
    return int(content) if isinstance(content, _Length) else len(content)


def _remove(live: Any, begin: int, end: int) -> None:
    if isinstance(live, list):
        del live[begin:end]
    elif isinstance(live, deque):
        kept = [*list(live)[:begin], *list(live)[end:]]
        live.clear()
        live.extend(kept)
    elif isinstance(live, dict):
        for name in list(live)[begin:end]:
            del live[name]


def _same(live: Any, before: Any) -> bool:
    if isinstance(before, _Length):
        return len(live) == before
    if len(live) != len(before):
        return False
    if isinstance(live, dict):
        return all(live.get(name, _MISSING) is value for name, value in before.items())
    if isinstance(live, set):
        return live == before
    return all(one is other for one, other in zip(live, before, strict=True))
