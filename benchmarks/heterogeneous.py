"""Two stages, three workers each, one worker four times slower: does work flow to where the capacity is?

The workers' computing is a pause of known length, so that all of them run at their own speed whatever the number of
cores: 100 ms a microbatch, 400 ms on the slow one. Everything else is real: processes, transport, Lightning. What these
cost comes on top of the pauses, so shorter ones (``--pause 0.02``) show more of it. Each
worker notes when it did each microbatch, and the figures are computed from these notes:

* throughput of a step against the ideal split of its microbatches over the workers' speeds;
* each worker's share of its stage's microbatches against its share of the stage's speed;
* a worker that becomes four times slower in the middle: after how many more microbatches of its stage its share has
  followed.

    python benchmarks/heterogeneous.py [--microbatches 320] [--pause 0.1] [--json FILE]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from _report import Report, add_json_argument
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WORKERS, STAGES, SLOWER = 6, 2, 4.0
PAUSE_S = float(os.environ.get("HETEROGENEOUS_PAUSE_S", "0.1"))
STEPS = 6
SLOW_FROM = {0: 0, 1: 3}
"""Which local worker is slow, and from which step on."""


class Pause(nn.Module):
    """A layer that takes its time; on ghosts, which only have shapes, it takes none."""

    def __init__(self, notes: Path | None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.notes = notes
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        index = int(os.environ.get("LIGHTNING_SWARM_LOCAL_INDEX", "-1"))
        if type(x) is Tensor and self.notes is not None and index >= 0:
            slow = index in SLOW_FROM and self.step >= SLOW_FROM[index]
            time.sleep(PAUSE_S * (SLOWER if slow else 1.0))
            with (self.notes / str(index)).open("a") as file:
                file.write(f"{time.time()} {self.step}\n")
        return self.layer(x)


class TwoPauses(pl.LightningModule):
    """One pause a stage."""

    def __init__(self, notes: Path | None) -> None:
        super().__init__()
        self.pauses = nn.ModuleList([Pause(notes) for _ in range(STAGES)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for pause in self.pauses:
            pause.step = self.global_step
            x = pause(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(microbatches: int, notes: Path) -> None:
    """The script that trainer and workers run."""
    from lightning_swarm import SwarmStrategy

    torch.set_num_threads(1)
    strategy = SwarmStrategy(stages=["pauses.1"], workers=WORKERS, microbatches=microbatches)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip

    class Stopwatch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
            while index == 1 and sum(row["ready"] for row in trainer.strategy.report()["workers"]) < WORKERS:
                time.sleep(0.1)
            if trainer.is_global_zero:
                with (notes / "steps").open("a") as file:
                    file.write(f"{time.time()} {trainer.global_step}\n")

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.is_global_zero:
                with (notes / "steps").open("a") as file:
                    file.write(f"{time.time()} {trainer.global_step}\n")

    trainer.callbacks.append(Stopwatch())
    data = DataLoader(TensorDataset(torch.randn(STEPS * microbatches, 8)), batch_size=microbatches)
    trainer.fit(TwoPauses(notes), data)
    if trainer.is_global_zero:
        stages = {row["local_index"]: row["stage"] for row in strategy.report()["workers"]}
        (notes / "stages").write_text("\n".join(f"{index} {stage}" for index, stage in sorted(stages.items())))


def read(file: Path) -> list[tuple[float, int]]:
    """Times and steps."""
    return [(float(when), int(step)) for when, step in (line.split() for line in file.read_text().splitlines())]


def speed(index: int, step: int, pause_s: float) -> float:
    """Microbatches a second of a worker."""
    slow = index in SLOW_FROM and step >= SLOW_FROM[index]
    return 1.0 / (pause_s * (SLOWER if slow else 1.0))


def followed_after(done: list[tuple[float, int]], expected: float, window: int = 60) -> int:
    """After how many microbatches the slow worker's share of the next ``window`` is within 5 points of
    the expected one.
    """
    slow = min(SLOW_FROM, key=lambda index: -SLOW_FROM[index])
    for start in range(len(done) - window):
        share = sum(index == slow for _, index in done[start : start + window]) / window
        if abs(share - expected) <= 0.05:
            return start
    return len(done)


def main() -> None:
    """Run the script, read the notes, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=320, help="a step")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds a microbatch takes a fast worker")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.microbatches, arguments.train)
        return
    pause_s = arguments.pause
    report = Report(
        "heterogeneous", microbatches=arguments.microbatches, workers=WORKERS, stages=STAGES, pause_s=pause_s
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--train", folder, "--microbatches", str(arguments.microbatches)]
        subprocess.run(command, check=True, env={**os.environ, "HETEROGENEOUS_PAUSE_S": str(pause_s)})
        notes = Path(folder)
        stages = {
            int(index): int(stage) for index, stage in (x.split() for x in (notes / "stages").read_text().splitlines())
        }
        steps = read(notes / "steps")
        done = {index: read(notes / str(index)) for index in stages}
    # Step 0 is when the workers join, step 1 when their speeds become known.
    for step in (2, STEPS - 1):
        elapsed = steps[step + 1][0] - steps[step][0]
        capacity = min(sum(speed(i, step, pause_s) for i, s in stages.items() if s == stage) for stage in range(STAGES))
        ideal = arguments.microbatches / capacity
        report.figure(f"step {step}", arguments.microbatches / elapsed, "microbatches/s")
        report.ratio(f"step {step}: throughput / ideal split", ideal / elapsed, at_least=0.95)
        counts = {i: sum(s == step for _, s in done[i]) for i in stages}
        by_stage: dict[int, int] = defaultdict(int)
        for index, stage in stages.items():
            by_stage[stage] += counts[index]
        worst = max(
            abs(
                counts[i] / by_stage[s]
                - speed(i, step, pause_s) / sum(speed(j, step, pause_s) for j, t in stages.items() if t == s)
            )
            for i, s in stages.items()
        )
        report.ratio(f"step {step}: largest error of a worker's share", worst, at_most=0.05)
    slow = max(SLOW_FROM, key=lambda index: SLOW_FROM[index])
    stage = stages[slow]
    after = sorted(
        (when, i) for i, s in stages.items() if s == stage for when, step in done[i] if step >= SLOW_FROM[slow]
    )
    expected = speed(slow, STEPS, pause_s) / sum(speed(i, STEPS, pause_s) for i, s in stages.items() if s == stage)
    report.ratio("microbatches until a change of speed is followed", followed_after(after, expected), at_most=20)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
