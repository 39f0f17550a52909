"""What a peer holds of a module: the parameters and buffers of its stage are real, the others become ghosts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_swarm.slicing.blueprint import StagePlan
from lightning_swarm.slicing.ghost import Entry, Ghosts, buffer_entries, is_ghost, parameter_entries, put, shield

_LOOK_AT = 100  # items of a list; one of parameters begins with one, and a data set may be kept in a list too
_LARGE = 1 << 20  # bytes; smaller buffers stay real where nobody needs them, larger ones become ghosts


def settle(module: nn.Module, stage: StagePlan, ghosts: Ghosts, device: torch.device) -> dict[str, nn.Parameter]:
    """Makes a module one stage of itself.

    Args:
        module: The user's module; changed in place. Its parameters may be real, on the meta device, or ghosts.
        stage: What the stage holds.
        ghosts: Who makes ghosts.
        device: Where the stage computes. What it holds goes there; what had no storage gets some, with undefined
            content.

    Returns:
        The parameters that it holds, by canonical name.

    """
    held: dict[str, nn.Parameter] = {}
    before = parameter_entries(module)
    mine = set(stage.parameters)
    for name, entry in before.items():
        if name in mine:
            held[name] = _materialised(entry, device)
        else:
            assert isinstance(entry.tensor, nn.Parameter)
            put(entry, ghosts.parameter(entry.tensor, device))
    mine = set(stage.buffers)
    for name, entry in buffer_entries(module).items():
        tensor = entry.tensor
        if name in mine:
            put(entry, _empty(tensor, device) if _hollow(tensor) else tensor.to(device))
        elif _hollow(tensor) or tensor.numel() * tensor.element_size() > _LARGE:
            put(entry, ghosts.like(tensor, device))
        else:
            put(entry, tensor.to(device))
    after = parameter_entries(module)
    _renew_lists(module, {id(entry.tensor): after[name].tensor for name, entry in before.items()})
    shield(module)
    return held


def _renew_lists(module: nn.Module, renewed: dict[int, Tensor]) -> None:
    """Lists of parameters that modules keep beside their own, as recurrent layers do, would keep the old ones alive."""
    for part in module.modules():
        for value in part.__dict__.values():
            if isinstance(value, list) and any(isinstance(item, nn.Parameter) for item in value[:_LOOK_AT]):
                value[:] = [renewed.get(id(item), item) for item in value]


def _materialised(entry: Entry, device: torch.device) -> nn.Parameter:
    parameter = entry.tensor
    assert isinstance(parameter, nn.Parameter)
    if _hollow(parameter):
        parameter = nn.Parameter(_empty(parameter, device), requires_grad=parameter.requires_grad)
        put(entry, parameter)
    elif parameter.device != device:
        parameter.data = parameter.data.to(device)
    return parameter


def _hollow(tensor: Tensor) -> bool:
    return is_ghost(tensor) or tensor.is_meta


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
