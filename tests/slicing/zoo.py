"""Small modules of many kinds, none of which knows that it will be cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(LightningModule):
    def __init__(
        self,
        *,
        vocabulary: int = 61,
        width: int = 32,
        layers: int = 6,
        heads: int = 4,
        length: int = 16,
        tied: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.size(1)
        mask = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
        x = self.embedding(tokens) + self.position[:t]
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        self.log("accuracy", (logits.argmax(-1) == targets).float().mean())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch[0]).argmax(-1)

    @staticmethod
    def batch(samples: int = 4, length: int = 16) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 61, (samples, length)), torch.randint(0, 61, (samples, length))


class MLP(LightningModule):
    def __init__(self, width: int = 24, layers: int = 4) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*parts, nn.Linear(width, 5))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits = self.net(batch["x"])
        return {"loss": F.cross_entropy(logits, batch["y"]), "logits": logits.detach()}

    @staticmethod
    def batch(samples: int = 8) -> dict[str, Any]:
        return {"x": torch.randn(samples, 24), "y": torch.randint(0, 5, (samples,)), "names": "abc", "extra": None}


class CNN(LightningModule):
    """Convolutions, in-place activations right behind the places where stages begin, and a shape-dependent flatten."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int) -> list[nn.Module]:
            norms = [nn.BatchNorm2d(outputs)] if norm else []
            return [nn.ReLU(inplace=True), nn.Conv2d(inputs, outputs, 3, padding=1), *norms]

        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), *layer(8, 8), *layer(8, 16), nn.MaxPool2d(2), *layer(16, 16)
        )
        self.head = nn.Linear(16 * 4 * 4, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.features(x).flatten(1)), y)

    @staticmethod
    def batch(samples: int = 6) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 1, 8, 8), torch.randint(0, 10, (samples,))


class LSTM(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.first, self.second = nn.LSTM(16, 20, batch_first=True), nn.LSTM(20, 20, batch_first=True)
        self.head = nn.Linear(20, 31)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, _ = self.first(self.embedding(batch[:, :-1]))
        x, (hidden, _) = self.second(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten()) + 0.01 * hidden.square().mean()

    @staticmethod
    def batch(samples: int = 4) -> Tensor:
        return torch.randint(0, 31, (samples, 9))
