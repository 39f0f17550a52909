"""A small convolutional network reads scikit-learn's handwritten digits; its torchmetrics are those of one process.

Run one of
    python examples/train_digits.py               # two stages, each in a process of its own
    python examples/train_digits.py --stages 0    # the same training in this one process
"""

import argparse

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_swarm import SwarmStrategy


class DigitReader(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
        self.accuracy = nn.ModuleDict(
            {split: MulticlassAccuracy(10, average="micro") for split in ("fit", "val", "test")}
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))

    def step(self, split: str, batch: list[Tensor]) -> Tensor:
        images, digits = batch
        scores = self(images)
        loss = F.cross_entropy(scores, digits)
        self.accuracy[split](scores, digits)
        self.log(f"{split}_accuracy", self.accuracy[split], on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{split}_loss", loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step("fit", batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step("val", batch)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step("test", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="0 trains in this one process, without the swarm")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    seed_everything(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    fit, validation, test = random_split(TensorDataset(images, labels), [0.7, 0.1, 0.2])

    trainer = Trainer(
        strategy=SwarmStrategy(stages=args.stages) if args.stages else "auto",
        accelerator="cpu",
        max_epochs=args.epochs,
        log_every_n_steps=10,
        callbacks=[EarlyStopping("val_loss", patience=3)],
    )
    model = DigitReader()
    trainer.fit(model, DataLoader(fit, batch_size=64, shuffle=True), DataLoader(validation, batch_size=64))
    trainer.test(model, DataLoader(test, batch_size=64))


if __name__ == "__main__":
    main()
