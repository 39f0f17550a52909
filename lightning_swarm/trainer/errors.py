"""An exception of the user's step on a worker, raised on the trainer as if it had happened there."""

import builtins
import sys

from lightning_swarm.swarm.errors import RemoteError


def as_raised(error: RemoteError) -> Exception:
    """The exception that the user's code raised.

    It has the same type where this script knows it, and the same message; its notes say where it happened, with the
    worker's traceback.
    """
    module_name, _, name = error.type_name.rpartition(".")
    found = getattr(sys.modules.get(module_name) or builtins, name, None)
    raised: Exception
    try:
        if not (isinstance(found, type) and issubclass(found, Exception)):
            raise TypeError(error.type_name)
        raised = found(error.remote_message)
        if str(raised) != error.remote_message:
            raise TypeError(error.type_name)
    except Exception:  # noqa: BLE001 - a class whose constructor wants something else
        raised = RuntimeError(f"{error.type_name}: {error.remote_message}")
    _add_note(raised, f"It was raised on worker {error.peer}:\n\n{error.traceback}")
    return raised


def _add_note(error: Exception, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
