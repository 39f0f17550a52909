"""What strangers' modules do: run twice, draw noise, look at data, keep things on themselves."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_swarm.slicing.plan import CutError, make_plan, make_signature

from .harness import SEED, Pipeline, compare, reseed
from .zoo import CNN, GPT, MLP


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


class Base(LightningModule):
    """Four layers between an embedding and a head; subclasses do something unusual."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(width, 3)

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.body(x)), y)

    @staticmethod
    def batch(samples: int = 6, width: int = 12) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, width), torch.randint(0, 3, (samples,))


# -- modules called several times


class Siamese(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        one, other = self.head(self.body(x)), self.head(self.body(x.flip(-1)))
        return F.cross_entropy(one, y) + (one - other).square().mean()


class Recurrent(Base):
    """One block applied three times."""

    def body(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layers[1](self.layers[0](x))
        return x


def test_a_model_that_runs_twice_shares_what_is_used_on_both_sides() -> None:
    outcome = compare(Siamese(), Siamese.batch(), ["layers.2"], tolerance=1e-6)
    assert outcome.plan.shared["embed.weight"] == (0, 1)
    assert outcome.plan.shared["layers.1.0.weight"] == (0, 1)
    assert "layers.2.0.weight" not in outcome.plan.shared


def test_a_module_called_several_times_is_cut_by_call_number() -> None:
    outcome = compare(Recurrent(), Recurrent.batch(), ["layers.0#1", "layers.1#2"], tolerance=1e-6)
    assert [str(cut) for cut in outcome.plan.cuts] == ["layers.0#1", "layers.1#2"]
    assert outcome.plan.shared["layers.0.0.weight"] == (0, 1)
    assert outcome.plan.shared["layers.1.0.weight"] == (0, 1, 2)


# -- references around the call that begins a stage


class Skips(Base):
    """Long skip connections, in variables of the enclosing code."""

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        first = x
        for layer in self.layers:
            x = x + layer(x)
        return x if first.numel() else first


def test_a_residual_around_the_call_that_begins_a_stage() -> None:
    compare(Skips(), Skips.batch(), ["layers.1", "layers.2", "layers.3"])


class Twice(Base):
    """The same tensor twice among the arguments."""

    class Pair(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor, *, inputs: dict[str, Tensor]) -> Tensor:
            return self.a(x) * self.b(inputs["again"])

    def __init__(self) -> None:
        super().__init__()
        self.pair = Twice.Pair(12)

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.pair(x, inputs={"again": x})


def test_one_tensor_twice_among_the_arguments_crosses_once() -> None:
    outcome = compare(Twice(), Twice.batch(), ["pair"])
    boundary = outcome.plan.signatures["training_step"].boundaries[0]
    assert len(boundary.positions) == 1 and len(boundary.twins) == 1


class Scattered(Base):
    """Writes activations into a tensor that was made from nothing."""

    def body(self, x: Tensor) -> Tensor:
        canvas = torch.zeros(x.shape[0], 2, x.shape[1])
        canvas[:, 0] = self.embed(x)
        canvas[:, 1] = x
        for layer in self.layers:
            canvas = layer(canvas)
        return canvas.sum(1)


def test_a_real_tensor_that_activations_were_written_into_crosses() -> None:
    compare(Scattered(), Scattered.batch(), ["layers.0", "layers.2"])


# -- randomness


class Noisy(Base):
    """Noise before the first module is the same everywhere; noise behind it must cross or stay in its stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        early = torch.rand_like(x) + random.random() + float(np.random.rand())
        x = self.embed(x + early)
        for layer in self.layers:
            x = F.dropout(layer(x), 0.1)
        return F.cross_entropy(self.head(x * early), y)


class LateNoise(Base):
    class Mix(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor, noise: Tensor) -> Tensor:
            return self.linear(x) * noise

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.ModuleList(LateNoise.Mix(12) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        noise = torch.rand(x.shape)
        for mix in self.mixes:
            x = mix(x, noise)
        return x


def test_noise_drawn_before_the_first_module_is_the_same_on_every_stage() -> None:
    module = Noisy()
    batch = module.batch()
    pipeline = Pipeline(module, make_plan(module, batch, 3))
    first, second = pipeline.step(batch), pipeline.step(batch)
    assert torch.equal(first, second)
    assert not torch.equal(first, pipeline.step(batch, seed=SEED + 1))


def test_a_random_value_drawn_behind_the_first_module_crosses() -> None:
    module = LateNoise()
    outcome = compare(module, module.batch(), ["mixes.1", "mixes.2"])
    assert [len(b.positions) for b in outcome.plan.signatures["training_step"].boundaries] == [2, 2]


def test_dropout_is_replayed_by_the_seed() -> None:
    module = GPT(dropout=0.1)
    batch = module.batch()
    plan = make_plan(module, batch, 3)
    one, other = Pipeline(module, plan), Pipeline(module, plan)
    for pipeline in (one, other):
        for stage in pipeline.stages:
            stage.module.__dict__["log"] = lambda *args, **kwargs: None
    other.step(batch, seed=SEED + 5)
    for parameter in (p for stage in other.stages for p in stage.owned_parameters().values()):
        parameter.grad = None
    assert torch.equal(one.step(batch), other.step(batch))
    for name, gradient in one.gradients().items():
        assert torch.equal(gradient, other.gradients()[name]), name


# -- code that looks at data


class Experts(nn.Module):
    """Routes every row to one of its experts, by data."""

    def __init__(self, width: int, style: str) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        if self.style == "where":
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = torch.where(chosen == number)[0]
                if rows.numel():
                    out.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
            return out
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=3).tolist()
        parts = torch.split(x[order], counts)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.empty_like(out).index_copy(0, order, out) * weights[:, None]


class Routed(Base):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Experts(12, style) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, experts in zip(self.layers, self.experts, strict=False):
            x = layer(x) + experts(x)
        return x


@pytest.mark.parametrize("style", ["where", "split"])
def test_routing_by_data_is_rehearsed_on_zeros(style: str) -> None:
    module = Routed(style)
    compare(module, module.batch(), ["layers.1", "layers.2"])


class Masked(Base):
    """Selects by a mask that depends on the batch: its data decide shapes on every stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        keep = y > 0
        x = self.embed(x)[keep]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y[keep])


def test_a_mask_of_the_batch_that_decides_shapes_reaches_every_stage() -> None:
    outcome = compare(Masked(), Masked.batch(), ["layers.1", "layers.3"])
    assert all(1 in leaves for leaves in outcome.plan.signatures["training_step"].batch_leaves)


class ReadsNumber(Base):
    """Reads a number from an activation, and uses it later."""

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scale = x.abs().max().item()
        for layer in self.layers:
            x = layer(x)
        return x * scale


def test_a_number_read_from_an_activation_forbids_cuts_behind_it() -> None:
    with pytest.raises(CutError, match=r"a number was read from a tensor at test_hard_cases.py:\d+"):
        make_plan(ReadsNumber(), ReadsNumber.batch(), ["layers.1"])


class LooksAtTheEnd(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.head(self.body(x))
        loss = F.cross_entropy(logits, y)
        if torch.isnan(loss) or loss.item() > 1e6:
            return None
        self.seen = f"{loss:.3f}", logits.argmax(-1).tolist(), loss.detach().numpy().copy(), 1 / loss.item()
        return loss


def test_numbers_read_at_the_end_of_the_step_are_no_trouble() -> None:
    outcome = compare(LooksAtTheEnd(), LooksAtTheEnd.batch(), 3)
    assert outcome.pipeline.stages[-1].module.seen[0] == f"{outcome.result:.3f}"
    assert "seen" not in outcome.pipeline.stages[0].module.__dict__


# -- state kept on modules


class Lazy(Base):
    """Keeps a table on itself that it makes when it is first needed, and notes down the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.history: list[Any] = []
        self.counts = {"steps": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.history.append(batch_idx)
        self.counts["steps"] += 1
        self.weights = y.float() + 1
        h = self.embed(x)
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1])
        h = h + self.table
        for layer in self.layers:
            h = layer(h)
        self.history.append("end")
        return (F.cross_entropy(self.head(h), y, reduction="none") * self.weights).mean()


def test_what_the_step_stores_in_front_of_the_split_point_is_undone_and_what_it_stores_behind_stays() -> None:
    outcome = compare(Lazy(), Lazy.batch(), 3)
    first, middle, last = (stage.module for stage in outcome.pipeline.stages)
    assert first.history == [0, 0] and first.counts == {"steps": 2} and isinstance(first.table, Tensor)
    assert middle.history == [] and middle.table is None and "weights" not in middle.__dict__
    assert last.history == ["end", "end"] and last.counts == {"steps": 0}
    assert outcome.plan.signatures["training_step"].speaking == (True, False, True)


class Metered(Base):
    """Metrics of inputs, of activations and of predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.hidden = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.inputs.update(x)
        h = self.embed(x)
        self.hidden.update(h.detach())
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy)
        return F.cross_entropy(logits, y)


def test_metrics_count_on_the_stage_that_computes_them_only() -> None:
    module = Metered()
    batch = module.batch()
    outcome = compare(module, batch, ["layers.1", "layers.3"])
    first, middle, last = (stage.module for stage in outcome.pipeline.stages)
    assert first.inputs.compute() == pytest.approx(batch[0].mean().item(), abs=1e-6)
    for part in (middle, last):
        assert part.inputs._update_count == 0 and part.inputs.weight == 0
        assert part.hidden._update_count == 0 and part.hidden.weight == 0
    assert first.accuracy._update_count == 0 and last.accuracy._update_count == 2
    assert module.inputs._update_count == 0 and module.inputs.weight == 0


def test_running_statistics_change_on_their_stage_only_and_as_in_the_whole_step() -> None:
    module = CNN(norm=True)
    batch = module.batch()
    whole = copy.deepcopy(module)
    outcome = compare(module, batch, 3)
    reseed(SEED)
    for _ in range(2):
        whole.training_step(batch, 0)
    expected = dict(whole.named_buffers())
    seen = set()
    for stage in outcome.pipeline.stages:
        for name, buffer in stage.owned_buffers().items():
            seen.add(name)
            torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)
    assert seen == set(expected)


# -- evaluation


@pytest.mark.parametrize("step", ["validation_step", "predict_step"])
def test_evaluation_steps_run_under_the_cuts_of_training(step: str) -> None:
    module = GPT(dropout=0.1)
    batch = module.batch()
    plan = make_plan(module, batch, 3)
    plan = plan.with_signature(make_signature(module, batch, plan, step))
    assert module.training
    for stage in plan.signatures[step].boundaries:
        assert not any(spec.requires_grad for spec in stage.specs)
    pipeline = Pipeline(module, plan)
    for part in [module, *(stage.module for stage in pipeline.stages)]:
        part.eval()
        part.__dict__["log"] = lambda *args, **kwargs: None
    with torch.no_grad():
        expected = module.validation_step(batch, 0) if step == "validation_step" else module.predict_step(batch)
    assert torch.equal(pipeline.step(batch, step), expected)


class Unused(Base):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(12, 3)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.extra(self.body(x)), y) + self.embed.weight.norm()


def test_a_step_that_uses_a_parameter_elsewhere_extends_ownership() -> None:
    module = Unused()
    batch = module.batch()
    plan = make_plan(module, batch, ["layers.2"])
    assert "extra.weight" in plan.stages[1].parameters and "embed.weight" not in plan.stages[1].parameters
    plan = plan.with_signature(make_signature(module, batch, plan, "validation_step"))
    assert plan.shared == {"embed.weight": (0, 1)}


# -- modules without storage


def test_a_module_on_the_meta_device_is_planned_and_materialised_by_stage() -> None:
    real = GPT()
    batch = real.batch()
    with torch.device("meta"):
        hollow = GPT()
    plan = make_plan(hollow, batch, 3)
    assert plan == make_plan(real, batch, 3)
    assert all(parameter.is_meta for parameter in hollow.parameters())
    pipeline = Pipeline(hollow, plan)
    weights = dict(real.named_parameters())
    for stage in pipeline.stages:
        stage.module.__dict__["log"] = lambda *args, **kwargs: None
        for name, parameter in stage.owned_parameters().items():
            assert parameter.untyped_storage().nbytes() == weights[name].untyped_storage().nbytes()
            with torch.no_grad():
                parameter.copy_(weights[name])
    real.__dict__["log"] = lambda *args, **kwargs: None
    assert torch.equal(pipeline.step(batch), real.training_step(batch, 0))


# -- activation checkpointing, mixed precision, frozen parts


class Checkpointed(Base):
    """Repeats its layers in the backward pass, dropout included."""

    def __init__(self, reentrant: bool = False, wrapped: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.Tanh()) for _ in range(4))
        self.reentrant, self.wrapped = reentrant, wrapped

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            function = (lambda x, layer=layer: layer(x)) if self.wrapped else layer
            x = checkpoint(function, x, use_reentrant=self.reentrant)
        return x


def test_checkpointed_layers_draw_the_same_numbers_when_they_are_repeated() -> None:
    module = Checkpointed()
    batch = module.batch()
    plan = make_plan(module, batch, ["layers.1", "layers.3"])
    repeating, plain = Pipeline(module, plan), Pipeline(module, plan)
    for stage in plain.stages:
        stage.module.body = types.MethodType(Base.body, stage.module)
    assert torch.equal(repeating.step(batch), plain.step(batch))
    for name, gradient in plain.gradients().items():
        assert gradient is not None and torch.equal(gradient, repeating.gradients()[name]), name


@pytest.mark.parametrize(
    ("options", "reason"), [((True,), "use_reentrant=False"), ((False, True), "the module itself")]
)
def test_checkpoints_that_cannot_be_cut_are_refused(options: tuple[bool, ...], reason: str) -> None:
    with pytest.raises(CutError, match=f'Stage 1 cannot begin at "layers.1": .*{reason}'):
        make_plan(Checkpointed(*options), Base.batch(), ["layers.1"])


def test_mixed_precision_crosses_as_it_is_computed() -> None:
    module = MLP()
    batch = module.batch()
    context = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    plan = make_plan(module, batch, ["net.3", "net.5"], context=context)
    assert plan.signatures["training_step"].boundaries[0].specs[0].dtype is torch.bfloat16
    pipeline = Pipeline(module, plan)
    with context():
        loss = pipeline.step(batch)["loss"]
        expected = module.training_step(batch, 0)["loss"]
    expected.backward()
    assert torch.equal(loss, expected)
    for name, parameter in module.named_parameters():
        assert torch.equal(pipeline.gradients()[name], parameter.grad), name


def test_nothing_flows_back_into_frozen_stages() -> None:
    module = GPT()
    for part in (module.embedding, module.blocks[0], module.blocks[1]):
        part.requires_grad_(False)
    module.position.requires_grad_(False)
    outcome = compare(module, module.batch(), ["blocks.1", "blocks.3"])
    wants = [b.specs[0].requires_grad for b in outcome.plan.signatures["training_step"].boundaries]
    assert wants == [False, True]


# -- other batches, other containers


def test_a_batch_in_a_mapping_of_its_own_kind() -> None:
    class Batch(UserDict):
        pass

    class FromMapping(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.head(self.body(batch["x"])), batch["y"])

    x, y = Base.batch()
    outcome = compare(FromMapping(), Batch(x=x, y=y, name="text"), 3)
    assert outcome.plan.signatures["training_step"].batch_leaves == ((0,), (), (1,))


def test_transformer_layers_of_torch_in_training_and_evaluation() -> None:
    class Encoder(Base):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 4)

        def body(self, x: Tensor) -> Tensor:
            return self.encoder(self.embed(x)[:, None])[:, 0]

        validation_step = Base.training_step

    module = Encoder()
    batch = module.batch()
    outcome = compare(module, batch, 3)
    signature = make_signature(module, batch, outcome.plan, "validation_step")
    for part in [module, *(stage.module for stage in outcome.pipeline.stages)]:
        part.eval()
    with torch.no_grad():
        assert torch.equal(outcome.pipeline.step(batch, "validation_step", signature), module.validation_step(batch, 0))


class Unseeded(LateNoise):
    """Draws from a generator of its own, in front of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.rand(x.shape, generator=self.generator)
        x = self.embed(x)
        for mix in self.mixes:
            x = mix(x, noise)
        return F.cross_entropy(self.head(x), y)


def test_noise_from_a_generator_of_its_own_crosses() -> None:
    module = Unseeded()
    plan = make_plan(module, module.batch(), ["mixes.1"])
    assert len(plan.signatures["training_step"].boundaries[0].positions) == 2


class Selects(Base):
    """How many rows are left depends on activations, and the step counts them."""

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x[x[:, 0] > 0]
        count = len(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum(0, keepdim=True) / max(count, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.body(x)), y[:1])


def test_a_shape_that_activations_decide_forbids_cuts_behind_it() -> None:
    with pytest.raises(CutError, match=r"the shape of a tensor was decided by data at test_hard_cases.py:\d+"):
        make_plan(Selects(), Selects.batch(), ["layers.1"])


class Pools(Base):
    """An attribute that somebody changes between microbatches decides shapes."""

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.stride = nn.Linear(12, 12), 1

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)[:, :: self.stride]

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pools.Pool()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.pool(self.embed(batch[0])[..., None].expand(-1, -1, 12))
        length = x.shape[1]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.sum(1) / length), batch[1])


def test_an_attribute_that_changes_shapes_between_microbatches_is_noticed() -> None:
    module = Pools()
    batch = module.batch()
    outcome = compare(module, batch, ["layers.1", "layers.3"])
    for part in (module, *(stage.module for stage in outcome.pipeline.stages)):
        part.pool.stride = 3
    assert torch.equal(outcome.pipeline.step(batch), module.training_step(batch, 0))


def test_a_submodule_with_two_names_is_cut_by_either() -> None:
    module = Base()
    module.alias = module.layers[2]
    assert [str(cut) for cut in make_plan(module, module.batch(), ["alias"]).cuts] == ["layers.2"]
