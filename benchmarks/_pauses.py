"""A model whose stages take a known time and no computing, so that many workers share few cores at full speed."""

import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


class Pause(nn.Module):
    """A layer that takes its time; on ghosts, which only have shapes, it takes none."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and os.environ.get("LIGHTNING_SWARM_ROLE") == "worker":
            time.sleep(self.pause_s)
        return self.layer(x)


class Pauses(pl.LightningModule):
    """One pause a stage."""

    def __init__(self, stages: int, pause_s: float) -> None:
        super().__init__()
        self.pauses = nn.ModuleList([Pause(pause_s) for _ in range(stages)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for pause in self.pauses:
            x = pause(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)
