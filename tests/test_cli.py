"""The command says what is wrong with its input, and its peers start and end as they should."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_swarm import launcher
from lightning_swarm.cli import main, read_secret
from lightning_swarm.strategy import SwarmStrategy
from lightning_swarm.supervisor import NOT_NOW, USAGE
from lightning_swarm.swarm.node import Node
from tests.harness import fit_swarm
from tests.scripts import tiny

ROOT = Path(__file__).parents[1]
HOST = "/ip4/0.0.0.0/tcp/31337"


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``run`` changes in its process is changed back."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_SWARM_")}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(launcher.SwarmLauncher, "calls", 0)


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.py"], "There is no script nowhere.py."),
        (["--restart", "-1", "SCRIPT"], "--restart -1 must be at least 0."),
        (
            ["--notice-url", "metadata", "SCRIPT"],
            "--notice-url 'metadata' must be an address that begins with http://.",
        ),
        (["--secret-file", "nowhere", "SCRIPT"], "--secret-file nowhere cannot be read: No such file or directory."),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = script(tmp_path, "raise AssertionError")
    assert main(["run", *(name if option == "SCRIPT" else option for option in options)]) == 2
    assert capsys.readouterr().err == f"lightning-swarm: {message}\n"


def test_status_refuses_a_pause_that_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--run-id", "x", "--initial-peers", "y", "--every", "0"]) == 2
    assert capsys.readouterr().err == "lightning-swarm: --every 0 must be positive.\n"


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_secret_that_others_can_read_is_warned_of(
    mode: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    file.write_text("swordfish\n")
    file.chmod(mode)
    assert read_secret(file) == "swordfish"
    said = capsys.readouterr().err
    assert said == (f"lightning-swarm: others can read {file}; chmod 600 {file}\n" if warned else "")


def test_an_empty_secret_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").touch(mode=0o600)
    assert main(["run", "--secret-file", str(tmp_path / "secret"), script(tmp_path, "")]) == 2
    assert f"--secret-file {tmp_path / 'secret'} is empty." in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "import sys; sys.exit()", "import sys; sys.exit(0)"])
def test_a_script_that_never_reaches_fit_is_told_so(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = script(tmp_path, text)
    assert main(["run", name]) == 2
    assert f"{name} ended without calling trainer.fit with a SwarmStrategy" in capsys.readouterr().err


def test_a_script_that_fails_says_so_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", script(tmp_path, "import sys; sys.exit(5)")])
    assert end.value.code == 5
    with pytest.raises(ZeroDivisionError):
        main(["run", script(tmp_path, "1 / 0")])
    assert capsys.readouterr().err == ""


FIT = """
from lightning_swarm import SwarmStrategy
from tests.scripts import tiny
tiny.make_trainer(SwarmStrategy(stages=2)).fit(tiny.Tiny(), tiny.data())
"""


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--initial-peers", "FREE/p2p/SOMEBODY"], NOT_NOW, "initial_peers: none can be reached"),
        (["--initial-peers", "FREE/p2p/SOMEBODY", "--host-maddrs", "TAKEN"], NOT_NOW, "is in use by another process"),
        (["--initial-peers", "FREE"], USAGE, "is not the address of a peer"),
        (["--initial-peers", "STRANGER"], USAGE, "belongs to another run than 'mine'"),
        ([], USAGE, "A worker needs the address of a live peer"),
    ],
)
def test_what_may_work_in_a_moment_has_an_exit_code_of_its_own(
    options: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken, socket.socket() as free, contextlib.ExitStack() as stack:
        for one in (taken, free):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        words = {
            "TAKEN": f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}",
            "FREE": f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}",  # nobody listens there
            "SOMEBODY": "12D3KooWEiXZcTZLnBNGsDwoStTQUmQ3cbnU3h3TDSMpfvwX8dGF",
        }
        if "STRANGER" in options:
            words["STRANGER"] = stack.enter_context(Node(run_id="other")).maddrs[0]
        given = [re.sub("|".join(words), lambda found: words[found[0]], option) for option in options]
        assert main(["run", "--run-id", "mine", *given, script(tmp_path, FIT)]) == code
    assert message in capsys.readouterr().err


def test_the_options_reach_the_strategy(tmp_path: Path) -> None:
    secret, seen = tmp_path / "secret", tmp_path / "seen"
    secret.write_text("swordfish")
    secret.chmod(0o600)
    name = script(
        tmp_path,
        "import sys\nfrom lightning_swarm import SwarmStrategy\nstrategy = SwarmStrategy()\n"
        f"open({str(seen)!r}, 'w').write(repr((strategy.role, strategy._run_id, strategy._secret,\n"
        "    strategy._initial_peers, strategy._host_maddrs, strategy._announce_maddrs,\n"
        "    str(strategy._identity_path), sys.argv[1:])))\n",
    )
    options = ["--run-id", "mine", "--secret-file", str(secret), "--identity", str(tmp_path / "key")]
    options += ["--initial-peers", "a,b", "--initial-peers", "c", "--host-maddrs", HOST, "--announce-maddrs", "i,j"]
    main(["run", *options, name, "--lr", "3", "--role", "its own"])
    arguments = ["--lr", "3", "--role", "its own"]
    expected = ("worker", "mine", b"swordfish", ["a", "b", "c"], [HOST], ["i", "j"], str(tmp_path / "key"), arguments)
    assert seen.read_text() == repr(expected)
    # Local workers of a trainer have keys and ports of their own.
    strategy = SwarmStrategy(role="trainer")
    node: Any = type("Node", (), {"maddrs": ["x"]})
    first = strategy._environments(node)[0]
    assert first[launcher.IDENTITY] == first[launcher.ANNOUNCE_MADDRS] == ""
    assert first[launcher.HOST_MADDRS] == "/ip4/0.0.0.0/tcp/0", "as reachable as the trainer"


@pytest.mark.parametrize(
    ("index", "given"), [("0", False), ("3", False), (None, True), ("-1", True)], ids=["first", "fourth", "no", "-1"]
)
def test_what_the_script_gives_the_trainer_is_not_for_its_local_workers(
    index: str | None, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"host_maddrs": [HOST], "announce_maddrs": ["/ip4/192.0.2.7/tcp/31337"], "identity_path": "trainer.key"}
    node: Any = type("Node", (), {"maddrs": ["x"]})
    for name, value in SwarmStrategy(stages=4, **own)._environments(node)[0].items():  # type: ignore[arg-type]
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(launcher.LOCAL_INDEX)
    if index is not None:
        monkeypatch.setenv(launcher.LOCAL_INDEX, index)
    strategy = SwarmStrategy(stages=4, **own)  # type: ignore[arg-type]
    assert strategy.role == "worker"
    assert SwarmStrategy(role="trainer").role == ("trainer" if given else "worker")
    assert strategy._host_maddrs == ([HOST] if given else ["/ip4/0.0.0.0/tcp/0"])
    assert strategy._announce_maddrs == (own["announce_maddrs"] if given else None)
    assert strategy._identity_path == (Path("trainer.key") if given else None)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def command(*arguments: str, folder: Path, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_swarm.cli", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_bootstrap_peer_prints_the_join_line_and_keeps_its_address(
    tmp_path: Path, processes: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--identity", "key", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--run-id", "mine"]
    process = command("bootstrap", *options, folder=tmp_path)
    processes.append(process)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    found = re.fullmatch(
        r"  LIGHTNING_SWARM_RUN_ID=mine LIGHTNING_SWARM_INITIAL_PEERS=(/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)\n", lines[1]
    )
    assert found is not None, lines
    assert lines[3] == f"  lightning-swarm run --run-id mine --initial-peers {found[1]} ...\n"
    assert (tmp_path / "key").exists()
    assert main(["status", "--json", "--run-id", "mine", "--initial-peers", found[1]]) == 1, "nobody is there yet"
    assert '"note": "no trainer is there"' in capsys.readouterr().out
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_the_secret_of_the_environment_counts_for_every_command_and_is_never_printed(
    tmp_path: Path, processes: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--run-id", "mine"]
    process = command("bootstrap", *options, folder=tmp_path, LIGHTNING_SWARM_SECRET="swordfish")
    processes.append(process)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    assert lines[2] == "and with the run's secret in LIGHTNING_SWARM_SECRET, or with:\n", lines
    found = re.fullmatch(
        r"  lightning-swarm run --run-id mine --secret-file FILE --initial-peers (\S+) \.\.\.\n", lines[3]
    )
    assert found is not None and "swordfish" not in "".join(lines), lines
    ask = ["status", "--json", "--run-id", "mine", "--initial-peers", found[1]]
    os.environ[launcher.SECRET] = "swordfish"
    assert main(ask) == 1, "nobody is there yet"
    os.environ[launcher.SECRET] = "herring"
    assert main(ask) == USAGE
    assert "does not let this peer in" in capsys.readouterr().err


def test_the_trainers_join_line_says_that_there_is_a_secret_and_not_which(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_swarm.strategy.rank_zero_info", said.append)
    for secret in ("swordfish", None):
        strategy = SwarmStrategy(workers=0, secret=secret)
        strategy._start()
        strategy.shutdown()
    with_secret, without = said
    assert "LIGHTNING_SWARM_SECRET" in with_secret and "swordfish" not in with_secret
    assert "SECRET" not in without and "LIGHTNING_SWARM_ROLE=worker" in without


class OneJoinsAndGoes(pl.Callback):
    """After the first step a worker comes from another process; after the next it gets a spot notice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        workers = strategy._session.roster.workers
        if trainer.global_step == 1:
            options = ["--restart", "1", "--notice-file", "notice", "--run-id", strategy._peer.node.run_id]
            options += ["--initial-peers", strategy._peer.node.maddrs[0]]
            self.process = command("run", *options, tiny.__file__, "elsewhere", folder=self.folder)
            self.until(strategy, lambda: sum(worker.ready for worker in workers.values()) == 3)
        elif trainer.global_step == 2:
            (self.folder / "notice").touch()
            self.until(strategy, lambda: len(workers) == 2)

    def until(self, strategy: Any, ready: Any) -> None:
        assert self.process is not None
        while not ready():
            assert self.process.poll() in (None, 0), self.process.communicate()[0]
            strategy._peer.run(_moment())


async def _moment() -> None:
    import asyncio

    await asyncio.sleep(0.05)


def test_a_spot_notice_drains_the_worker_and_its_process_ends_well(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    visit = OneJoinsAndGoes(tmp_path)
    swarm = fit_swarm(tiny.Tiny, tiny.data(), 2, swarm={"workers": 2}, callbacks=[visit])
    assert visit.process is not None
    processes.append(visit.process)
    output, _ = visit.process.communicate(timeout=15)
    assert visit.process.returncode == 0, output
    assert "this machine is to be given back (notice has appeared)" in output
    counters = swarm.trainer.strategy.report()["counters"]  # type: ignore[attr-defined]
    assert counters["joins"] == 3 and counters["leaves"] == 1 and "bans" not in counters


def test_a_worker_that_serves_nothing_yet_ends_at_once() -> None:
    worker = launcher.SwarmLauncher(SwarmStrategy(role="worker", initial_peers=["x"]))
    with pytest.raises(SystemExit) as end:
        worker.kill(signal.SIGTERM)
    assert end.value.code == 0
    launcher.SwarmLauncher(SwarmStrategy(role="trainer")).kill(signal.SIGTERM)
