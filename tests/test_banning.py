"""FaultBanning: the rules are those that were asked for, bans are in the logger, and what makes no sense is refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger

import lightning_swarm
from lightning_swarm.callbacks import FaultBanning, SwarmMonitor
from lightning_swarm.policies.banning import Cause
from tests.harness import AllAtWork, fit_swarm, options
from tests.models import CASES, GPT


class Ban(pl.Callback):
    """Has all workers of stage 0 banned before step 2."""

    def __init__(self) -> None:
        self.rules: dict[Cause, Any] = {}
        self.peers: list[str] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index != 2:
            return
        roster = trainer.strategy._session.roster  # type: ignore[attr-defined]
        self.rules, self.peers = roster.bans.rules, [worker.peer for worker in roster.at_stage(0)]
        for peer in self.peers:
            roster.ban(peer, 0, Cause.TIMEOUT, "as a test")


def test_training_goes_on_when_all_of_a_stage_are_banned_by_the_rules_that_were_chosen(tmp_path: Path) -> None:
    ban, logger = Ban(), CSVLogger(tmp_path)
    banning = FaultBanning(first_s={"timeout": 77}, growth=3, longest_s=500)
    run = fit_swarm(
        lambda: GPT(layers=2, width=16),
        CASES["gpt"].loader(4),
        2,
        swarm={"workers": 3},
        callbacks=[AllAtWork(), banning, SwarmMonitor(every_n_steps=1), ban],
        logger=logger,
    )
    assert run.trainer.global_step == 4
    assert ban.rules[Cause.TIMEOUT].first_s == 77 and ban.rules[Cause.PROTOCOL].growth == 3
    report = run.trainer.strategy.report()  # type: ignore[attr-defined]
    found = [(row["peer"], row["stage"], row["cause"], row["seconds"]) for row in report["bans"]]
    assert len(ban.peers) == 2 and found == [(peer, 0, "timeout", 77) for peer in ban.peers]
    assert report["by_stage"][0]["bans"] == report["counters"]["bans"] == 2
    assert all(report["by_worker"][peer]["bans"] == 1 for peer in ban.peers)
    logger.save()
    columns = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    for name in ("bans/timeout", "ban_s/timeout", "stage0/bans", "stage1/processed", "recovery_s"):
        assert f"swarm/{name}" in columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"first_s": {"lateness": 3}},
            "FaultBanning(first_s={'lateness': ...}) is no cause of bans; there are: ",
        ),
        ({"first_s": {"busy": 3}}, "FaultBanning(first_s={'busy': ...}) is no cause of bans"),
        (
            {"first_s": {"timeout": -1}},
            "FaultBanning(first_s={'timeout': -1}) must be a number of seconds, at least 0.",
        ),
        ({"first_s": {"reset": True}}, "FaultBanning(first_s={'reset': True}) must be a number of seconds"),
        ({"growth": 0.5}, "FaultBanning(growth=0.5) must be a factor of at least 1."),
        ({"growth": float("nan")}, "FaultBanning(growth=nan) must be a factor of at least 1."),
        ({"longest_s": float("inf")}, "FaultBanning(longest_s=inf) must be at least the longest first ban, 0 s."),
        (
            {"first_s": {"timeout": 60}, "longest_s": 30},
            "FaultBanning(longest_s=30) must be at least the longest first ban, 60 s.",
        ),
        ({"forget_after_s": "1h"}, "FaultBanning(forget_after_s='1h') must be a number of seconds, at least 0."),
        ({"lifted_by_announcement": ["timeout"]}, "FaultBanning(lifted_by_announcement=['timeout']) must be of"),
        ({"lifted_by_announcement": "reset"}, "FaultBanning(lifted_by_announcement='reset') must be of"),
        ({"when_all_banned": "panic"}, "FaultBanning(when_all_banned='panic') must be 'ignore' or 'wait'."),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        FaultBanning(**arguments)
    assert str(caught.value).startswith(message)


def test_another_strategy_is_refused() -> None:
    trainer = pl.Trainer(**options(callbacks=[lightning_swarm.FaultBanning()], devices=1))
    with pytest.raises(MisconfigurationException, match="FaultBanning needs Trainer\\(strategy=SwarmStrategy"):
        trainer.fit(GPT(), CASES["gpt"].loader(1))
