"""Keeps one script running on a machine that may be taken back.

The script runs in a process of its own. When it fails it is started again, a bounded number of times, after pauses that
grow. A spot notice is passed on as a file that appears: a worker then tells the trainer that it will leave, and serves
on while others take its place. SIGTERM, or the end of the notice's time, goes to the script as SIGTERM: a worker hands
back what it was at, leaves the swarm and exits, and the supervisor ends with it, so that whoever started it does not
start it again.
"""

import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_swarm.launcher import NOTICE, following
from lightning_swarm.notices import Notice
from lightning_swarm.swarm.errors import NOT_NOW

__all__ = ["NOT_NOW", "USAGE", "Supervisor", "pause_s"]

USAGE = 2
"""Exit code of a script that was started wrongly: starting it again would not help."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_WELL_AFTER_S = 600.0
HAND_OVER_S = 10.0
"""What is left of a notice's time when the script is told to hand over."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def pause_s(failures: int) -> float:
    """Seconds before the start that follows so many failures in a row: 1, 2, 4, ... up to 60."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures - 1, 32))


class Supervisor:
    """Runs a command until it succeeds, has failed too often, or the machine is to be given back.

    Args:
        command: What to run.
        environment: Its environment.
        restarts: How many failures in a row are answered with a new start. One after ten minutes of work begins a new
            row.
        notices: Where a spot notice may come from, besides SIGTERM.
        notice_s: Seconds from such a notice to the loss of the machine; the script may work until shortly before.
        poll_s: Seconds between two looks at them.
        patience_s: How long a drain may take before the script is killed; the notice's length at most.
        drained_code: The exit code after a drain that went well.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        restarts: int = 0,
        notices: Sequence[Notice] = (),
        notice_s: float = 0.0,
        poll_s: float = 2.0,
        patience_s: float = 120.0,
        drained_code: int = 0,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._restarts = restarts
        self._notices = list(notices)
        self._grace_s = max(0.0, notice_s - HAND_OVER_S)
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._drained_code = drained_code
        self._events: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._leaving: str | None = None
        self._over = threading.Event()

    def run(self) -> int:
        """Supervise, on the main thread; returns the exit code."""
        with tempfile.TemporaryDirectory(prefix="lightning-swarm-") as folder:
            self._notice_file = Path(folder) / "notice"
            self._environment[NOTICE] = str(self._notice_file)
            return self._run()

    def _run(self) -> int:
        before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        watcher = threading.Thread(target=self._watch, name="spot notices", daemon=True)
        try:
            watcher.start()
            return self._supervise()
        finally:
            self._over.set()
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _signalled(self, number: int, frame: object) -> None:
        self._events.put(("signal", number))

    def _watch(self) -> None:
        while self._notices and not self._over.is_set():
            for notice in self._notices:
                if (text := notice.given()) is not None:
                    self._events.put(("notice", text))
                    return
            self._over.wait(self._poll_s)

    def _supervise(self) -> int:
        failures = 0
        while True:
            began = time.monotonic()
            code = self._run_once()
            if self._leaving is not None or code in (0, USAGE):
                return self._verdict(code)
            lasted = time.monotonic() - began
            failures = 1 if lasted > _WELL_AFTER_S else failures + 1
            if failures > self._restarts:
                if self._restarts:
                    _say(f"the script has failed {failures} times in a row, the last time with exit code {code}")
                return _shell_code(code)
            pause = pause_s(failures)
            _say(
                f"the script has ended with exit code {code} after {lasted:.0f} s; it is started again in {pause:g} s "
                f"({failures} of {self._restarts})"
            )
            if self._leaves_within(pause):
                return self._drained_code

    def _run_once(self) -> int:
        process = self._process = subprocess.Popen(
            following(self._command), env=self._environment, start_new_session=True
        )
        threading.Thread(
            target=lambda: self._events.put(("ended", process.wait())), name="the script", daemon=True
        ).start()
        due: float | None = None
        """When the script is to hand over or, if it was told to, to be killed."""
        handing_over = False
        while True:
            try:
                kind, what = self._events.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except queue.Empty:
                kind, what = "due", "the notice's time is over"
            if kind == "ended":
                return process.wait()
            if kind == "signal" and what == signal.SIGINT:
                self._leaving = "SIGINT"
                process.send_signal(signal.SIGINT)
            elif kind == "notice" and self._leaving is None and self._grace_s:
                self._leaving = str(what)
                _say(f"this machine is to be given back ({what}); the script says so and works for {self._grace_s:g} s")
                self._notice_file.touch()
                due = time.monotonic() + self._grace_s
            elif not handing_over:
                handing_over = True
                self._leaving = "SIGTERM" if kind == "signal" else str(what)
                _say(f"this machine is to be given back ({self._leaving}); the script hands its work over")
                process.terminate()
                due = time.monotonic() + self._patience_s
            elif kind == "due":
                _say(f"the script has not ended within {self._patience_s:g} s; it is killed")
                process.kill()
                due = None

    def _leaves_within(self, seconds: float) -> bool:
        """Wait for the next start; whether there is to be none."""
        try:
            _, what = self._events.get(timeout=seconds)
        except queue.Empty:
            return False
        _say(f"the script is not started again: {signal.Signals(what).name if isinstance(what, int) else what}")
        return True

    def _verdict(self, code: int) -> int:
        # One that has not begun to serve has nothing to hand over, and no handler either.
        drained = self._leaving is not None and code in (0, -signal.SIGTERM)
        return self._drained_code if drained else _shell_code(code)


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _say(text: str) -> None:
    print(f"lightning-swarm: {text}", file=sys.stderr, flush=True)
