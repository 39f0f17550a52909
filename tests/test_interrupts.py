"""Ctrl-C ends the wait for workers, for a stage's new worker, and for a state."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_swarm.testing import Fault, Faults, ThreadSwarmStrategy
from tests.harness import options
from tests.models import CASES, GPT


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Lightning ignores further interrupts when one has come."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def make() -> pl.LightningModule:
    return GPT(layers=2, width=16)


def interrupt(strategy: ThreadSwarmStrategy, waits: Callable[[Any], bool]) -> None:
    """Train, and press Ctrl-C when the trainer waits."""
    over = threading.Event()

    def press() -> None:
        while not over.wait(0.05):
            if strategy._session is not None and strategy._session.roster is not None and waits(strategy._session):
                os.kill(os.getpid(), signal.SIGINT)
                return

    threading.Thread(target=press, daemon=True).start()
    trainer = pl.Trainer(**options(strategy=strategy))
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            trainer.fit(make(), CASES["gpt"].loader(3))
        assert trainer.interrupted
    finally:
        over.set()
        strategy.shutdown()


def test_while_it_waits_for_workers() -> None:
    interrupt(ThreadSwarmStrategy(make, 2, workers=0), lambda session: not session.roster.workers)


def test_while_it_waits_for_a_stage() -> None:
    faults = Faults([Fault("kill", "forward", stage=1, step=1)])
    strategy = ThreadSwarmStrategy(make, 2, faults=faults)
    interrupt(strategy, lambda session: session.counters["stages lost"] and len(session.roster.workers) < 2)


def test_while_it_waits_for_a_state() -> None:
    faults = Faults([Fault("hang", "snapshot", stage=0)])
    interrupt(ThreadSwarmStrategy(make, 2, faults=faults), lambda session: bool(faults.fired))
