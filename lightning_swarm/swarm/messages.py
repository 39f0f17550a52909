"""Messages as frozen dataclasses that check what they are made from.

A subclass of `Message` declares its fields with annotations; `Message.to_dict` gives what msgpack carries,
`Message.from_dict` checks what came against the annotations, so that no handler ever sees a field that is missing,
unknown or of another type.

Understood annotations: ``bool``, ``int``, ``float`` (an ``int`` is one, too), ``str``, ``bytes``, ``None``, ``Any``,
``Optional`` and unions, ``Literal``, ``list[X]``, ``tuple[X, ...]``, ``tuple[X, Y]``, ``frozenset[X]``, ``dict[K, V]``
and other `Message` classes. What else must hold is for ``__post_init__`` to check, by raising ``ValueError``.

Example::

    @dataclass(frozen=True)
    class Task(Message):
        step: int
        sources: tuple[str, ...]
        seed: Optional[int] = None

    Task.from_dict(Task(3, ("a", "b")).to_dict())  # Task(step=3, sources=('a', 'b'), seed=None)
    Task.from_dict({"step": "3"})                  # ProtocolError: Task: "sources" is missing.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

from lightning_swarm.swarm.errors import ProtocolError

_M = TypeVar("_M", bound="Message")
_Reader = Callable[[Any], Any]


class _Mismatch(Exception):
    pass


@dataclass(frozen=True)
class Message:
    """Base of what peers tell each other."""

    def to_dict(self) -> dict[str, Any]:
        """What msgpack can carry; fields that equal their default are left out."""
        packed = {}
        for name, default in _shape(type(self))[1]:  # type: ignore[arg-type]
            value = getattr(self, name)
            if default is dataclasses.MISSING or value != default:
                packed[name] = _plain(value)
        return packed

    @classmethod
    def from_dict(cls, data: Any) -> typing.Self:
        """The message that ``data`` describes.

        Raises:
            ProtocolError: When a field is missing, unknown or ill-typed, or ``__post_init__`` refuses.
        """
        try:
            return _read(cls, data)
        except _Mismatch as error:
            raise ProtocolError(f"{cls.__name__}: {error}") from None


def _read(cls: type[_M], data: Any) -> _M:
    if not isinstance(data, dict):
        raise _Mismatch(f"a dictionary was expected, not {_name(data)}.")
    readers, fields = _shape(cls)  # type: ignore[arg-type]
    values = {}
    for name, value in data.items():
        reader = readers.get(name)
        if reader is None:
            raise _Mismatch(f"{str(name)[:80]!r} is unknown.")
        try:
            values[name] = reader(value)
        except _Mismatch as error:
            raise _Mismatch(f'"{name}": {error}') from None
    for name, default in fields:
        if name not in values and default is dataclasses.MISSING:
            raise _Mismatch(f'"{name}" is missing.')
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise _Mismatch(str(error)) from error


@functools.cache
def _shape(cls: type) -> tuple[dict[str, _Reader], list[tuple[str, Any]]]:
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    defaults = []
    for field in fields:
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        defaults.append((field.name, default))
    return {field.name: _reader(hints[field.name]) for field in fields}, defaults


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return value.to_dict()
    if isinstance(value, (list, tuple, frozenset, set)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _name(value: Any) -> str:
    return type(value).__name__


def _reader(hint: Any) -> _Reader:
    """A function that returns a value as ``hint`` wants it, or raises `_Mismatch`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint is None or hint is type(None):
        return _exactly(type(None))
    if hint is float:
        return _float
    if hint in (bool, int, str, bytes):
        return _exactly(hint)
    if isinstance(hint, type) and issubclass(hint, Message):
        return functools.partial(_read, hint)
    if origin in (Union, types.UnionType):
        return _union([_reader(argument) for argument in arguments], hint)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return _fixed([_reader(argument) for argument in arguments])
    if origin in (list, tuple, frozenset):
        return _many(origin, _reader(arguments[0]))
    if origin is dict:
        return _mapping(_reader(arguments[0]), _reader(arguments[1]))
    raise TypeError(f"A message cannot have a field of type {hint}.")


def _exactly(kind: type) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(f"{kind.__name__} was expected, not {_name(value)}.")
        return value

    return read


def _float(value: Any) -> float:
    if type(value) is int or type(value) is float:
        return float(value)
    raise _Mismatch(f"float was expected, not {_name(value)}.")


def _union(readers: list[_Reader], hint: Any) -> _Reader:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except _Mismatch:
                continue
        raise _Mismatch(f"{hint} was expected, not {_name(value)}.")

    return read


def _literal(choices: tuple[Any, ...]) -> _Reader:
    def read(value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _Mismatch(f"one of {choices} was expected.")
        return value

    return read


def _items(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _Mismatch(f"a list was expected, not {_name(value)}.")
    return value


def _fixed(readers: list[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        if len(_items(value)) != len(readers):
            raise _Mismatch(f"{len(readers)} items were expected, not {len(value)}.")
        return tuple(reader(item) for reader, item in zip(readers, value))

    return read


def _many(kind: Any, reader: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        try:
            return kind(reader(item) for item in _items(value))
        except TypeError as error:
            raise _Mismatch(str(error)) from error

    return read


def _mapping(key_reader: _Reader, value_reader: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Mismatch(f"a dictionary was expected, not {_name(value)}.")
        return {key_reader(key): value_reader(item) for key, item in value.items()}

    return read
