"""The whole model on the trainer: where initial weights come from and where trained ones arrive.

The trainer's LightningModule keeps its parameters; they are those of some step (``version``): of step 0 or a checkpoint
at first, and brought up to date whenever somebody needs them there (a checkpoint, the end of ``fit``). The optimizer's
state stands beside it by parameter name, so that it fits any number of stages and any order of parameters.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_swarm.slicing.plan import Plan
from lightning_swarm.worker.state import StageState


class Origin:
    """The full state of the model at one step.

    Args:
        module: The trainer's module, with real parameters.
        optimizer: The optimizer that the user's ``configure_optimizers`` made for it; ``None`` outside ``fit``.
        version: The step whose parameters the module holds.
    """

    def __init__(self, module: LightningModule, optimizer: Optimizer | None, version: int) -> None:
        self.version = version
        self._module = module
        self._names = {id(p): name for name, p in module.named_parameters()}
        self.optimizer_state: dict[str, dict[str, Any]] = {}
        if optimizer is not None:
            self.optimizer_state = {
                self._names[id(p)]: {k: _copied(v) for k, v in state.items()} for p, state in optimizer.state.items()
            }

    def stage_state(self, plan: Plan, stage: int) -> StageState:
        """The slice of one stage; it stays as it is. Parameters are the module's own, not copies."""
        names = plan.stages[stage]
        parameters = dict(self._module.named_parameters())
        buffers = dict(self._module.named_buffers())
        return StageState(
            version=self.version,
            parameters={name: parameters[name].detach() for name in names.parameters},
            buffers={name: buffers[name].clone() for name in names.buffers if name in buffers},
            optimizer={name: self.optimizer_state[name] for name in names.parameters if name in self.optimizer_state},
        )

    def update(self, states: list[StageState]) -> None:
        """Take over the states of all stages.

        The memory of the parameters goes over to the module: somebody may be fetching an earlier state from the
        module's own at the moment, so that is not overwritten.
        """
        parameters = dict(self._module.named_parameters())
        buffers = dict(self._module.named_buffers())
        with torch.no_grad():
            for state in states:
                for name, value in state.parameters.items():
                    parameters[name].data = _like(parameters[name], value)
                for name, value in state.buffers.items():
                    buffers[name].copy_(value)
                self.optimizer_state.update(state.optimizer)
        self.version = states[0].version

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """What ``optimizer.state_dict()`` would be if it had made all the steps itself."""
        described = optimizer.state_dict()
        order = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [i for group in described["param_groups"] for i in group["params"]]
        state = {}
        for parameter, index in zip(order, indices):
            held = self.optimizer_state.get(self._names[id(parameter)])
            if held:
                state[index] = dict(held)
        return {"state": state, "param_groups": described["param_groups"]}

    def load_optimizer_state_dict(self, optimizer: Optimizer, loaded: dict[str, Any]) -> None:
        """Take a checkpoint's optimizer state; the optimizer itself gets the hyperparameters only."""
        optimizer.load_state_dict({"state": {}, "param_groups": loaded["param_groups"]})
        order = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [i for group in loaded["param_groups"] for i in group["params"]]
        self.optimizer_state = {
            self._names[id(parameter)]: {k: _copied(v) for k, v in loaded["state"][index].items()}
            for parameter, index in zip(order, indices)
            if index in loaded["state"]
        }


def _like(own: Tensor, value: Tensor) -> Tensor:
    """The value where and as the module's own tensor lies."""
    alike = value.shape == own.shape and value.stride() == own.stride()
    if alike and (value.device, value.dtype) == (own.device, own.dtype):
        return value
    return torch.empty_like(own).copy_(value)


def _copied(value: Any) -> Any:
    return value.detach().clone().cpu() if isinstance(value, Tensor) else value
