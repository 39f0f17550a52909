"""Stages run in turn give the whole step's loss and gradients, for modules that know nothing of stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .harness import compare
from .zoo import CNN, GPT, LSTM, MLP

MODULES: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "mlp": MLP,
    "cnn": CNN,
    "cnn with batch norm": lambda: CNN(norm=True),
    "lstm": LSTM,
}


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", MODULES)
def test_stages_equal_the_whole_step_bit_for_bit(name: str, stages: int) -> None:
    module: Any = MODULES[name]()
    compare(module, module.batch, stages, runs=3)


def test_parameters_tied_across_stages_are_shared_and_their_gradients_add_up() -> None:
    module = GPT(tied=True)
    outcome = compare(module, module.batch(), 3, tolerance=1e-7)
    assert outcome.plan.shared == {"embedding.weight": (0, 2)}
    assert outcome.loss_difference == 0.0


def test_stages_can_be_named() -> None:
    outcome = compare(GPT(), GPT.batch(), ["blocks.1", "blocks.4", "norm"])
    assert [str(stage.begins_at) for stage in outcome.plan.stages[1:]] == ["blocks.1", "blocks.4", "norm"]


def test_a_one_layer_module_has_two_stages() -> None:
    module = MLP(layers=0)
    outcome = compare(module, MLP.batch(), 2)
    assert [bool(stage.parameters) for stage in outcome.plan.stages] == [False, True]


def test_batches_of_another_size_and_length_use_the_same_plan() -> None:
    compare(GPT(), GPT.batch(3, 11), 3, plan_batch=GPT.batch())
