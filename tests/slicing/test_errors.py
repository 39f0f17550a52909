"""What cannot be cut is told: which value, made where, and which cuts would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_swarm.slicing.plan import CutError, make_plan, make_signature
from lightning_swarm.slicing.stage import SliceError

from .harness import Pipeline
from .zoo import GPT, MLP


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


class UNet(LightningModule):
    """The way down is needed on the way up, past the calls in between."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.ModuleList([nn.Linear(8, 8)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        skip = self.down(batch)
        x = self.middle(skip.relu())
        x = x + skip
        return self.up(x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        skip = self.down(batch)
        return (self.up(skip.relu()) + skip).mean()


def plan_error(module: nn.Module, batch: Any, stages: Any) -> str:
    with pytest.raises(CutError) as caught:
        make_plan(module, batch, stages)
    assert isinstance(caught.value, MisconfigurationException)
    return str(caught.value)


def test_a_value_that_does_not_pass_through_is_named_with_its_place_and_the_cuts_that_work() -> None:
    message = plan_error(UNet(), torch.randn(2, 8), ["middle"])
    line = UNet.training_step.__code__.co_firstlineno + 1
    assert message == (
        f'Stage 1 cannot begin at "middle": the value "skip" made at test_errors.py:{line} does not pass through its '
        "call. Stages can begin at: up."
    )


def test_more_stages_than_possible_says_how_many_and_where() -> None:
    message = plan_error(MLP(layers=1), MLP.batch(), 9)
    assert message == (
        "stages=9, but training_step can be cut into at most 4 stages. Stages can begin at: net.1, net.2."
    )


def test_an_unknown_split_point_names_the_nearest() -> None:
    message = plan_error(GPT(), GPT.batch(), ["block.3"])
    assert message.startswith('No stage can begin at "block.3": the model has no submodule of that name. ')
    assert "blocks.3" in message


def test_a_submodule_that_is_never_called_names_its_parts() -> None:
    message = plan_error(GPT(), GPT.batch(), ["blocks"])
    assert message.startswith(
        'No stage can begin at "blocks": training_step does not call it. Its parts are: blocks.0, '
    )


def test_a_call_number_that_does_not_exist() -> None:
    assert plan_error(GPT(), GPT.batch(), ["blocks.2#1"]) == (
        'No stage can begin at "blocks.2#1": training_step calls blocks.2 once.'
    )


def test_split_points_out_of_order_are_put_right() -> None:
    message = plan_error(GPT(), GPT.batch(), ["blocks.4", "blocks.2"])
    assert '"blocks.2" cannot begin the stage after "blocks.4"' in message
    assert message.endswith("That order is: blocks.2, blocks.4.")
    assert "each once" in plan_error(GPT(), GPT.batch(), ["blocks.2", "blocks.2"])


@pytest.mark.parametrize("stages", [0, -1])
def test_less_than_one_stage(stages: int) -> None:
    assert plan_error(MLP(), MLP.batch(), stages) == f"stages={stages}: there must be at least 1 stage"


def test_a_cut_that_does_not_work_for_another_step() -> None:
    module, batch = UNet(), torch.randn(2, 8)
    plan = make_plan(module, batch, ["up"])
    with pytest.raises(CutError, match=r'Stage 1 cannot begin at "up": the value "skip" made at test_errors.py:\d+'):
        make_signature(module, batch, plan, "validation_step")


def test_a_residual_that_goes_to_a_custom_function_forbids_the_cut() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Custom(UNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = Double.apply(self.down(batch))
            return (self.up(Double.apply(self.middle(x))) + Double.apply(x)).mean()

    message = plan_error(Custom(), torch.randn(2, 8), ["middle"])
    assert 'Stage 1 cannot begin at "middle": ' in message and "goes to a torch.autograd.Function" in message


def test_an_error_of_the_step_itself_is_the_users_own() -> None:
    class Broken(UNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        make_plan(Broken(), torch.randn(2, 8), 2)


def test_a_shape_error_inside_a_layer_is_the_users_own() -> None:
    with pytest.raises(RuntimeError, match="shape|size"):
        make_plan(UNet(), torch.randn(2, 7), 2)


class Capricious(LightningModule):
    """Takes another way with other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.a(batch)
        first = x
        if batch_idx == 1:
            return x.mean()
        x = self.b(x)
        x = self.c(x)
        return (x + first if batch_idx == 2 else x).mean()


@pytest.mark.parametrize(
    ("batch_idx", "message"),
    [
        (1, 'stage 0 ends at "b", but training_step did not call it this time'),
        (2, "used a value that belongs to another stage"),
    ],
)
def test_a_step_that_goes_another_way_is_noticed(batch_idx: int, message: str) -> None:
    module, batch = Capricious(), torch.randn(3, 4)
    pipeline = Pipeline(module, make_plan(module, batch, ["b", "c"]))
    pipeline.step(batch)
    with pytest.raises(SliceError, match=message):
        pipeline.step(batch, args=(batch_idx,))
    pipeline.step(batch)


def test_tensors_that_do_not_fit_the_boundary_are_refused() -> None:
    module, batch = MLP(), MLP.batch()
    pipeline = Pipeline(module, make_plan(module, batch, ["net.4"]))
    signature = pipeline.plan.signatures["training_step"]
    last = pipeline.stages[1]
    with pytest.raises(SliceError, match="stage 1 gets 1 tensors in training_step, not 0"):
        last.run("training_step", batch, (0,), signature, [], 0)
    with pytest.raises(SliceError, match="it should be torch.float32 with 2"):
        last.run("training_step", batch, (0,), signature, [torch.zeros(8, 24, dtype=torch.float64)], 0)


def test_an_exception_on_a_stage_leaves_the_module_usable() -> None:
    class Fails(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            self.noted = batch_idx
            h = self.net[:4](batch["x"])
            if batch_idx == 7:
                raise ValueError("batch 7 is bad")
            return {"loss": F.cross_entropy(self.net[4:](h), batch["y"])}

    module, batch = Fails(), MLP.batch()
    pipeline = Pipeline(module, make_plan(module, batch, ["net.2"]))
    before = pipeline.step(batch)["loss"]
    for stage in pipeline.stages[1:]:
        with pytest.raises(ValueError, match="batch 7 is bad"):
            stage.run("training_step", batch, (7,), pipeline.plan.signatures["training_step"], [torch.zeros(8, 24)], 0)
        assert not stage.active
    assert torch.equal(pipeline.step(batch)["loss"], before)
