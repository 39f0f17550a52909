"""What a forked child must let go of at once.

A DataLoader forks its workers, and a child inherits every open file. While it lives, a socket that the parent closed
would stay open, and the pipe by which a dead parent is noticed, too. So such files are replaced by ``/dev/null`` in the
child, the moment it begins. (Sub-processes that run another program are not concerned: Python's files are not inherited
by those.)
"""

import os
import weakref

_files: "weakref.WeakKeyDictionary[object, int]" = weakref.WeakKeyDictionary()


def let_go_in_children(owner: object, file: int) -> None:
    """From now on forked children do not hold this file descriptor."""
    _files[owner] = file


def forget(owner: object) -> None:
    """The owner's file is closed, or about to be; its number may soon be another file's."""
    _files.pop(owner, None)


def _in_child() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for file in list(_files.values()):
        os.dup2(nowhere, file, inheritable=False)
    os.close(nowhere)
    _files.clear()


os.register_at_fork(after_in_child=_in_child)
