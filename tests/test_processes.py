"""Real processes: how they start, speak and end, and that nothing of them is left however they do."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.scripts import tiny

GONE_WITHIN_S = 5.0
LIMIT_S = 300.0


class Run:
    """The script in a process of its own.

    All that it and its children write for themselves goes into a directory that nobody else uses, and all of them have
    that directory in their environment: so what is left of them can be told from what others do on this machine.
    """

    def __init__(self, what: str, directory: Path, folder: Path, **environment: str) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, tiny.__file__, what],
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


@pytest.mark.parametrize("time_number", range(20))
def test_a_swarm_that_was_stopped_leaves_nothing(time_number: int, again_and_again: Run, held: list[str]) -> None:
    again_and_again.rearm()
    assert again_and_again.process.stdin is not None
    again_and_again.process.stdin.write("again\n")
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
