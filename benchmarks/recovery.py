"""What the death of a worker costs: the extra time of the step in which it dies, in steps.

The workers' computing is a pause of known length, so that all of them run at their own speed whatever the number of
cores; everything else is real: processes that end by ``SIGKILL``, transport, Lightning, restarts.

* With two workers a stage: one is killed at each moment of the protocol in turn. Its stage goes on with one worker for
  the rest of the step, which is part of the extra time. Between two kills the worker is started again, which is not.
* With one worker a stage: it is killed when the snapshot is five steps old. The swarm waits until another one has
  started (measured, and taken off), goes back to the snapshot and makes these steps again, which takes as long as they
  took; or, with ``log_gradients=True``, goes on at the step under way, which is what the goal is for.

    python benchmarks/recovery.py [--pause 0.05] [--microbatches 32] [--json FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from _pauses import Pauses
from _report import Report, add_json_argument
from torch.utils.data import DataLoader, TensorDataset

STAGES = 3
MOMENTS = ["forward", "forwarded", "fetched", "accumulated", "reduce", "reducing", "reduced", "commit", "committed"]
FIRST, APART = 4, 3
"""The step of the first kill, and steps from one to the next."""
SNAPSHOT_EVERY, LOST_AT = 6, 11
VICTIM = "0"
"""The local index of the worker that dies."""


class Clock(pl.Callback):
    """Times the steps. Every step begins when all workers are there; waiting for them is not part of it."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.steps_s: list[float] = []
        self.start_s = 0.0
        """From the worker's death to the moment when its successor is ready."""
        self._began_s = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        while index and sum(row["ready"] for row in strategy.report()["workers"]) < self.workers:
            time.sleep(0.05)
        if index == LOST_AT:
            threading.Thread(target=self._watch, args=(strategy,), daemon=True).start()
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps_s.append(time.perf_counter() - self._began_s)

    def _watch(self, strategy: Any) -> None:
        process = strategy._local._workers[int(VICTIM)].process
        process.wait()
        died_s = time.perf_counter()
        while sum(worker.ready for worker in strategy._session.roster.workers.values()) < self.workers:
            time.sleep(0.01)
        while strategy._local._workers[int(VICTIM)].process is process:
            time.sleep(0.01)
        while sum(worker.ready for worker in strategy._session.roster.workers.values()) < self.workers:
            time.sleep(0.01)
        self.start_s = time.perf_counter() - died_s


def train(order: dict[str, Any]) -> None:
    """The script that trainer and workers run."""
    from lightning_swarm import SwarmStrategy
    from lightning_swarm.testing import Fault, Faults

    torch.set_num_threads(1)
    microbatches, workers = order["microbatches"], order["workers"]
    options = {"workers": workers, "microbatches": microbatches, "snapshot_every_n_steps": SNAPSHOT_EVERY}
    strategy = SwarmStrategy(stages=["pauses.1", "pauses.2"], log_gradients=order["log_gradients"], **options)
    if os.environ.get("LIGHTNING_SWARM_LOCAL_INDEX") == VICTIM:
        first = Path(order["file"] + " victim")
        middle = range(microbatches // 2, microbatches)
        faults = [] if first.exists() else [Fault("kill", "forward", step=LOST_AT, microbatch=middle[0])]
        first.touch()
        if workers > STAGES:
            # In the middle of the step. Its worker gets every other microbatch, or so.
            faults = [
                Fault("kill", moment, step=FIRST + APART * k, microbatch=microbatch)
                for k, moment in enumerate(MOMENTS)
                for microbatch in (middle if k < MOMENTS.index("reduce") else [None])
            ]
        Faults(faults).inject(strategy)
    clock = Clock(workers)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.randn(order["steps"] * microbatches, 8)), batch_size=microbatches)
    trainer.fit(Pauses(STAGES, order["pause_s"]), data)
    noted = {"steps_s": clock.steps_s, "start_s": clock.start_s, "counters": strategy.report()["counters"]}
    Path(order["file"]).write_text(json.dumps(noted))


def measure(**order: Any) -> dict[str, Any]:
    """Run the script.

    Returns:
        Seconds of every step, of the worker's start, and the counters.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "notes"
        command = [sys.executable, __file__, "--train", json.dumps({**order, "file": str(file)})]
        subprocess.run(command, check=True)
        return json.loads(file.read_text())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that a microbatch takes a worker")
    parser.add_argument("--microbatches", type=int, default=32, help="a step")
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train)
        return
    settings = {"pause_s": arguments.pause, "microbatches": arguments.microbatches}
    report = Report("recovery", stages=STAGES, **settings)
    kills = {FIRST + APART * k: moment for k, moment in enumerate(MOMENTS)}
    two = measure(workers=2 * STAGES, steps=max(kills) + 2, log_gradients=False, **settings)
    normal_s = statistics.median(s for step, s in enumerate(two["steps_s"]) if step > 1 and step not in kills)
    report.figure("a step, two workers a stage", normal_s, "s", json.dumps(two["counters"]))
    for step, moment in kills.items():
        report.ratio(f"killed at {moment!r}: extra time / step", two["steps_s"][step] / normal_s - 1, at_most=1.0)
    for logged in (False, True):
        what = "gradients logged" if logged else "steps repeated"
        one = measure(workers=STAGES, steps=LOST_AT + 3, log_gradients=logged, **settings)
        normal_s = statistics.median(s for step, s in enumerate(one["steps_s"]) if step > 1 and step != LOST_AT)
        report.figure(f"a step, one worker a stage, {what}", normal_s, "s", json.dumps(one["counters"]))
        report.figure("the last worker's start", one["start_s"], "s")
        extra_s = one["steps_s"][LOST_AT] - normal_s - one["start_s"]
        goal = 2.0 if logged else None
        report.ratio(f"last worker killed, {what}: (extra time - start) / step", extra_s / normal_s, at_most=goal)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
