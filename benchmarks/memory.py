"""A model of 2 GB in four stages: does a worker hold its stage's parameters, or the model's?

The model is built in ``configure_model``, so a worker never makes what it does not serve. Every worker notes its
resident memory after imports and a first tiny computation (the interpreter), its peak at the end, and how many bytes of
real parameters it holds. The goal for the difference is 0.5 GiB. Linux only: the figures are those of /proc.

    python benchmarks/memory.py [--gigabytes 2] [--fit] [--json FILE]

By default the model is evaluated. ``--fit`` trains it with plain SGD, which needs room for as many gradients.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from _report import Report, add_json_argument
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_swarm import SwarmStrategy

STAGES, BATCH_SIZE, BATCHES = 4, 8, 2
LAYER_BYTES = 25e6
# 0.5 GiB for a quarter of 2 GB; as much again for gradients.
GOAL = 2**29 / 0.5e9


class Large(pl.LightningModule):
    """Layers of 25 MB each, none of them there before ``configure_model``."""

    def __init__(self, total_bytes: float) -> None:
        super().__init__()
        self.count = STAGES * round(total_bytes / LAYER_BYTES / STAGES)
        self.width = round((total_bytes / self.count / 4) ** 0.5)

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(self.count)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0].expand(-1, self.width)).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def memory_bytes(name: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def interpreter_bytes() -> int:
    """What a process that has computed something takes without any model; the peak counts from here on."""
    layer = nn.Linear(8, 8)
    layer(torch.zeros(2, 8)).sum().backward()
    del layer
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


class Memory(pl.Callback):
    """Leaves the figures of a peer in ``folder`` when its Lightning call ends: workers get no further in the script."""

    def __init__(self, folder: Path, interpreter: int) -> None:
        self.folder, self.interpreter = folder, interpreter

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        held = {
            name: parameter
            for name, parameter in module.named_parameters()
            if not isinstance(parameter.data, FakeTensor) and not parameter.is_meta
        }
        figures = {
            "role": "trainer" if trainer.is_global_zero else "worker",
            "interpreter": self.interpreter,
            "peak": memory_bytes("VmHWM"),
            "parameters": sum(parameter.nbytes for parameter in held.values()),
            "first": next(iter(held), ""),
        }
        Path(self.folder, f"{os.getpid()}.json").write_text(json.dumps(figures))


def run(total_bytes: float, fit: bool, folder: Path) -> None:
    """What every peer runs."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
    memory = Memory(folder, interpreter_bytes())
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        strategy=SwarmStrategy(stages=STAGES),
        accelerator="cpu",
        max_epochs=1,
        callbacks=[memory],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.ones(BATCHES * BATCH_SIZE, 1)), batch_size=BATCH_SIZE)
    if fit:
        trainer.fit(Large(total_bytes), data)
    else:
        trainer.validate(Large(total_bytes), data, verbose=False)


def measure(total_bytes: float, fit: bool, file: Path | None) -> None:
    """Run the swarm in processes of its own and print what they noted."""
    report = Report("memory", gigabytes=total_bytes / 1e9, stages=STAGES, call="fit" if fit else "validate")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--gigabytes", str(total_bytes / 1e9), "--folder", folder]
        subprocess.run(command + ["--fit"] * fit, check=True)
        peers: list[dict[str, Any]] = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    workers = sorted(
        (peer for peer in peers if peer["role"] == "worker"), key=lambda peer: int(peer["first"].split(".")[1])
    )
    assert len(workers) == STAGES, f"{len(workers)} of {STAGES} workers left their figures"
    for stage, worker in enumerate(workers):
        peak = worker["peak"] - worker["interpreter"]
        report.figure(f"stage {stage}: parameters", worker["parameters"] / 1e6, "MB", f"from {worker['first']} on")
        report.figure(f"stage {stage}: peak", peak / 1e6, "MB", f"over {worker['interpreter'] / 1e6:.0f} MB at start")
        report.ratio(f"stage {stage}: peak / parameters", peak / worker["parameters"], at_most=GOAL * (2 if fit else 1))
    report.finish(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model's parameters")
    parser.add_argument("--fit", action="store_true", help="train instead of evaluate")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.folder is None:
        measure(arguments.gigabytes * 1e9, arguments.fit, arguments.json)
    else:
        run(arguments.gigabytes * 1e9, arguments.fit, arguments.folder)


if __name__ == "__main__":
    main()
