"""Small models of many kinds, and batches for them, that the parity tests train."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Regressor(pl.LightningModule):
    """A network of several layers, trained with mean squared error."""

    def __init__(self, net: nn.Module, optimizer: str = "sgd", lr: float = 0.05) -> None:
        super().__init__()
        self.net = net
        self.optimizer_name = optimizer
        self.lr = lr

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return make_optimizer(self, self.optimizer_name, self.lr)


def make_optimizer(module: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW in two groups (weights that decay and those that do not)."""
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    # A large epsilon: the gradient of attention's key bias is zero but for rounding, which depends on the order in
    # which microbatches are summed, and Adam would divide it by its own size.
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": lr / 10}]
    return torch.optim.AdamW(groups, lr=lr / 5, eps=1e-3)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(pl.LightningModule):
    """A byte-level language model."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 32,
        vocabulary: int = 64,
        length: int = 16,
        tied: bool = False,
        dropout: float = 0.0,
        noise: float = 0.0,
        optimizer: str = "sgd",
        lr: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, 4, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.noise = noise
        self.optimizer_name = optimizer
        self.lr = lr

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        noise = torch.randn(tokens.shape[0], length, 1, device=tokens.device, dtype=self.positions.dtype) * self.noise
        x = self.embedding(tokens) + self.positions[:length] + noise
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return make_optimizer(self, self.optimizer_name, self.lr)


class LSTM(nn.Module):
    """Two recurrent layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(8, 16, batch_first=True)
        self.second = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.first(x)
        x, _ = self.second(x)
        return self.head(x[:, -1])


class HuggingFace(pl.LightningModule):
    """An unmodified transformers model that computes its own loss."""

    def __init__(self, model: nn.Module, optimizer: str = "sgd", lr: float = 0.05) -> None:
        super().__init__()
        self.model = model
        self.optimizer_name = optimizer
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return make_optimizer(self, self.optimizer_name, self.lr)


class Rows(Dataset[Any]):
    """A dataset of given samples."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self.samples = [make(index) for index in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@dataclass(frozen=True)
class Case:
    """A model, its data and where it may be cut by name into three stages."""

    make: Callable[[str], pl.LightningModule]
    sample: Callable[[int], Any]
    named: tuple[str, ...]
    batch: int = 8
    options: dict[str, Any] = field(default_factory=dict)

    def loader(self, batches: int = 10, batch: int | None = None) -> DataLoader[Any]:
        """Always the same data in the same order."""
        size = batch or self.batch
        return DataLoader(Rows(self.sample, batches * self.batch), batch_size=size, shuffle=False)


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


def _vector(size: int, out: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def sample(index: int) -> tuple[Tensor, Tensor]:
        generator = _generator(index)
        return torch.randn(size, generator=generator), torch.randn(out, generator=generator)

    return sample


def _image(index: int) -> tuple[Tensor, Tensor]:
    generator = _generator(index)
    return torch.randn(1, 8, 8, generator=generator), torch.randn(4, generator=generator)


def _sequence(index: int) -> tuple[Tensor, Tensor]:
    generator = _generator(index)
    return torch.randn(6, 8, generator=generator), torch.randn(4, generator=generator)


def _tokens(index: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (17,), generator=_generator(index))
    return tokens[:-1], tokens[1:]


def _text(index: int) -> dict[str, Tensor]:
    tokens = torch.randint(5, 64, (16,), generator=_generator(index))
    mask = torch.ones(16, dtype=torch.long)
    mask[12 + index % 4 :] = 0
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def _picture(index: int) -> dict[str, Tensor]:
    generator = _generator(index)
    return {
        "pixel_values": torch.randn(3, 16, 16, generator=generator),
        "labels": torch.randint(0, 4, (), generator=generator),
    }


def _mlp(optimizer: str) -> pl.LightningModule:
    net = nn.Sequential(
        nn.Linear(12, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 4),
    )
    return Regressor(net, optimizer)


def _cnn(optimizer: str) -> pl.LightningModule:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    return Regressor(net, optimizer)


def _llama(optimizer: str) -> pl.LightningModule:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return HuggingFace(transformers.LlamaForCausalLM(config), optimizer)


def _bert(optimizer: str) -> pl.LightningModule:
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return HuggingFace(transformers.BertForMaskedLM(config), optimizer)


def _vit(optimizer: str) -> pl.LightningModule:
    import transformers

    config = transformers.ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return HuggingFace(transformers.ViTForImageClassification(config), optimizer)


CASES: dict[str, Case] = {
    "mlp": Case(_mlp, _vector(12, 4), ("net.2", "net.4")),
    "cnn": Case(_cnn, _image, ("net.2", "net.4")),
    "lstm": Case(lambda o: Regressor(LSTM(), o), _sequence, ("net.second", "net.head")),
    "gpt": Case(lambda o: GPT(optimizer=o), _tokens, ("blocks.1", "blocks.3")),
    "tied gpt": Case(lambda o: GPT(tied=True, optimizer=o), _tokens, ("blocks.1", "blocks.3")),
    "llama": Case(_llama, _text, ("model.model.layers.1", "model.model.layers.3")),
    "bert": Case(_bert, _text, ("model.bert.encoder.layer.1", "model.bert.encoder.layer.3")),
    "vit": Case(_vit, _picture, ("model.vit.layers.1", "model.vit.layers.3")),
}
