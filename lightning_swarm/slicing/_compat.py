"""Private names of torch and Lightning that slicing cannot do without, each with the reason."""

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
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]
