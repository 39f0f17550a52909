"""Workers are killed again and again: are the weights those of an undisturbed run, and does anything grow?

Three stages, two workers each, and somebody who picks a random worker at random times, ``--every`` seconds apart on
average. Two ways:

* by default all is one process, where a worker that vanishes (its peer closes without a word) is replaced by another
  one, and the memory, open files and threads of the whole swarm are this process's;
* with ``--processes`` each worker is a process of its own that ends by ``SIGKILL``, or stands still by ``SIGSTOP`` for
  up to ``--stop`` seconds; the launcher starts those that ended again.

The run ends after ``--steps`` steps or, with ``--minutes``, after that time; then as many steps are made undisturbed.
With dropout, AdamW and ``reproducible=True`` the weights must be equal bit for bit.

    python benchmarks/soak.py [--steps 2000] [--every 3] [--seed 1] [--json FILE]
    python benchmarks/soak.py --processes --minutes 10 --every 15
"""

import argparse
import gc
import json
import os
import random
import signal
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
from _report import Report, add_json_argument
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STAGES, WORKERS, MICROBATCHES, WIDTH, LAYERS, TOKENS, SYMBOLS = 3, 6, 6, 32, 6, 16, 64
ENDLESS = 1_000_000
LOOK_EVERY = 20
"""Steps between two looks at the process."""


class Model(pl.LightningModule):
    """A small transformer with dropout; predicts the next symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, batch_first=True) for _ in range(LAYERS)]
        )
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch[0][:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Usage(pl.Callback):
    """Notes what the process uses, and ends training when its time is over."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.looks: list[dict[str, float]] = []
        self.steps = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.steps = index + 1
        if index % LOOK_EVERY == 0:
            self.looks.append({**usage(), "workers": len(trainer.strategy._session.roster.workers)})
        if time.monotonic() > self.until:
            trainer.should_stop = True


def usage() -> dict[str, float]:
    """Resident memory, open files, the sockets among them, and threads of this process."""
    gc.collect()
    files = [_target(file) for file in Path("/proc/self/fd").iterdir()]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory": int(status["VmRSS"].split()[0]) / 1024,
        "files": len(files),
        "sockets": sum(file.startswith("socket:") for file in files),
        "threads": int(status["Threads"]),
    }


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except FileNotFoundError:  # The one that was open to list them.
        return ""


class Reaper(threading.Thread):
    """Harms a random worker at random times.

    Args:
        strategy: The trainer's.
        arguments: Of the command line.
    """

    def __init__(self, strategy: Any, arguments: argparse.Namespace) -> None:
        super().__init__(name="reaper", daemon=True)
        self.strategy, self.arguments = strategy, arguments
        self.random = random.Random(arguments.seed)
        self.over = threading.Event()
        self.killed = self.stopped = 0
        self._gone: set[str] = set()
        self._stopped: list[tuple[float, int]] = []

    def run(self) -> None:
        next_s = time.monotonic() + self.random.expovariate(1 / self.arguments.every)
        while not self.over.wait(0.01):
            now = time.monotonic()
            for wake_s, pid in [stop for stop in self._stopped if stop[0] < now]:
                self._stopped.remove((wake_s, pid))
                _signal(pid, signal.SIGCONT)
            roster = self.strategy._session.roster if self.strategy._session is not None else None
            if now < next_s or roster is None or not self.strategy._session.step:
                continue
            next_s = now + self.random.expovariate(1 / self.arguments.every)
            self._harm_process() if self.arguments.processes else self._harm_thread(roster)
        for _, pid in self._stopped:
            _signal(pid, signal.SIGCONT)

    def _harm_process(self) -> None:
        pid = self.random.choice(self.strategy._local._workers).process.pid
        if self.random.random() < 0.5:
            self.killed += 1
            _signal(pid, signal.SIGKILL)
        else:
            self.stopped += 1
            _signal(pid, signal.SIGSTOP)
            self._stopped.append((time.monotonic() + self.random.uniform(0.5, self.arguments.stop), pid))

    def _harm_thread(self, roster: Any) -> None:
        """One worker comes for each that goes: those who have gone may be in the roster still."""
        victims = sorted({worker.peer for worker in roster.workers.values() if worker.ready} - self._gone)
        if victims:
            self.killed += 1
            victim = self.random.choice(victims)
            self._gone.add(victim)
            self.strategy._local.kill(victim)
            self.strategy._local.start(WORKERS + self.killed)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def train(arguments: argparse.Namespace, steps: int, minutes: float | None, disturbed: bool) -> dict[str, Any]:
    """One run.

    Returns:
        Its weights, and what was noted.
    """
    from lightning_swarm import SwarmStrategy
    from lightning_swarm.testing import ThreadSwarmStrategy

    torch.set_num_threads(1)
    pl.seed_everything(arguments.seed, verbose=False)
    options: dict[str, Any] = {"stages": STAGES, "microbatches": MICROBATCHES, "reproducible": True}
    options |= {"workers": WORKERS if disturbed else STAGES, "snapshot_every_n_steps": 10}
    strategy = SwarmStrategy(**options) if arguments.processes else ThreadSwarmStrategy(Model, **options)
    usage = Usage(time.monotonic() + 60 * minutes if minutes is not None else float("inf"))
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=ENDLESS, max_steps=steps, logger=False, callbacks=[usage],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    generator = torch.Generator().manual_seed(0)
    batches = min(steps, 100_000)
    data = DataLoader(
        TensorDataset(torch.randint(0, SYMBOLS, (batches * 2 * MICROBATCHES, TOKENS + 1), generator=generator)),
        batch_size=2 * MICROBATCHES,
    )
    reaper = Reaper(strategy, arguments)
    if disturbed and strategy.role == "trainer":
        reaper.start()
    began_s = time.monotonic()
    trainer.fit(model, data)
    took_s = time.monotonic() - began_s
    reaper.over.set()
    if reaper.is_alive():
        reaper.join()
    counters = strategy.report()["counters"]
    strategy.shutdown()
    noted = {"killed": reaper.killed, "stopped": reaper.stopped, "counters": counters, "took_s": took_s}
    return {"weights": model.state_dict(), "looks": usage.looks, "steps": usage.steps, **noted}


def train_elsewhere(arguments: argparse.Namespace, steps: int, minutes: float | None, disturbed: bool) -> Any:
    """The same in a process of its own, which is what a swarm's own workers need."""
    with tempfile.TemporaryDirectory() as folder:
        order = {"steps": steps, "minutes": minutes, "disturbed": disturbed, "folder": folder}
        subprocess.run([sys.executable, *sys.argv, "--train", json.dumps(order)], check=True)
        return torch.load(Path(folder) / "result", weights_only=True)


def median(what: str, looks: list[dict[str, float]]) -> float:
    """Of one of the things in some looks."""
    return statistics.median(look[what] for look in looks)


def main() -> None:
    """Run twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="end after so many, whatever the number of steps")
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between two faults")
    parser.add_argument("--stop", type=float, default=20.0, help="most seconds that a worker stands still")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", action="store_true", help="each worker is a process")
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.train is not None:
        order = arguments.train
        result = train(arguments, order["steps"], order["minutes"], order["disturbed"])
        result["counters"] = dict(result["counters"])
        torch.save(result, Path(order["folder"]) / "result")
        return
    settings = {name: getattr(arguments, name) for name in ("every", "seed", "processes", "minutes")}
    report = Report("soak", stages=STAGES, workers=WORKERS, **settings)
    steps = ENDLESS if arguments.minutes is not None else arguments.steps
    run = train_elsewhere(arguments, steps, arguments.minutes, True)
    undisturbed = train_elsewhere(arguments, run["steps"], None, False)
    report.figure("steps", run["steps"], "", f"in {run['took_s']:.0f} s; undisturbed {undisturbed['took_s']:.0f} s")
    report.figure("faults", run["killed"] + run["stopped"], "", f"{run['killed']} killed, {run['stopped']} stopped")
    for name, count in sorted(run["counters"].items()):
        report.figure(name, count, "")
    looks = run["looks"]
    quarter = max(1, len(looks) // 4)
    for what, unit in (("memory", "MiB"), ("files", ""), ("threads", "")):
        early, late = (median(what, part) for part in (looks[quarter : 2 * quarter], looks[-quarter:]))
        report.figure(f"{what}, second quarter", early, unit)
        report.figure(f"{what}, last quarter", late, unit, f"at most {max(look[what] for look in looks):.0f}")
        report.ratio(f"{what}, last / second quarter", late / early, at_most=1.05)
    for what in ("sockets", "workers"):
        report.figure(f"{what}, second quarter", median(what, looks[quarter : 2 * quarter]), "")
        report.figure(f"{what}, last quarter", median(what, looks[-quarter:]), "")
    pairs = zip(run["weights"].values(), undisturbed["weights"].values())
    difference = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
    report.ratio("largest difference of a weight", difference, at_most=0.0)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
