"""An exception of the user's step on a worker, raised on the trainer as if it had happened there."""

import ast
import contextlib
import sys
from typing import Any

from lightning_swarm.swarm.errors import RemoteError


def as_raised(error: RemoteError, stage: int | None = None) -> Exception:
    """The exception that the user's code raised.

    Args:
        error: What came from the worker.
        stage: Which stage that serves.

    Returns:
        An exception of the same type where this script knows it, with the same message; its notes say where it
        happened, with the worker's traceback.
    """
    raised = _made(error)
    where = "worker" if stage is None else f"the worker of stage {stage},"
    _add_note(raised, f"It was raised on {where} {error.peer}:\n\n{error.traceback}")
    return raised


def _made(error: RemoteError) -> Exception:
    message = error.remote_message
    kind = _known_type(error.type_name)
    if kind is None:
        return RuntimeError(f"{error.type_name}: {message}")
    with contextlib.suppress(Exception):
        raised = kind(ast.literal_eval(message) if kind is KeyError else message)
        if str(raised) == message:
            return raised
    # Its constructor wants something else, or it puts the message together itself: what counts is that `except` finds
    # it.
    told: Any = type(kind.__name__, (kind,), {"__str__": lambda self: message})
    told.__module__, told.__qualname__ = kind.__module__, kind.__qualname__
    try:
        return told.__new__(told, message)
    except TypeError:
        return RuntimeError(f"{error.type_name}: {message}")


def _known_type(path: str) -> type[Exception] | None:
    """The class of that module and qualified name, if this script has imported it."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found = sys.modules.get(".".join(parts[:length]))
        if found is not None:
            for part in parts[length:]:
                found = getattr(found, part, None)
            return found if isinstance(found, type) and issubclass(found, Exception) else None
    return None


def _add_note(error: Exception, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
