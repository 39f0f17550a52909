"""A byte-level GPT learns the English of Python's own manual: plain Lightning, but for one line.

Run one of
    python examples/train_lm.py               # four stages, each in a process of its own
    python examples/train_lm.py --stages 0    # the same training in this one process
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_swarm import SwarmStrategy

CONTEXT = 128  # bytes that a prediction may look back
HELD_OUT = ("calls", "debugger", "import", "strings")  # many topics quote others; these four are quoted nowhere


def read(held_out: bool) -> Tensor:
    """The text of the topics on one side of the split, as a vector of bytes."""
    text = "\n\n".join(body for name, body in sorted(topics.items()) if (name in HELD_OUT) == held_out)
    return torch.tensor(list(text.encode()))


def windows(text: Tensor, stride: int) -> TensorDataset:
    return TensorDataset(text.unfold(0, CONTEXT + 1, stride))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021): turns pairs of channels by an angle that grows with the position."""
    (a, b), (cos, sin) = x.chunk(2, -1), rotary
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    def __init__(self, steps: int, width: int = 128, layers: int = 8, heads: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        pairs = width // heads // 2
        angles = torch.outer(torch.arange(CONTEXT), 10_000.0 ** -(torch.arange(pairs) / pairs))
        self.register_buffer("rotary", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, rotary = self.embedding(ids), self.rotary[:, : ids.size(1)]
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, self.hparams.steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int) -> bytes:
        ids = torch.tensor([list(prompt)])
        for _ in range(length):
            probabilities = torch.softmax(self(ids[:, -CONTEXT:])[0, -1] / 0.8, -1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1)[None]], 1)
        return bytes(ids[0, -length:].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="0 trains in this one process, without the swarm")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--workers", type=int, help="so many on this machine; 0: all are started elsewhere")
    args = parser.parse_args()

    seed_everything(0)
    train, validation = read(held_out=False), read(held_out=True)
    trainer = Trainer(
        strategy=SwarmStrategy(stages=args.stages, workers=args.workers) if args.stages else "auto",
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=args.steps,
        val_check_interval=0.5,
        log_every_n_steps=5,
        logger=TensorBoardLogger("lightning_logs", name="train_lm"),
        callbacks=[checkpoint := ModelCheckpoint(monitor="val_loss")],
    )
    trainer.fit(
        GPT(args.steps),
        DataLoader(windows(train, CONTEXT // 2), batch_size=16, shuffle=True, drop_last=True),
        DataLoader(windows(validation, CONTEXT), batch_size=32, drop_last=True),
    )

    if trainer.is_global_zero:
        share = validation.bincount() / len(validation)
        print(f"unigram entropy {torch.special.entr(share).sum():.3f} nats a byte", end=", ")
        print(f"validation loss {checkpoint.best_model_score:.3f}; the checkpoint, loaded without the swarm, writes:")
        model = GPT.load_from_checkpoint(checkpoint.best_model_path)
        print(model.generate(b"The following ", 200).decode(errors="replace"))


if __name__ == "__main__":
    main()
