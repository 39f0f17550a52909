"""Private names of torch and Lightning that slicing cannot do without, each with the reason."""

import logging
import threading

from torch._C import DisableTorchFunction  # the only way to look at a tensor without waking our own function mode
from torch._C import _is_any_autocast_enabled as any_autocast_enabled  # asked for every ghost call: one cheap question
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # tensors without storage; no public name for them
from torch.overrides import _get_current_function_mode as current_function_mode  # is our mode on top, may it be left?
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operation of the dry run
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten  # positions of tensors among arguments

__all__ = [
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "any_autocast_enabled",
    "current_function_mode",
    "quiet_fake_tensors",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]


class _Quiet(logging.Filter):
    """A fake operation that fails is no news while we run over ghosts: we expect it, and torch logs pages about it."""

    def __init__(self) -> None:
        super().__init__()
        self.local = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(self.local, "depth", 0)


_quiet = _Quiet()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(_quiet)


def quiet_fake_tensors(quiet: bool) -> None:
    """Begins or ends, in this thread, a stretch in which torch does not log failures of fake operations."""
    _quiet.local.depth = getattr(_quiet.local, "depth", 0) + (1 if quiet else -1)
