"""A GPT of 12 layers trained in four ways on the same two cores: how fast is the swarm of one machine?

* plain Lightning in one process with two threads, on whole batches and on microbatches (``accumulate_grad_batches``);
* ``torch.distributed.pipelining`` over gloo: four processes with a thread each, GPipe and 1F1B schedules;
* ``SwarmStrategy(stages=4)``: four workers with a thread each.

Layers, batch, microbatches, loss and optimizer are the same. Every side runs in a process of its own, one after the
other; ``--rounds`` repeats that, every other time in reverse order, and a ratio is the median of its rounds, because
machines get slower and faster over time. The first steps of each side are not counted. Last come the bytes that each
peer of the swarm sent.

With ``--bare`` there is another swarm, which by turns keeps what a failure would need and keeps nothing: what a
neighbour has fetched is let go at once, and no snapshot is taken. They take turns every two steps of one run, so that
both meet the same machine, and make ``--steps`` counted steps each; in 50 or more there is a snapshot, as by default.

    python benchmarks/local_pipeline.py [--width 384] [--rounds 1] [--steps N] [--sides swarm ...] [--bare]
        [--json FILE]
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from _report import Report, add_json_argument
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LAYERS, CONTEXT, VOCABULARY, HEADS = 12, 128, 256, 4
STAGES, MICROBATCHES, MICROBATCH_SIZE = 4, 8, 4
BATCH_SIZE = MICROBATCHES * MICROBATCH_SIZE
CORES = 2
WARM_UP_STEPS = 2
SIDES = ("plain whole", "plain accumulated", "gpipe", "1f1b", "swarm")
KEEPING = "swarm by turns"
TURN_STEPS, SNAPSHOT_EVERY = 2, 50
# At least this share of the other side's samples/s, by width.
GOALS = {384: {"plain": 0.92, "gloo": 1.0}, 64: {"plain": 0.75, "gloo": 0.85}}


class Embedding(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(CONTEXT, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position[: ids.size(1)]


class Block(nn.Module):
    """Causal attention and an MLP, both with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(pl.LightningModule):
    """The model of all sides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = Embedding(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids, targets = batch
        return loss_of(self(ids), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3)


def data_of(steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (steps * BATCH_SIZE, CONTEXT + 1), generator=generator)
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


class Stopwatch(pl.Callback):
    """Notes when each optimizer step was done, and what the swarm reports before and after the counted ones."""

    def __init__(self, steps: int) -> None:
        self.last_step = WARM_UP_STEPS + steps
        self.done_at: list[float] = []
        self.reports: dict[int, dict[str, Any]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == len(self.done_at):
            return
        # A report calls every worker: its time must not count.
        if trainer.global_step == WARM_UP_STEPS:
            self.report(trainer)
        self.done_at.append(time.perf_counter())
        if trainer.global_step == self.last_step:
            self.report(trainer)

    def report(self, trainer: pl.Trainer) -> None:
        if hasattr(trainer.strategy, "report"):
            self.reports[trainer.global_step] = trainer.strategy.report()

    def step_seconds(self) -> list[float]:
        times = self.done_at[WARM_UP_STEPS - 1 :]
        return [end - begin for begin, end in pairwise(times)]


def fit(width: int, steps: int, batch_size: int, **options: Any) -> tuple[pl.Trainer, Stopwatch]:
    """Train ``steps`` counted steps with Lightning."""
    callbacks = options.pop("callbacks", [])
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
    pl.seed_everything(0, verbose=False)
    stopwatch = Stopwatch(steps)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[stopwatch, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(GPT(width), DataLoader(data_of(WARM_UP_STEPS + steps), batch_size=batch_size))
    return trainer, stopwatch


def run_plain(side: str, width: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(CORES)
    if side == "plain whole":
        _, stopwatch = fit(width, steps, BATCH_SIZE)
    else:
        _, stopwatch = fit(width, steps, MICROBATCH_SIZE, accumulate_grad_batches=MICROBATCHES)
    return {"step_seconds": stopwatch.step_seconds()}


def run_swarm(width: int, steps: int) -> dict[str, Any] | None:
    """What was measured; None in a worker, which runs this script too."""
    from lightning_swarm import SwarmStrategy

    torch.set_num_threads(1)
    strategy = SwarmStrategy(stages=STAGES, microbatches=MICROBATCHES)
    trainer, stopwatch = fit(width, steps, BATCH_SIZE, strategy=strategy)
    if not trainer.is_global_zero:
        return None
    before, after = (sent_bytes(stopwatch.reports[step]) for step in (WARM_UP_STEPS, WARM_UP_STEPS + steps))
    sent = {peer: (after[peer] - before[peer]) / (steps * MICROBATCHES) for peer in after}
    return {"step_seconds": stopwatch.step_seconds(), "sent_bytes": sent}


def keeps(step: int) -> bool:
    """Whether it is the turn of keeping what a failure would need."""
    return max(0, step - WARM_UP_STEPS) // TURN_STEPS % 2 == 0


class SnapshotsByTurns(pl.Callback):
    """Lets the trainer take snapshots in the steps that keep, one in as many of them as by default."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        session = trainer.strategy._session
        every = 2 * SNAPSHOT_EVERY if keeps(trainer.global_step) else 10**9
        session._settings = replace(session._settings, snapshot_every_n_steps=every)


def run_by_turns(width: int, steps: int) -> dict[str, Any] | None:
    """A swarm that keeps in the first steps what a failure would need, then nothing, and so on."""
    from lightning_swarm import SwarmStrategy
    from lightning_swarm.testing import Faults

    class OutboxByTurns(Faults):
        """Bounds a worker's outbox in the steps that keep nothing."""

        async def around(self, worker: Any, call: str, *arguments: Any) -> Any:
            if worker.service is not None and worker.service.server is not None:
                worker.service.outbox.limit_bytes = None if keeps(worker.service.server.version or 0) else 0
            return await super().around(worker, call, *arguments)

    torch.set_num_threads(1)
    strategy = SwarmStrategy(stages=STAGES, microbatches=MICROBATCHES)
    OutboxByTurns([]).inject(strategy)
    trainer, stopwatch = fit(width, 2 * steps, BATCH_SIZE, strategy=strategy, callbacks=[SnapshotsByTurns()])
    if not trainer.is_global_zero:
        return None
    report = stopwatch.reports[WARM_UP_STEPS + 2 * steps]
    return {"step_seconds": stopwatch.step_seconds(), "counters": report["counters"]}


def sent_bytes(report: dict[str, Any]) -> dict[str, int]:
    """Bytes sent so far by the trainer and by each stage's worker, from ``SwarmStrategy.report()``."""
    workers = {f"stage {row['stage']}": row["bytes_sent"] for row in report["workers"]}
    return {"trainer": report["trainer"]["bytes_sent"], **workers}


def run_gloo(side: str, width: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(gloo_worker, (side, width, steps, folder), nprocs=STAGES)
        return json.loads(Path(folder, "result").read_text())


def gloo_worker(rank: int, side: str, width: int, steps: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=STAGES)
    torch.manual_seed(0)
    model = GPT(width)
    each = LAYERS // STAGES
    layers: list[nn.Module] = list(model.blocks[rank * each : (rank + 1) * each])
    if rank == 0:
        layers.insert(0, model.embedding)
    if rank == STAGES - 1:
        layers += [model.norm, model.head]
    module = nn.Sequential(*layers)
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[side](stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = optimizer_of(module)
    done_at = []
    for ids, targets in DataLoader(data_of(WARM_UP_STEPS + steps), batch_size=BATCH_SIZE):
        inputs = (ids,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": targets} if rank == STAGES - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        done_at.append(time.perf_counter())
    # The first stage is the last one to finish a step.
    if rank == 0:
        times = done_at[WARM_UP_STEPS - 1 :]
        seconds = [end - begin for begin, end in pairwise(times)]
        Path(folder, "result").write_text(json.dumps({"step_seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


def measure(side: str, width: int, steps: int) -> dict[str, Any]:
    """Run one side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        command = [sys.executable, __file__, "--side", side, "--width", str(width), "--steps", str(steps)]
        subprocess.run([*command, "--json", str(result)], check=True)
        return json.loads(result.read_text())


def compare(sides: list[str], width: int, steps: int, rounds: int, file: Path | None) -> None:
    """Run all sides and print their ratios."""
    report = Report(
        "local_pipeline",
        width=width,
        layers=LAYERS,
        stages=STAGES,
        microbatches=MICROBATCHES,
        steps=steps,
        rounds=rounds,
    )
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            result = measure(side, width, steps)
            results[side].append(result)
            print(
                f"round {number + 1}, {side}: {BATCH_SIZE / statistics.median(result['step_seconds']):.2f} samples/s",
                flush=True,
            )

    speed = {
        side: [BATCH_SIZE / statistics.median(run["step_seconds"]) for run in runs] for side, runs in results.items()
    }
    for side in sides:
        if side != KEEPING:
            report.figure(side, statistics.median(speed[side]), "samples/s")

    def ratio(a: str, b: str, at_least: float | None = None) -> None:
        if a in speed and b in speed:
            value = statistics.median(x / y for x, y in zip(speed[a], speed[b], strict=True))
            report.ratio(f"{a} / {b}", value, at_least=at_least)

    goals = GOALS.get(width, {})
    for side in ("plain whole", "plain accumulated"):
        ratio("swarm", side, goals.get("plain"))
    for side in ("gpipe", "1f1b"):
        ratio("swarm", side, goals.get("gloo"))
    if KEEPING in results:
        add_turns(report, [run["step_seconds"] for run in results[KEEPING]])
    ratio("gpipe", "plain accumulated")
    ratio("1f1b", "plain accumulated")
    add_traffic(report, results.get("swarm", [{}])[-1].get("sent_bytes", {}), width)
    report.finish(file)


def add_turns(report: Report, runs: list[list[float]]) -> None:
    """What it costs to keep what a failure would need: each turn of the one against the next turn of the other."""
    turns = [run[start : start + TURN_STEPS] for run in runs for start in range(0, len(run), TURN_STEPS)]
    means = [statistics.fmean(turn) for turn in turns]
    kept, bare = means[0::2], means[1::2]
    report.figure("keeping for failures", BATCH_SIZE / statistics.fmean(kept), "samples/s")
    report.figure("keeping nothing", BATCH_SIZE / statistics.fmean(bare), "samples/s")
    ratios = [b / k for k, b in zip(kept, bare, strict=True)]
    if len(ratios) > 1:
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        report.figure(
            "keeping / keeping nothing", statistics.fmean(ratios), "", f"of {len(ratios)} pairs, ± {error:.3f}"
        )
    report.ratio("keeping / keeping nothing", statistics.fmean(bare) / statistics.fmean(kept), at_least=0.98)


def add_traffic(report: Report, sent: dict[str, float], width: int) -> None:
    """What each peer sent for one microbatch, against what has to cross."""
    boundary = MICROBATCH_SIZE * CONTEXT * width * 4
    leaf = MICROBATCH_SIZE * CONTEXT * 8
    # Ids to the first stage and targets to the last; a stage sends its activation on, its gradient back, or both.
    needed = {"trainer": 2 * leaf} | {f"stage {k}": boundary * ((k < STAGES - 1) + (k > 0)) for k in range(STAGES)}
    for peer, count in sorted(sent.items(), key=lambda item: list(needed).index(item[0])):
        report.figure(f"sent by {peer}", count, "bytes a microbatch", f"{needed[peer]:,} needed")
        if peer != "trainer":
            report.ratio(f"sent by {peer} / needed", count / needed[peer], at_most=1.03)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, help="counted steps of each side (default: 6, at widths below 256 20)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--bare", action="store_true", help="add a swarm that keeps nothing for failures by turns")
    parser.add_argument("--side", choices=[*SIDES, KEEPING], help=argparse.SUPPRESS)
    add_json_argument(parser)
    arguments = parser.parse_args()
    steps = arguments.steps or (6 if arguments.width >= 256 else 20)

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    if arguments.side is None:
        sides = [*arguments.sides, *([KEEPING] if arguments.bare else [])]
        compare(sides, arguments.width, steps, arguments.rounds, arguments.json)
        return
    if arguments.side == "swarm":
        result = run_swarm(arguments.width, steps)
    elif arguments.side == KEEPING:
        result = run_by_turns(arguments.width, steps)
    elif arguments.side in ("gpipe", "1f1b"):
        result = run_gloo(arguments.side, arguments.width, steps)
    else:
        result = run_plain(arguments.side, arguments.width, steps)
    if result is not None:
        arguments.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
