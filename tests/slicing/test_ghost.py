"""Modules with ghosts behave like modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_swarm.slicing.bind import BoundGhost, bind, unbound
from lightning_swarm.slicing.ghost import Ghosts, ghosted, is_ghost, parameter_entries, put, shield, stand_in
from lightning_swarm.slicing.plan import make_plan
from lightning_swarm.slicing.stage import Stage

from .harness import CPU, Pipeline
from .zoo import GPT


@pytest.fixture
def stage() -> Stage:
    torch.manual_seed(0)
    module = GPT(tied=True)
    return Stage(module, make_plan(module, module.batch(), 3), 1, CPU)


def test_ghosts_take_no_storage_and_tied_ones_stay_tied(stage: Stage) -> None:
    module = stage.module
    assert is_ghost(module.embedding.weight) and module.embedding.weight is module.head.weight
    assert not any(is_ghost(parameter) for parameter in stage.owned_parameters().values())
    names = {name for name, parameter in module.named_parameters() if not is_ghost(parameter)}
    assert names == set(stage.owned_parameters())


@pytest.mark.parametrize(
    "change",
    [lambda m: m.to("cpu"), lambda m: m.double(), lambda m: m.half().float(), lambda m: m.requires_grad_(False)],
)
def test_conversions_reach_ghosts_too(stage: Stage, change: object) -> None:
    module = stage.module
    change(module)  # type: ignore[operator]
    parameters = dict(module.named_parameters())
    assert len({parameter.dtype for parameter in parameters.values()}) == 1
    assert len({parameter.requires_grad for parameter in parameters.values()}) == 1
    assert module.embedding.weight is module.head.weight
    assert sum(is_ghost(parameter) for parameter in parameters.values()) == len(parameters) - len(
        stage.owned_parameters()
    )


def test_train_eval_state_dict_and_zero_grad_work(stage: Stage) -> None:
    module = stage.module
    assert not module.eval().training and module.train().training
    assert set(module.state_dict()) == set(GPT(tied=True).state_dict())
    module.zero_grad()


def test_a_copy_is_a_module_of_its_own(stage: Stage) -> None:
    other = copy.deepcopy(stage.module)
    assert is_ghost(other.embedding.weight) and other.embedding.weight is not stage.module.embedding.weight
    other.double()
    assert stage.module.embedding.weight.dtype is torch.float32
    output = other.blocks[0](torch.zeros(1, 4, 32, dtype=torch.float64), torch.ones(4, 4, dtype=torch.bool))
    assert is_ghost(output)
    assert not stage.active


def test_a_closed_stage_leaves_nothing_but_ghosts_and_can_become_another() -> None:
    module = GPT()
    batch = module.batch()
    plan = make_plan(module, batch, 3)
    whole = copy.deepcopy(module)
    pipeline = Pipeline(module, plan)
    for stage in pipeline.stages:
        stage.module.__dict__["log"] = lambda *args, **kwargs: None
    before = pipeline.step(batch)
    first = pipeline.stages[0]
    first.close()
    assert not any(part._forward_pre_hooks or "forward" in part.__dict__ for part in first.module.modules())
    pipeline.stages[2].close()
    pipeline.stages[2] = Stage(first.module, plan, 2, CPU)
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in pipeline.stages[2].owned_parameters().items():
            parameter.copy_(weights[name])
    pipeline.stages[0] = Stage(copy.deepcopy(whole), plan, 0, CPU)
    pipeline.stages[0].module.__dict__["log"] = lambda *args, **kwargs: None
    assert torch.equal(pipeline.step(batch), before)


def test_ghosted_puts_the_very_same_parameters_back() -> None:
    module = GPT(tied=True)
    before = dict(module.named_parameters(remove_duplicate=False))
    with pytest.raises(ZeroDivisionError), ghosted(module, Ghosts(), CPU) as ghosts:
        assert set(ghosts) == set(parameter_entries(module))
        assert all(is_ghost(parameter) for parameter in module.parameters())
        raise ZeroDivisionError
    assert all(before[name] is parameter for name, parameter in module.named_parameters(remove_duplicate=False))


def test_a_stand_in_takes_the_memory_of_one_element() -> None:
    ghost = Ghosts().empty((1000, 1000), torch.float32, CPU)
    assert stand_in(ghost).untyped_storage().nbytes() == 4
    assert stand_in(ghost).shape == ghost.shape
    assert not stand_in(Ghosts().empty((3,), torch.bool, CPU), fill=1).any()


def test_a_bound_ghost_is_the_real_tensor_in_every_operation() -> None:
    ghost = Ghosts().empty((2, 3), torch.float32, CPU, requires_grad=True)
    leaf = torch.arange(6.0).view(2, 3).requires_grad_()
    bind(ghost, leaf * 1, seed=0)
    assert isinstance(ghost, BoundGhost) and not is_ghost(ghost)
    result = torch.cat([ghost, ghost + 1])[1:].sum() + ghost.mean() + nn.functional.relu(ghost, inplace=False).sum()
    assert type(result) is torch.Tensor
    result.backward()
    assert leaf.grad is not None and leaf.grad.sum() > 0
    assert ghost.requires_grad and ghost[0, 1].item() == 1.0 and ghost.shape == (2, 3)
    assert type(unbound({"x": [ghost]})["x"][0]) is torch.Tensor


def test_a_custom_function_that_cannot_see_the_binding_is_told() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    ghost = Ghosts().empty((2,), torch.float32, CPU, requires_grad=True)
    bind(ghost, torch.ones(2), seed=0)
    with pytest.raises(RuntimeError, match="begin the stage at another call"):
        Double.apply(ghost)


def test_shielding_twice_changes_nothing() -> None:
    module = nn.Linear(2, 2)
    entry = parameter_entries(module)["weight"]
    put(entry, Ghosts().parameter(module.weight, CPU))
    shield(module)
    shield(module)
    assert module.double().weight.dtype is torch.float64 and module.bias.dtype is torch.float64
