"""Local workers that end are started again, unless that is in vain."""

import errno
import io
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from lightning_swarm.launcher import LocalWorkers, Starts, WorkerDied


def test_a_worker_that_fails_at_its_very_first_start_is_not_waited_for() -> None:
    starts = Starts()
    assert not starts.in_vain
    starts.end(1)
    assert starts.in_vain


@pytest.mark.parametrize("code", [1, 2, -signal.SIGSEGV, -signal.SIGABRT])
def test_one_that_has_joined_once_may_fail_a_few_times_and_less_and_less_often(code: int) -> None:
    starts = Starts()
    starts.join()
    assert starts.end(code) == 0.0, "it was in the swarm"
    assert [(starts.end(code), starts.in_vain) for _ in range(4)] == [(1, False), (2, False), (4, True), (8, True)]
    assert max(starts.end(code) for _ in range(2000)) == 60.0, "days of them"
    starts.join()
    assert not starts.in_vain
    assert (starts.end(code), starts.end(code)) == (0.0, 1.0)


@pytest.mark.parametrize("code", [0, -signal.SIGKILL, -signal.SIGTERM])
def test_one_that_others_end_may_be_ended_many_times_but_not_for_ever(code: int) -> None:
    starts = Starts()
    assert [(starts.end(code), starts.in_vain) for _ in range(4)] == [(1, False), (2, False), (4, False), (8, False)]
    for _ in range(4):
        starts.end(code)
    assert starts.in_vain


class Process:
    """A child process, as far as the launcher looks at it."""

    prints = b"some words\n"

    def __init__(self, *args: Any, **options: Any) -> None:
        self.code: int | None = None
        self.stdout = io.BytesIO(self.prints)

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout_s: float | None = None) -> None:
        """As if it had ended."""


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalWorkers]:
    """Workers that only the test looks after, and whose processes end as it says."""
    monkeypatch.setattr("sys.argv", [__file__])
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(LocalWorkers, "_supervise", lambda self: None)
    return lambda count, *needed: LocalWorkers([{}] * count, lambda index: f"worker {index}", *needed)


def end(workers: LocalWorkers, index: int, code: int, now_s: float) -> None:
    """The process that it has by now ends, and the supervisor looks."""
    look(workers, now_s)
    workers._workers[index].process.code = code  # type: ignore[misc]
    look(workers, now_s)


def look(workers: LocalWorkers, now_s: float) -> None:
    for worker in workers._workers:
        workers._look_after(worker, now_s)


def test_one_that_cannot_start_costs_the_others_neither_their_restarts_nor_the_hope_for_them(
    local: Callable[..., LocalWorkers],
) -> None:
    workers = local(2)
    for index in (0, 1):
        workers.joined(index)
    for now_s in (0.0, 10.0, 20.0, 30.0):
        workers.check()
        end(workers, 0, 1, now_s)
    look(workers, 40.0)
    assert workers.restarts == 4
    with pytest.raises(WorkerDied, match="Local worker 0 has ended with exit code 1. Its last output:\n\nsome words"):
        workers.check()
    end(workers, 1, -signal.SIGKILL, 50.0)
    assert workers.restarts == 5
    workers.check()
    for index in (0, 1):
        workers.joined(index)
    end(workers, 0, 1, 1000.0)
    workers.check()
    assert workers.restarts == 6


def test_one_that_is_paused_is_started_once_when_its_time_has_come(local: Callable[..., LocalWorkers]) -> None:
    workers = local(1)
    end(workers, 0, -signal.SIGKILL, 0.0)
    for now_s in (0.0, 0.5, 0.9):
        look(workers, now_s)
        assert workers.restarts == 0
    for now_s in (1.0, 1.5, 100.0):
        look(workers, now_s)
        assert workers.restarts == 1


def test_one_that_has_left_comes_back_while_there_is_work_and_not_when_it_is_over(
    local: Callable[..., LocalWorkers],
) -> None:
    working = True
    workers = local(1, lambda: working)
    workers.joined(0)
    end(workers, 0, 0, 0.0)
    assert workers.restarts == 1
    workers.joined(0)
    working = False
    end(workers, 0, 0, 10.0)
    assert workers.restarts == 1
    working = True
    look(workers, 20.0)
    assert workers.restarts == 2, "there is another call"


def test_a_machine_without_room_for_a_process_is_tried_again(
    local: Callable[..., LocalWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    workers = local(1)
    workers.joined(0)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        end(workers, 0, 1, 0.0)
        look(workers, 10.0)
    assert workers.restarts == 0
    workers.check()
    look(workers, 20.0)
    assert workers.restarts == 1


@pytest.mark.parametrize("error", [BrokenPipeError("closed"), ValueError("I/O operation on closed file")])
def test_what_a_worker_prints_is_read_though_nobody_listens(
    error: Exception, local: Callable[..., LocalWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str) -> None:
        raise error

    monkeypatch.setattr(Process, "prints", b"".join(b"line %d\n" % number for number in range(9)))
    monkeypatch.setattr("sys.stderr.write", refuse)
    workers = local(1)
    end(workers, 0, 1, 0.0)
    with pytest.raises(WorkerDied, match="line 0\n(line .\n)*line 8$"):
        workers.check()
