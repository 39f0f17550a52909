"""A script is started again as often as was asked, and a notice ends it for good."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_swarm import supervisor
from lightning_swarm.notices import FileNotice
from lightning_swarm.supervisor import NOT_NOW, Supervisor, pause_s

# Counts its starts in the file "starts"; fails while there are fewer than its argument.
COUNT = """
import sys
with open("starts", "a") as file: print(file=file)
sys.exit(0 if len(open("starts").readlines()) >= int(sys.argv[1]) else 7)
"""
# Serves until SIGTERM, then hands over; "ready" appears when it would notice.
SERVE = """
import pathlib, signal, sys
def leave(*_):
    pathlib.Path("handed over").touch()
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, leave)
pathlib.Path("ready").touch()
while True: signal.pause()
"""
# The same, but for a file that says that it was told before.
TOLD = SERVE.replace(
    "while True: signal.pause()",
    """
import os, time
while not os.path.exists(os.environ["LIGHTNING_SWARM_NOTICE"]): time.sleep(0.01)
pathlib.Path("told").touch()
while True: signal.pause()
""",
)
DEAF = """
import pathlib, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("ready").touch()
signal.pause()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "pause_s", lambda failures: 0.01)
    return tmp_path


def supervise(script: str, *arguments: str, **options: object) -> Supervisor:
    command = [sys.executable, "-S", "-c", script, *arguments]
    return Supervisor(command, dict(os.environ), poll_s=0.01, **options)  # type: ignore[arg-type]


class WhenReady:
    """A spot notice that comes when the script serves; or, instead, a signal to this process."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number

    def given(self) -> str | None:
        if not Path("ready").exists():
            return None
        if self.number is None:
            return "the market"
        os.kill(os.getpid(), self.number)
        Path("ready").unlink()
        return None


def starts() -> int:
    return len(Path("starts").read_text().splitlines())


def test_pauses_grow_and_are_bounded() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 6, 7, 5000)] == [1.0, 2.0, 4.0, 32.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("restarts", "needed", "code", "started"), [(0, 1, 0, 1), (0, 2, 7, 1), (3, 3, 0, 3), (2, 9, 7, 3)]
)
def test_failures_are_answered_with_so_many_starts(
    restarts: int, needed: int, code: int, started: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise(COUNT, str(needed), restarts=restarts).run() == code
    assert starts() == started
    said = capfd.readouterr().err
    assert said.count("has ended with exit code 7") == started - 1
    assert ("has failed 3 times in a row" in said) == (started == 3 and code == 7)


def test_wrong_use_is_not_tried_again() -> None:
    assert supervise('import sys; open("starts", "a").write("x\\n"); sys.exit(2)', restarts=5).run() == 2
    assert starts() == 1


def test_a_peer_or_a_port_that_is_not_there_yet_is_tried_again() -> None:
    assert supervise(COUNT.replace("else 7", f"else {NOT_NOW}"), "3", restarts=5).run() == 0
    assert starts() == 3


@pytest.mark.parametrize("number", [None, signal.SIGTERM], ids=["notice", "SIGTERM"])
def test_a_notice_lets_the_script_hand_over_and_ends_it(number: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert supervise(SERVE, "0", restarts=5, notices=[WhenReady(number)], drained_code=75).run() == 75
    assert Path("handed over").exists()
    cause = "the market" if number is None else "SIGTERM"
    assert f"this machine is to be given back ({cause}); the script hands its work over" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_script_works_on_for_as_long_as_the_notice_lasts(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert supervise(TOLD, "0", notices=[WhenReady()], notice_s=10.5).run() == 0
    assert Path("told").exists() and Path("handed over").exists()
    assert time.monotonic() - began >= 0.5
    said = capfd.readouterr().err
    assert "this machine is to be given back (the market); the script says so and works for 0.5 s" in said
    assert "(the notice's time is over); the script hands its work over" in said


def test_sigterm_does_not_wait_for_the_end_of_a_notice() -> None:
    class Impatient(WhenReady):
        """The notice, and soon the signal."""

        def given(self) -> str | None:
            if (text := super().given()) is not None:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return text

    assert supervise(TOLD, "0", notices=[Impatient()], notice_s=300.0).run() == 0
    assert Path("handed over").exists()


def test_a_hand_over_that_fails_shows_in_the_exit_code() -> None:
    assert supervise(SERVE, "9", restarts=5, notices=[WhenReady()], drained_code=75).run() == 9


def test_ctrl_c_goes_to_the_script_and_nothing_is_started_again() -> None:
    script = SERVE.replace("SIGTERM", "SIGINT")
    assert supervise(script, "5", restarts=5, notices=[WhenReady(signal.SIGINT)]).run() == 5


def test_a_notice_before_the_script_serves_ends_it_well() -> None:
    Path("gone").touch()
    assert supervise("import signal; signal.pause()", notices=[FileNotice(Path("gone"))]).run() == 0


def test_a_script_that_does_not_hand_over_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(DEAF, patience_s=0.1, notices=[WhenReady()]).run() == 128 + signal.SIGKILL
    assert "has not ended within 0.1 s; it is killed" in capfd.readouterr().err


def test_a_notice_between_two_starts_is_heard(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def pause(failures: int) -> float:
        Path("ready").touch()
        return 60.0

    monkeypatch.setattr(supervisor, "pause_s", pause)
    assert supervise(COUNT, "9", restarts=5, notices=[WhenReady()]).run() == 0
    assert starts() == 1
    assert "the script is not started again: the market" in capfd.readouterr().err
