"""Unmodified Hugging Face models, built from small configurations, are cut and equal the whole step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_swarm.slicing.plan import make_signature

from .harness import compare

transformers = pytest.importorskip("transformers")


class Wrapped(LightningModule):
    """What most people write around a Hugging Face model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs = self.model(**batch)
        self.log("loss", outputs.loss)
        return outputs.loss


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def tokens(samples: int = 3, length: int = 12) -> Tensor:
    return torch.randint(1, 64, (samples, length))


def text_batch() -> dict[str, Any]:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def llama(**options: Any) -> Wrapped:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return Wrapped(transformers.LlamaForCausalLM(config))


def bert() -> Wrapped:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Wrapped(transformers.BertForMaskedLM(config))


def vit() -> Wrapped:
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=5,
    )
    return Wrapped(transformers.ViTForImageClassification(config))


def t5() -> Wrapped:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return Wrapped(transformers.T5ForConditionalGeneration(config))


def bart() -> Wrapped:
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=32,
        dropout=0.0,
    )
    return Wrapped(transformers.BartForConditionalGeneration(config))


def resnet() -> Wrapped:
    config = transformers.ResNetConfig(
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
        num_labels=5,
    )
    return Wrapped(transformers.ResNetForImageClassification(config))


def image_batch() -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 1, 16, 16), "labels": torch.randint(0, 5, (4,))}


@pytest.mark.parametrize("stages", [3, 4])
def test_llama_with_an_attention_mask(stages: int) -> None:
    outcome = compare(llama().train(), text_batch(), stages)
    assert not outcome.plan.shared


def test_llama_with_tied_embeddings() -> None:
    outcome = compare(llama(tie_word_embeddings=True).train(), text_batch(), 3, tolerance=1e-6)
    assert list(outcome.plan.shared) == ["model.model.embed_tokens.weight"]


def test_llama_without_a_cache() -> None:
    compare(llama(use_cache=False).train(), text_batch(), ["model.model.layers.1", "model.model.layers.3"])


@pytest.mark.parametrize("stages", [2, 4])
def test_bert(stages: int) -> None:
    compare(bert().train(), text_batch(), stages, tolerance=1e-6)


@pytest.mark.parametrize("stages", [3, 4])
def test_vit(stages: int) -> None:
    compare(vit().train(), image_batch(), stages)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_t5_hands_encoder_states_through_all_decoder_stages(stages: int) -> None:
    batch = {"input_ids": tokens(), "labels": tokens(length=7)}
    compare(t5().train(), batch, stages, tolerance=1e-5)


def test_t5_cut_in_the_decoder() -> None:
    batch = {"input_ids": tokens(), "labels": tokens(length=7)}
    names = ["model.encoder.block.1", "model.decoder.block.1", "model.decoder.block.2"]
    outcome = compare(t5().train(), batch, names, tolerance=1e-5)
    assert len(outcome.plan.signatures["training_step"].boundaries[2].positions) > 1


@pytest.mark.parametrize("stages", [2, 4])
def test_bart(stages: int) -> None:
    batch = {"input_ids": tokens(), "labels": tokens(length=7)}
    compare(bart().train(), batch, stages, tolerance=1e-5)


@pytest.mark.parametrize("stages", [2, 4])
def test_resnet(stages: int) -> None:
    compare(resnet().train(), image_batch(), stages)


def mixtral() -> Wrapped:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return Wrapped(transformers.MixtralForCausalLM(config))


def test_a_mixture_of_experts() -> None:
    outcome = compare(mixtral().train(), text_batch, 3, tolerance=1e-6)
    assert all(stage.parameters for stage in outcome.plan.stages)


def test_llama_with_gradient_checkpointing() -> None:
    module = llama(use_cache=False).train()
    module.model.gradient_checkpointing_enable()
    compare(module, text_batch, ["model.model.layers.1", "model.model.layers.3"])


def test_a_step_that_returns_the_models_whole_output() -> None:
    class Returns(Wrapped):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            return self.model(**batch)

        validation_step = training_step

    module = Returns(llama(use_cache=False).model).train()
    outcome = compare(module, text_batch, ["model.model.layers.2"])
    assert type(outcome.result.logits) is Tensor
    signature = make_signature(module, text_batch(), outcome.plan, "validation_step")
    batch = text_batch()
    for stage in outcome.pipeline.stages:
        stage.module.eval()
    with torch.no_grad():
        result = outcome.pipeline.step(batch, "validation_step", signature)
        assert torch.equal(result.logits, module.eval().model(**batch).logits)
