"""What runs in front of a split point costs nothing the second time, and is remembered only if that is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_swarm.slicing.memo import MemoMode
from lightning_swarm.slicing.plan import make_plan

from .harness import Pipeline, compare
from .test_hard_cases import Base, Masked, Routed, Skips
from .zoo import CNN, GPT, LSTM


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was computed over ghosts rather than looked up."""
    done: list[str] = []
    learn, compute = MemoMode.learn, MemoMode.compute

    def learning(self: MemoMode, run: Callable[[], Any]) -> Any:
        done.append("submodule")
        return learn(self, run)

    def computing(self: MemoMode, func: Any, args: Any, kwargs: Any) -> Any:
        done.append(func.__name__)
        return compute(self, func, args, kwargs)

    monkeypatch.setattr(MemoMode, "learn", learning)
    monkeypatch.setattr(MemoMode, "compute", computing)
    return done


@pytest.mark.parametrize(
    "make", [GPT, lambda: CNN(norm=True), LSTM, lambda: Routed("split"), lambda: Routed("where"), Skips]
)
def test_nothing_is_computed_over_ghosts_any_more_after_a_few_microbatches(
    make: Callable[[], Any], worked: list[str]
) -> None:
    module = make()
    module.__dict__["log"] = lambda *args, **kwargs: None
    pipeline = Pipeline(module, make_plan(module, module.batch(), 3))
    for _ in range(3):
        pipeline.step(module.batch())
    assert worked
    worked.clear()
    pipeline.step(module.batch())
    assert worked == []


def test_another_shape_is_learnt_anew_and_the_first_stays_known(worked: list[str]) -> None:
    module = GPT()
    module.__dict__["log"] = lambda *args, **kwargs: None
    pipeline = Pipeline(module, make_plan(module, module.batch(), 3))
    for samples in (4, 4, 2, 2):
        pipeline.step(module.batch(samples))
    worked.clear()
    for samples in (2, 4, 2):
        pipeline.step(module.batch(samples))
    assert worked == []


def test_shapes_decided_by_the_data_of_a_microbatch_are_not_remembered() -> None:
    compare(Masked(), Masked.batch, ["layers.1", "layers.3"], runs=4)


class MasksInside(Base):
    """A submodule selects by a mask of the batch."""

    class Select(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.linear(x)[keep]

    def __init__(self) -> None:
        super().__init__()
        self.select = MasksInside.Select()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.select(self.embed(x), y > 0)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y[y > 0])


def test_a_submodule_that_selects_by_the_batch_is_run_every_time() -> None:
    compare(MasksInside(), MasksInside.batch, ["layers.0", "layers.2"], runs=4)


class InPlace(Base):
    """Changes activations in place, in the step and in submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.relus = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x += 1
        for layer, relu in zip(self.layers, self.relus, strict=True):
            x = relu(layer(x) + 0) + 0
            x.mul_(2)
            x[:, 0] = x[:, 1]
        return x


def test_operations_in_place_do_not_spoil_memory(worked: list[str]) -> None:
    outcome = compare(InPlace(), InPlace.batch, ["relus.1", "layers.2", "relus.3"], runs=3)
    worked.clear()
    outcome.pipeline.step(InPlace.batch())
    assert worked == []


class Stashes(Base):
    """An early submodule notes down, on another one, what late code reads."""

    class Front(nn.Module):
        def __init__(self, owner: list[Any]) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)
            self.owner = owner

        def forward(self, x: Tensor) -> Tensor:
            self.owner[0].scale = x.abs().amax(-1, keepdim=True)
            return self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.front = Stashes.Front([self.head])

    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
        return x * self.head.scale


def test_what_a_submodule_stores_for_later_code_is_stored_every_time() -> None:
    outcome = compare(Stashes(), Stashes.batch, ["layers.1", "layers.3"], runs=4)
    assert "scale" not in outcome.pipeline.stages[2].module.head.__dict__


class Hooked(Base):
    """Registers hooks on activations."""

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            x.register_hook(lambda gradient: gradient * 2)
            x.retain_grad()
        return x


def test_hooks_on_activations_act_on_their_stage_and_do_not_pile_up() -> None:
    compare(Hooked(), Hooked.batch, ["layers.1", "layers.3"], runs=3)


def test_gradients_switched_off_are_another_call() -> None:
    class Half(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            with torch.no_grad():
                target = self.head(self.body(x)).softmax(-1)
            return F.cross_entropy(self.head(self.body(x)), target) + target.mean()

    outcome = compare(Half(), Half.batch, ["layers.2"], runs=3, tolerance=1e-6)
    assert [spec.requires_grad for spec in outcome.plan.signatures["training_step"].boundaries[0].specs] == [False]
