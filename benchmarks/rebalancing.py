"""Six workers, five at stage 0 and one at stage 1: throughput before and after the swarm has balanced itself.

The workers' computing is a pause of known length, so that all of them run at their own speed whatever the number of
cores; everything else is real: processes, transport, Lightning, the moves. The first steps are made as the workers have
joined, then :class:`~lightning_swarm.callbacks.Rebalancing` begins.

The first and the last microbatches of a step leave a stage idle, so a pipeline does not quite reach its stages' speed.

    python benchmarks/rebalancing.py [--pause 0.1] [--microbatches 48] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from _pauses import Pauses
from _report import Report, add_json_argument
from torch.utils.data import DataLoader, TensorDataset

WORKERS, STAGES = 6, 2
PERIOD_S = 4.0
STEPS = 16
MEASURED_BEFORE = (2, 4)
"""Step 0 is when the workers join, step 1 when their speeds become known; these are steps 2 and 3."""
MEASURED_AFTER = (STEPS - 4, STEPS)


def train(pause_s: float, microbatches: int, notes: Path) -> None:
    """The script that trainer and workers run."""
    import logging

    from lightning_swarm import SwarmStrategy
    from lightning_swarm.callbacks import Rebalancing
    from lightning_swarm.trainer.roster import Roster

    logging.basicConfig(format="%(message)s")
    logging.getLogger("lightning_swarm.trainer.balancer").setLevel(logging.INFO)
    torch.set_num_threads(1)

    def crowded(roster: Roster, possible: Any) -> int:
        """Where workers are sent at first: one to stage 1, all others to stage 0."""
        return 0 if roster.at_stage(1, ready=False) else 1

    Roster.neediest_stage = crowded  # type: ignore[method-assign]
    strategy = SwarmStrategy(stages=["pauses.1"], workers=WORKERS, microbatches=microbatches)
    noted: dict[str, Any] = {"starts": [], "counts": [], "ends_s": []}

    class Late(Rebalancing):
        """Begins when the state of things before has been measured."""

        def on_train_start(self, *args: Any) -> None:
            pass

        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
            while index == 1 and sum(row["ready"] for row in strategy.report()["workers"]) < WORKERS:
                time.sleep(0.1)
            if index == MEASURED_BEFORE[1]:
                super().on_train_start(trainer, module)
            self.note()

        def on_before_zero_grad(self, *args: Any) -> None:
            """The microbatches are done, what follows is the end of the step."""
            self.computed_s = time.perf_counter()

        def on_train_batch_end(self, *args: Any) -> None:
            noted["ends_s"].append(time.perf_counter() - self.computed_s)

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            self.note()
            report = strategy.report()
            done = sum(row["microbatches"] for row in report["workers"])
            noted["compute_s"] = sum(row["compute_s"] for row in report["workers"]) / max(1, done)
            noted["counters"] = report["counters"]
            (notes / "notes").write_text(json.dumps(noted))

        def note(self) -> None:
            roster = strategy._session.roster if strategy._session is not None else None
            noted["starts"].append(time.perf_counter())
            noted["counts"].append([len(roster.at_stage(k)) for k in range(STAGES)] if roster is not None else [])

    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Late(PERIOD_S)],
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.randn(STEPS * microbatches, 8)), batch_size=microbatches)
    trainer.fit(Pauses(STAGES, pause_s), data)


def measure(pause_s: float, microbatches: int) -> dict[str, Any]:
    """Run the script.

    Returns:
        ``before`` and ``after`` in microbatches a second, ``counts`` of workers by step, ``end_s`` of a step (reduction
        and commit), ``compute_s`` of a microbatch at a worker, and the ``counters``.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("rebalancing.py")), "--train", folder]
        command += ["--pause", str(pause_s), "--microbatches", str(microbatches)]
        subprocess.run(command, check=True)
        noted = json.loads((Path(folder) / "notes").read_text())

    def rate(first: int, last: int) -> float:
        return (last - first) * microbatches / (noted["starts"][last] - noted["starts"][first])

    return {
        "before": rate(*MEASURED_BEFORE),
        "after": rate(*MEASURED_AFTER),
        "counts": noted["counts"],
        "end_s": sorted(noted["ends_s"])[len(noted["ends_s"]) // 2],
        "compute_s": noted["compute_s"],
        "counters": noted["counters"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that a microbatch takes a worker")
    parser.add_argument("--microbatches", type=int, default=48, help="a step")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.pause, arguments.microbatches, arguments.train)
        return
    settings = {"pause_s": arguments.pause, "microbatches": arguments.microbatches, "period_s": PERIOD_S}
    report = Report("rebalancing", workers=WORKERS, stages=STAGES, **settings)
    found = measure(arguments.pause, arguments.microbatches)
    balanced = found["counts"].index([WORKERS // 2] * STAGES) if [WORKERS // 2] * STAGES in found["counts"] else STEPS
    report.figure("before", found["before"], "microbatches/s", f"workers {found['counts'][MEASURED_BEFORE[0]]}")
    report.figure("after", found["after"], "microbatches/s", f"workers {found['counts'][-1]}")
    report.figure("balanced", balanced - MEASURED_BEFORE[1], "steps later")
    report.figure("moves", found["counters"]["moves"], "", "all counters: " + json.dumps(found["counters"]))
    ideal = WORKERS / STAGES / arguments.pause
    report.ratio("before / one worker's speed", found["before"] * arguments.pause, at_least=0.9)
    report.ratio("after / speed of three workers", found["after"] / ideal, at_least=0.85)
    report.ratio("after / before", found["after"] / found["before"], at_least=2.5)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
