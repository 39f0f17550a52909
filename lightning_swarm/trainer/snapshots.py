"""The trainer's copy of the model on disk, for the trainer that is started again after this one was killed.

A snapshot is a plain Lightning checkpoint. It gets its name when all of it is on the disk, so a file of that name is
whole unless the disk has damaged it; ``torch.save`` writes a checksum for every part, which is compared before a
snapshot is trusted. The newest two stay. What a trainer that was killed had half written is removed by the next write.
"""

import contextlib
import logging
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

log = logging.getLogger(__name__)

_KEPT = 2


class Snapshots:
    """The snapshots in one directory.

    Args:
        directory: Where they are; made if missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def check(self) -> None:
        """See that a file can be written there.

        Raises:
            MisconfigurationException: It cannot; names the directory and says why.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise MisconfigurationException(
                f"SwarmStrategy(snapshot_dir={str(self.directory)!r}): nothing can be written there "
                f"({error.strerror}). Give a directory that the trainer may write to."
            ) from error

    def write(self, step: int, checkpoint: dict[str, Any]) -> None:
        """Keep the checkpoint of a step, and let go of all but the newest two. Takes its time: call it on a thread.

        Raises:
            OSError: It could not be written; the earlier ones are as they were.
        """
        path = self.directory / f"step={step}.ckpt"
        part = path.with_suffix(".part")
        for stale in self.directory.glob("step=*.part"):
            stale.unlink(missing_ok=True)
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None  # torch complains of the write that failed
            raise
        self._sync_directory()
        for _, old in self._found()[_KEPT:]:
            old.unlink(missing_ok=True)

    def newest(self) -> tuple[int, Path] | None:
        """The step and the file of the newest snapshot that is whole; warns of those that are not."""
        for step, path in self._found():
            if (damage := _damage(path)) is None:
                return step, path
            log.warning("Snapshot %s is damaged (%s); the one before it is used, if there is one.", path, damage)
        return None

    def _found(self) -> list[tuple[int, Path]]:
        """By step, those that were written last first: an earlier run in this directory may have come further."""
        found = []
        for path in self.directory.glob("step=*.ckpt"):
            with contextlib.suppress(ValueError):
                step = int(path.stem.removeprefix("step="))
                found.append((path.stat().st_mtime_ns, step, path))
        return [(step, path) for _, step, path in sorted(found, reverse=True)]

    def _sync_directory(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _damage(path: Path) -> str | None:
    """What is wrong with a file; ``None``: every checksum in it is right."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        return str(error)
    return None if wrong is None else f"wrong checksum of {wrong}"
