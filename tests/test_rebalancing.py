"""Workers move to where they are needed, and the weights are those of a run without moves, bit for bit."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_swarm.policies.rebalancing import Move
from tests.harness import Outcome, difference, fit_swarm
from tests.models import CASES, GPT

CASE = CASES["gpt"]
STEPS = 8
CUTS = ["blocks.2"]


def make() -> pl.LightningModule:
    """With everything random, so that a repeated microbatch shows whether its masks were the same; the embedding and
    the head, at different stages, are tied.
    """
    return GPT(dropout=0.1, noise=0.1, tied=True, optimizer="adamw")


def fit(
    callbacks: list[pl.Callback], workers: int, steps: int = STEPS, cuts: list[str] = CUTS, **swarm: Any
) -> Outcome:
    """Two stages unless told otherwise; gradients in float64."""
    options = {"workers": workers, "microbatches": 6, "reproducible": True, "snapshot_every_n_steps": 3, **swarm}
    return fit_swarm(make, CASE.loader(steps), cuts, swarm=options, callbacks=callbacks)


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    """The same run with one worker a stage."""
    return fit([], workers=2)


def counts(strategy: Any) -> list[int]:
    """Workers that serve each stage."""
    roster = strategy._session.roster
    return [len(roster.at_stage(stage)) for stage in range(roster.stages)]


def counters(run: Outcome) -> Counter[str]:
    return Counter(run.trainer.strategy.report()["counters"])


def same(run: Outcome, undisturbed: Outcome) -> bool:
    return (
        difference(run.weights, undisturbed.weights) == 0.0 and difference(run.optimizer, undisturbed.optimizer) == 0.0
    )


async def _moment() -> None:
    import asyncio

    await asyncio.sleep(0.02)


class Script(pl.Callback):
    """Waits for all workers before step 1, then does something before some of the steps and after them.

    Args:
        before: By step; called with the strategy while nothing is under way.
        until: What must be true before the last step; steps are not delayed otherwise.
    """

    def __init__(self, before: dict[int, Callable[[Any], None]], until: Callable[[Any], bool] | None = None) -> None:
        self.before, self.until = before, until
        self.counts: list[list[int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        if index == 1:
            wait(strategy, lambda: sum(counts(strategy)) == strategy.thread_workers)
        if index in self.before:
            self.before[index](strategy)
        if index:
            self.counts.append(counts(strategy))


def wait(strategy: Any, ready: Callable[[], bool]) -> None:
    while not ready():
        strategy._peer.run(_moment())


def order(source: int, target: int) -> Callable[[Any], Any]:
    """Order the first worker of a stage to another one, as a policy would, and give its peer id."""

    def do(strategy: Any) -> str:
        session = strategy._session
        peer = session.roster.at_stage(source)[0].peer
        assert strategy._peer.run(session.moves.order(Move(peer, source, target)))
        return peer

    return do


def prepared(strategy: Any) -> None:
    """Wait until the workers that were ordered hold the state of their new stage."""
    wait(
        strategy, lambda: all(w.prepared for w in strategy._session.roster.workers.values() if w.moving_to is not None)
    )


def test_a_move_leaves_the_weights_as_they_are(undisturbed: Outcome) -> None:
    script = Script({2: order(0, 1), 4: prepared})
    run = fit([script], workers=4)
    assert same(run, undisturbed)
    assert script.counts[0] == [2, 2] and script.counts[-1] == [1, 3]
    assert counters(run)["moves"] == 1 and counters(run)["leaves"] == 0
