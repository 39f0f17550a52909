"""Real processes: how they start, speak and end, and that nothing of them is left however they do."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_swarm import launcher
from lightning_swarm.swarm.errors import NOT_NOW
from lightning_swarm.testing import ThreadSwarmStrategy
from tests.harness import times
from tests.scripts import tiny

GONE_WITHIN_S = 5.0
LIMIT_S = 90.0


class Run:
    """The script in a process of its own.

    All that it and its children write for themselves goes into a directory that nobody else uses, and all of them have
    that directory in their environment: so what is left of them can be told from what others do on this machine.
    """

    def __init__(self, what: str, directory: Path, folder: Path, **environment: str) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, tiny.__file__, *what.split(", ")],
            cwd=folder,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_SWARM_")},
                "TMPDIR": str(directory),
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.rearm()

    def rearm(self) -> None:
        """Ends it if a test never does."""
        self.disarm()
        self._limit = threading.Timer(LIMIT_S, self.process.kill)
        self._limit.daemon = True
        self._limit.start()

    def disarm(self) -> None:
        if hasattr(self, "_limit"):
            self._limit.cancel()

    def until(self, text: str) -> str:
        """Reads what it prints up to a line that holds the text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError(f"{text!r} is not in\n{self.output}")

    def ended(self) -> int:
        """Waits for its end and gives its exit code."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def left(self) -> list[str]:
        """Processes, sockets and files of it that exist now, itself excepted while it runs."""
        # torch keeps a directory for its compiler's cache, for all of the user's processes.
        found = [str(path) for path in self.directory.iterdir() if not path.name.startswith("torchinductor")]
        found += [line for line in Path("/proc/net/unix").read_text().splitlines() if str(self.directory) in line]
        return found + [f"process {pid}: {command}" for pid, command in self.processes().items()]

    def processes(self) -> dict[int, str]:
        """Those among them."""
        mark = str(self.directory).encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                with contextlib.suppress(OSError):  # it has just ended
                    command = (entry / "cmdline").read_bytes()
                    if mark in command or mark in (entry / "environ").read_bytes():
                        found[int(entry.name)] = command.decode(errors="replace")
        return found

    def assert_nothing_left(self) -> None:
        """Within the promised time."""
        until = time.monotonic() + GONE_WITHIN_S
        while self.left() and time.monotonic() < until:
            time.sleep(0.02)
        if left := self.left():
            self.close()
            self.ended()
            raise AssertionError("\n".join([*left, "is left of", self.output]))

    def close(self) -> None:
        """Ends it and what it has left, whatever they do."""
        self.disarm()
        self.process.kill()
        self.process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


Start = Callable[..., Run]


@pytest.fixture(scope="module")
def start_in_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    runs: list[Run] = []

    def start(what: str, **environment: str) -> Run:
        directory = Path(tempfile.mkdtemp(prefix="processes-", dir="/tmp"))
        runs.append(Run(what, directory, tmp_path_factory.mktemp("folder"), **environment))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
        shutil.rmtree(run.directory, ignore_errors=True)


@pytest.fixture
def start(start_in_module: Start) -> Iterator[Start]:
    mine: list[Run] = []

    def begin(what: str, **environment: str) -> Run:
        mine.append(start_in_module(what, **environment))
        return mine[-1]

    yield begin
    for run in mine:
        run.close()


@pytest.fixture(scope="module")
def again_and_again(start_in_module: Start) -> Run:
    return start_in_module("start and stop")


@pytest.fixture(scope="module")
def held() -> list[str]:
    return []


@pytest.mark.parametrize("time_number", times(20))
def test_a_swarm_that_was_stopped_leaves_nothing(time_number: int, again_and_again: Run, held: list[str]) -> None:
    again_and_again.rearm()
    assert again_and_again.process.stdin is not None
    again_and_again.process.stdin.write("2\n" if time_number % 4 == 0 else "1\n")
    again_and_again.process.stdin.flush()
    held.append(again_and_again.until("the swarm has stopped"))
    again_and_again.assert_nothing_left()
    assert held[-1].endswith(" ['MainThread']")
    assert held[-1] == held[0], "open files have become more"


def test_ctrl_c_in_the_middle_of_a_step_ends_everything(start: Start) -> None:
    run = start("hang")
    run.until("in the middle of a step")
    assert len(run.left()) > 4
    os.killpg(run.process.pid, signal.SIGINT)
    run.assert_nothing_left()
    assert run.ended() == 1
    assert run.left() == []
    assert run.lines.count("exception KeyboardInterrupt") == 1


def test_a_killed_trainer_takes_everything_with_it(start: Start) -> None:
    run = start("hang")
    run.until("in the middle of a step")
    assert len(run.left()) > 4
    run.process.kill()
    run.assert_nothing_left()


def test_a_worker_that_dies_at_its_start_ends_the_run_with_its_traceback(start: Start) -> None:
    run = start("broken worker")
    run.until("RuntimeError: this worker is broken")
    died = time.monotonic()
    assert run.ended() == 1
    assert time.monotonic() - died < 10.0
    traceback = run.output[run.output.rindex("lightning_swarm.launcher.WorkerDied: ") :]
    assert re.match(r".*Local worker [01] has ended with exit code 1\. Its last output:\n\nTraceback ", traceback)
    assert traceback.rstrip().endswith("RuntimeError: this worker is broken")
    assert re.search(r"^\[worker [01]\] RuntimeError: this worker is broken$", run.output, re.MULTILINE)
    run.assert_nothing_left()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(("number", "code"), [("SIGKILL", -9), ("SIGTERM", 0)])
def test_a_local_worker_that_is_killed_or_told_to_leave_is_started_again_and_the_weights_are_the_same(
    number: str, code: int, start: Start, plain: tuple[list[float], list[float]]
) -> None:
    run = start(f"killed worker, {free_port()}, {number}")
    assert run.ended() == 0, run.output
    assert re.search(rf"Local worker 0 \(stage 0\) has ended with exit code {code}; it is started again\.", run.output)
    assert told(run, "restarts") == [1]
    assert told(run, "loss") == pytest.approx(plain[0], abs=1e-6)
    assert told(run, "weights")[0] == pytest.approx(plain[1], abs=1e-6)
    run.assert_nothing_left()


def test_a_local_worker_whose_compute_thread_hangs_ends_and_is_started_again(
    start: Start, plain: tuple[list[float], list[float]]
) -> None:
    run = start("stuck worker")
    assert run.ended() == 0, run.output
    assert re.search(r"The compute thread has got no further for \d+ s; this process ends\.", run.output)
    assert re.search(rf"Local worker 0 .* has ended with exit code {NOT_NOW}; it is started again", run.output)
    assert told(run, "loss") == pytest.approx(plain[0], abs=1e-6)
    assert told(run, "weights")[0] == pytest.approx(plain[1], abs=1e-6)
    run.assert_nothing_left()


def test_a_local_worker_that_is_killed_and_cannot_start_again_ends_the_run_with_its_traceback(start: Start) -> None:
    run = start(f"killed worker, {free_port()}, for good")
    assert run.ended() == 1, run.output
    traceback = run.output[run.output.rindex("lightning_swarm.launcher.WorkerDied: ") :]
    assert re.match(r".*Local worker 0 has ended with exit code 1\. Its last output:\n\nTraceback ", traceback)
    assert traceback.rstrip().endswith("RuntimeError: this worker is broken")
    assert run.output.count("it is started again") == 1 + launcher._MOST_FAILURES
    assert told(run, "weights") == []
    run.assert_nothing_left()


def test_a_script_of_many_calls_with_the_strategy_by_name(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("all calls")
    assert run.ended() == 0, run.output
    assert run.left() == []
    monkeypatch.chdir(tmp_path)
    *losses, predictions = tiny.all_calls("auto")
    told = [float(line.removeprefix("result ")) for line in run.lines if line.startswith("result ")]
    assert told == pytest.approx(losses, abs=1e-6)
    assert losses[0] == losses[1] != losses[2]
    (predicted,) = [line.removeprefix("predictions ") for line in run.lines if line.startswith("predictions ")]
    for ours, theirs in zip(json.loads(predicted), predictions, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, abs=1e-6)
    # A worker's script goes on with the same numbers, and ends with the trainer's last call.
    for stage in (0, 1):
        found = [line.partition("result ")[2] for line in run.lines if line.startswith(f"[stage {stage}] result ")]
        assert [float(value) for value in found] == told
        assert f"[stage {stage}] a worker speaks" in run.lines
    assert "a worker speaks" not in run.lines
    assert "exit codes [0, 0]" in run.lines, run.output
    assert "exception" not in run.output


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[float]]:
    """The losses and the weights of one process."""

    class Losses(pl.Callback):
        told: list[float] = []

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
            self.told.append(float(outputs["loss"]))

    pl.seed_everything(7, verbose=False)
    module, losses = tiny.Tiny(), Losses()
    tiny.make_trainer("auto", callbacks=[losses]).fit(module, tiny.data(3))
    return losses.told, torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def told(run: Run, what: str) -> list[Any]:
    return [json.loads(line.removeprefix(f"{what} ")) for line in run.lines if line.startswith(f"{what} ")]


def test_many_workers_in_processes_of_their_own_train_as_one(
    start: Start, plain: tuple[list[float], list[float]]
) -> None:
    run = start("train, 5")
    assert run.ended() == 0, run.output
    assert told(run, "loss") == pytest.approx(plain[0], abs=1e-6)
    assert told(run, "weights")[0] == pytest.approx(plain[1], abs=1e-6)


def test_neither_their_number_nor_that_they_are_processes_changes_a_bit(start: Start) -> None:
    run = start("train, 3, reproducible")
    strategy = ThreadSwarmStrategy(tiny.Tiny, 2, workers=2, microbatches=8, reproducible=True)
    weights = tiny.train(strategy)
    strategy.shutdown()
    assert run.ended() == 0, run.output
    assert told(run, "weights")[0] == weights


def test_a_second_machine_comes_goes_and_another_comes_and_the_losses_are_the_same(
    start: Start, plain: tuple[list[float], list[float]]
) -> None:
    machines: list[Run] = []

    class Visits(pl.Callback):
        told: list[float] = []

        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
            strategy: Any = trainer.strategy
            if index in (3, 9):
                peers = ",".join(strategy._peer.node.maddrs)
                settings = {"ROLE": "worker", "RUN_ID": strategy._peer.node.run_id, "INITIAL_PEERS": peers}
                machines.append(start("train, 0", **{f"LIGHTNING_SWARM_{k}": v for k, v in settings.items()}))
                self.wait(strategy, 3)
            elif index == 6:
                machines[0].process.send_signal(signal.SIGTERM)
                assert machines[0].ended() == 0, machines[0].output
                self.wait(strategy, 2)

        def wait(self, strategy: Any, workers: int) -> None:
            while sum(row["ready"] for row in strategy.report()["workers"]) != workers:
                time.sleep(0.1)

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
            self.told.append(float(outputs["loss"]))

    pl.seed_everything(7, verbose=False)
    module, visits = tiny.Tiny(), Visits()
    strategy = ThreadSwarmStrategy(tiny.Tiny, 2, workers=2, microbatches=4)
    try:
        tiny.make_trainer(strategy, callbacks=[visits]).fit(module, tiny.data(3))
    finally:
        strategy.shutdown()
    assert machines[1].ended() == 0, machines[1].output
    assert visits.told == pytest.approx(plain[0], abs=1e-6)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    assert weights == pytest.approx(plain[1], abs=1e-6)
    for machine in machines:
        machine.assert_nothing_left()


def test_a_killed_trainer_goes_on_from_the_disk_in_the_middle_of_a_shuffled_epoch(start: Start, tmp_path: Path) -> None:
    run = start(f"go on, {tmp_path}")
    run.until("begins anew")
    run.until("step 6")
    run.process.kill()
    run.assert_nothing_left()
    again = start(f"go on, {tmp_path}")
    assert again.ended() == 0, again.output
    assert re.search(r"Going on from step 6, which \S+/step=6\.ckpt holds\.", again.output), again.output
    pl.seed_everything(7, verbose=False)
    module = tiny.Tiny()
    tiny.make_trainer("auto", max_epochs=3).fit(module, tiny.shuffled())
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    assert told(again, "weights")[0] == pytest.approx(weights, abs=1e-6)


def test_workers_that_are_started_by_hand_with_the_join_line(start: Start) -> None:
    trainer = start("elsewhere")
    trainer.until("To let another machine join, start this script there with:")
    settings = trainer.until("LIGHTNING_SWARM_ROLE=worker").split()
    workers = [start("elsewhere", **dict(setting.split("=", 1) for setting in settings)) for _ in range(2)]
    assert trainer.ended() == 0, trainer.output
    assert trainer.lines[-1] == "trained"
    for worker in workers:
        assert worker.ended() == 0, worker.output
        assert "trained" not in worker.output and "exception" not in worker.output
        worker.assert_nothing_left()
    trainer.assert_nothing_left()
