"""A look at a swarm says what is there, with its trainer and without."""

import json
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lightning_swarm.cli import main
from lightning_swarm.status import StatusReader, SwarmStatus, WorkerStatus, announced, show
from lightning_swarm.strategy import SwarmStrategy
from lightning_swarm.swarm.calls import WorkerRecord
from lightning_swarm.swarm.node import Node
from tests.harness import fit_swarm
from tests.scripts import tiny


def screen(status: SwarmStatus) -> str:
    console = Console(width=120, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(show(status))
    return captured.get()


class Look(pl.Callback):
    """Looks as ``lightning-swarm status`` does, from a peer of its own, at the end of some steps."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.seen: list[SwarmStatus] = []
        self.printed = ""
        self.node: Node | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step not in self.steps:
            return
        peer: Any = trainer.strategy._peer  # type: ignore[attr-defined]
        if self.node is None:
            self.node = Node(run_id=peer.node.run_id, initial_peers=peer.node.maddrs)
            self.reader = StatusReader(self.node, peer.node.maddrs)
        self.seen.append(self.node.run(self.reader.read()))


def test_the_trainer_tells_everything_and_the_workers_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    look = Look((2, 4))

    def afterwards(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert look.node is not None
        look.seen.append(look.node.run(look.reader.read()))
        run = ["--run-id", look.node.run_id, "--initial-peers", trainer.strategy._peer.node.maddrs[0]]  # type: ignore
        assert main(["status", "--json", *run]) == 0

    try:
        fit_swarm(tiny.Tiny, tiny.data(), 2, swarm={"workers": 3}, callbacks=[look], after=afterwards)
        first, second, between = look.seen
        assert first.source == second.source == "trainer"
        assert (first.step, second.step) == (2, 4) and (first.samples, second.samples) == (16, 32)
        assert second.samples_per_s == pytest.approx(16 / (second.elapsed_s - first.elapsed_s))
        assert first.counters["joins"] == 3 and first.bans == first.moves == 0
        assert sorted(worker.stage for worker in first.workers) in ([0, 0, 1], [0, 1, 1])
        done = [sum(w.microbatches or 0 for w in second.workers if w.stage == stage) for stage in (0, 1)]
        assert done == [16, 16]
        assert all(w.state in ("serving", "joining") and w.device == "cpu" for w in second.workers)
        assert 0 < first.bytes_sent < second.bytes_sent and 0 < first.bytes_received < second.bytes_received
        printed = screen(second)
        assert f"run {second.run_id}, step 4, {second.samples_per_s:.1f} samples/s" in printed
        assert "bans 0, moves 0 (joins 3" in printed

        # Between two calls of Lightning's the trainer has nothing to say, the workers have.
        assert between.source == "announcements" and "the trainer is between two calls" in between.note
        document = json.loads(capsys.readouterr().out)
        assert document["run_id"] == first.run_id and document["trainer"] == first.trainer
        assert {worker["peer"] for worker in document["workers"]} <= {worker.peer for worker in first.workers}
    finally:
        if look.node is not None:
            look.node.close()


def test_announcements_are_shown_by_stage_without_a_trainer() -> None:
    records = {
        "QmSecond": WorkerRecord(0, 1, 7, "cuda:0", 12.5, 0, (), {}),
        "QmNobody": WorkerRecord(0, -1, 0, "cpu", 0.0, 0, (), {}),
        "QmFirst": WorkerRecord(0, 0, 8, "cpu", 0.0, 0, (), {}),
    }
    status = announced("a run", None, records, "no trainer is there")
    assert [(w.stage, w.peer, w.state) for w in status.workers] == [
        (0, "QmFirst", "serving"),
        (1, "QmSecond", "serving"),
        (None, "QmNobody", "joining"),
    ]
    assert status.step == 8 and status.alive
    assert "1 + 1 workers, by their own announcements: no trainer is there" in screen(status)
    assert not announced("a run", None, {}, "no trainer is there").alive
    json.dumps(status.to_dict())


def test_every_state_has_its_word() -> None:
    workers = (
        WorkerStatus(0, "QmAAAAAA", "cpu", "moving", 3.0, 2, 1234, 1500, 2_500_000, moving_to=1),
        WorkerStatus(1, "QmBBBBBB", "cuda:0", "banned", 0.0),
    )
    printed = screen(SwarmStatus("a run", "QmT", "trainer", elapsed_s=3725.0, bans=1, moves=2, workers=workers))
    assert "1:02:05" in printed and "bans 1, moves 2" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["0", "AAAAAA", "cpu", "moving", "to", "1", "3.0", "2", "1,234", "1.5", "kB", "2.5", "MB"] in rows
    assert ["1", "BBBBBB", "cuda:0", "banned"] in rows


def test_initial_peers_of_another_run_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with Node(run_id="another") as node:
        (address,) = node.maddrs
        said = rf"initial_peers: {address} can be reached, but belongs to another run than 'mine'"
        assert main(["status", "--run-id", "mine", "--initial-peers", address]) == 2
        assert said in capsys.readouterr().err
        worker = SwarmStrategy(role="worker", run_id="mine", initial_peers=[address])
        with pytest.raises(MisconfigurationException, match=said):
            worker.begin_call()
        worker.shutdown()
        assert main(["status", "--json", "--run-id", "another", "--initial-peers", address]) == 1
        assert json.loads(capsys.readouterr().out)["workers"] == []


def test_a_peer_with_the_secret_of_another_run_is_not_let_in(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of mine")
    secret.chmod(0o600)
    with Node(run_id="another", secret=b"of another") as node:
        (address,) = node.maddrs
        options = ["--run-id", "mine", "--secret-file", str(secret), "--initial-peers", address]
        assert main(["status", *options]) == 2
    assert "can be reached, but does not let this peer in" in capsys.readouterr().err
