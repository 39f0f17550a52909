"""For scripts that tests start as processes: to be imported first, and there alone.

torchmetrics imports these packages where they are installed, which takes a third of the time of a process that trains a
tiny model.
"""

import importlib.metadata
import sys

_UNUSED = ("transformers", "matplotlib")
_version = importlib.metadata.version


def _version_of_used(package: str) -> str:
    if package in _UNUSED:
        raise importlib.metadata.PackageNotFoundError(package)
    return _version(package)


importlib.metadata.version = _version_of_used
sys.modules.update(dict.fromkeys(_UNUSED))  # type: ignore[arg-type]
