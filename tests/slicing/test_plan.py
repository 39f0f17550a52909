"""Plans are plain data, print as a table, and making one leaves no trace."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_swarm.slicing.plan import Plan, SplitPoint, StepSignature, make_plan, make_signature
from lightning_swarm.slicing.seeds import replay_seed, seed_everything

from .zoo import CNN, GPT, MLP


def unpacked(data: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(data))


def test_a_plan_survives_msgpack() -> None:
    module = GPT(tied=True)
    plan = make_plan(module, module.batch(), 3)
    plan = plan.with_signature(make_signature(module, module.batch(), plan, "validation_step"))
    other = Plan.from_dict(unpacked(plan.to_dict()))
    assert other == plan and other.fingerprint == plan.fingerprint and str(other) == str(plan)
    signature = plan.signatures["validation_step"]
    assert StepSignature.from_dict(unpacked(signature.to_dict())) == signature


def test_the_fingerprint_tells_cuts_and_shapes_apart() -> None:
    batch = GPT.batch()
    prints = {
        make_plan(module, batch, stages).fingerprint
        for module, stages in ((GPT(), 2), (GPT(), 3), (GPT(layers=5), 2), (GPT(tied=True), 2))
    }
    assert len(prints) == 4
    assert make_plan(GPT(), batch, 2).fingerprint == make_plan(GPT(), GPT.batch(2), 2).fingerprint


def test_the_table_says_who_does_what() -> None:
    text = str(make_plan(GPT(tied=True), GPT.batch(), ["blocks.2", "blocks.4"]))
    lines = text.splitlines()
    assert lines[0].split() == [
        "stage",
        "begins",
        "at",
        "modules",
        "parameters",
        "FLOPs",
        "in",
        "/",
        "sample",
        "out",
        "/",
        "sample",
    ]
    assert lines[2].split()[:3] == ["1", "blocks.2", "blocks.2-3"] and lines[2].split()[-4:] == [
        "2.0",
        "kB",
        "2.0",
        "kB",
    ]
    assert lines[-1] == "embedding.weight is shared by stages 0, 2"


def test_every_parameter_and_buffer_has_a_stage() -> None:
    module = CNN(norm=True)
    module.register_buffer("never_used", torch.zeros(3))
    plan = make_plan(module, module.batch(), 3)
    held = [name for stage in plan.stages for name in (*stage.parameters, *stage.buffers)]
    assert sorted(held) == sorted({**dict(module.named_parameters()), **dict(module.named_buffers())})
    assert plan.stages[0].flops > 0 and sum(stage.parameter_bytes for stage in plan.stages) == 4 * sum(
        parameter.numel() for parameter in module.parameters()
    )


def test_what_no_step_uses_stays_with_its_neighbour() -> None:
    class Extra(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.spare = torch.nn.Linear(2, 2)

    plan = make_plan(Extra(), MLP.batch(), ["net.4"])
    assert "spare.weight" in plan.stages[1].parameters


def test_split_points_are_parsed_and_printed() -> None:
    for text in ("blocks.3", "encoder#2"):
        assert str(SplitPoint.parse(text)) == text
    with pytest.raises(ValueError, match='"a#b" is no split point'):
        SplitPoint.parse("a#b")


class Leaves(GPT):
    """Leaves as many traces as it can."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.register_buffer("steps", torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        batch[0].clamp_(max=7)
        self.seen.append(random.random())
        self.extra = np.random.rand()
        self.logger.experiment.add_scalar("x", 1)
        self.trainer.should_stop = True
        self.log_dict({"epoch": float(self.current_epoch), "lr": 0.1})
        self.print("hello")
        return super().training_step(batch, batch_idx)


def test_planning_leaves_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    module = Leaves()
    trainer = Trainer(
        logger=CSVLogger(tmp_path), enable_progress_bar=False, enable_model_summary=False, accelerator="cpu"
    )
    trainer.strategy._lightning_module = module
    for attached in (None, trainer):
        module._trainer = attached
        batch = module.batch()
        state, kept, original = copy.deepcopy(module.state_dict()), dict(module.__dict__), [t.clone() for t in batch]
        parameters = dict(module.named_parameters())
        generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        make_plan(module, batch, 3)
        make_signature(module, batch, make_plan(module, batch, 2), "validation_step")
        assert all(torch.equal(value, module.state_dict()[name]) for name, value in state.items())
        assert all(parameters[name] is parameter for name, parameter in module.named_parameters())
        assert module.__dict__.keys() == kept.keys() and module.seen == []
        assert all(torch.equal(a, b) for a, b in zip(batch, original, strict=True))
        assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
        assert np.random.get_state()[1].tolist() == generators[2]
        assert module.training and not trainer.should_stop
        assert not any("forward" in part.__dict__ or part._forward_pre_hooks for part in module.modules())
    assert not list(tmp_path.rglob("*.csv")) and "hello" not in capsys.readouterr().out


def test_a_step_that_fails_leaves_no_trace_either() -> None:
    module = Leaves()
    with pytest.raises(AttributeError):
        make_plan(module, (1, 2), 2)
    assert module.seen == [] and not any("forward" in part.__dict__ for part in module.modules())
    assert module.steps == 0


def test_seeds_differ_by_step_microbatch_and_stage_and_reach_all_generators() -> None:
    seeds = {replay_seed(1, s, m, k) for s in range(4) for m in range(4) for k in range(4)}
    assert len(seeds) == 64 and all(0 <= seed < 2**63 for seed in seeds)
    draws = []
    for _ in range(2):
        seed_everything(2**63 - 1)
        draws.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert draws[0] == draws[1]
