"""A worker goes on when its trainer is slow or away, and ends when nothing can become of it."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from tests.harness import AllAtWork, difference, fit_plain, fit_swarm, wait
from tests.models import CASES, GPT
from tests.swarm.peers import end_daemon

CASE = CASES["gpt"]


def make() -> pl.LightningModule:
    """Small."""
    return GPT(layers=2, width=16)


class At(pl.Callback):
    """Does something after a step."""

    def __init__(self, step: int, do: Callable[[Any], None]) -> None:
        self.step, self.do = step, do

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.do(trainer.strategy)


def test_a_worker_whose_own_daemon_has_ended_ends_at_once_and_no_other_does() -> None:
    def end_one(strategy: Any) -> None:
        victim = strategy._local.strategies[0]._peer
        end_daemon(victim.node)
        wait(strategy, lambda: bool(strategy._local._errors))
        (why,) = strategy._local._errors
        assert "NodeClosed: This node's libp2p daemon p2pd ended unexpectedly" in why
        strategy._local._errors.clear()
        strategy._local.start(3)

    run = fit_swarm(make, CASE.loader(5), 2, swarm={"workers": 3}, callbacks=[AllAtWork(), At(3, end_one)])
    assert difference(run.weights, fit_plain(make, CASE.loader(5)).weights) < 1e-6
    assert run.trainer.strategy.report()["counters"]["leaves"] == 1  # type: ignore[attr-defined]
