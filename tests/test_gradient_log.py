"""A stage that has lost its last worker is rebuilt from the trainer's copy and the gradients since then: no step is
done again, and the weights are those of an undisturbed run, bit for bit.
"""

import itertools
import threading
from collections import Counter
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from lightning_swarm.faults import Moment
from lightning_swarm.swarm import node, parts
from lightning_swarm.swarm.frames import Limits
from lightning_swarm.testing import Fault, Faults
from tests.harness import Outcome, difference, fit_swarm, logged, long_run
from tests.models import CASES, GPT, Regressor

STEPS = 7


def make() -> pl.LightningModule:
    """With everything random, and an embedding that two stages share."""
    return GPT(dropout=0.1, noise=0.1, tied=True, optimizer="adamw")


def make_normed() -> pl.LightningModule:
    """Its running statistics are part of a stage's state."""
    layers = [nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()) for _ in range(4)]
    return Regressor(nn.Sequential(*layers, nn.Linear(12, 4)), optimizer="adamw")


class Successors(pl.Callback):
    """Starts another worker for each that vanishes, as the launcher does with local ones; a step begins when the one
    before it is logged.
    """

    def __init__(self, faults: Faults, deaths: int) -> None:
        self.faults, self.deaths = faults, deaths
        self._over = threading.Event()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        logged(strategy)
        if index == 1:
            threading.Thread(target=self._start, args=(trainer.strategy,), daemon=True).start()

    def on_train_end(self, *args: Any) -> None:
        self._over.set()

    def _start(self, strategy: Any) -> None:
        for death in range(self.deaths):
            while len(self.faults.fired) <= death and not self._over.wait(0.01):
                pass
            strategy._local.start(100 + death)


def fit(*faults: Fault, case: str = "gpt", **more: Any) -> tuple[Outcome, Counter[str]]:
    """Three stages with a worker each and, but for the one at the beginning, no snapshot."""
    schedule = Faults(faults)
    model, microbatches = (make, 6) if case == "gpt" else (make_normed, 3)
    swarm = {"microbatches": microbatches, "in_flight": 1, "reproducible": True, "log_gradients": True}
    run = fit_swarm(
        model,
        CASES[case].loader(STEPS),
        3,
        swarm={**swarm, "faults": schedule},
        callbacks=[Successors(schedule, len(faults))],
        **more,
    )
    assert schedule.fired == list(faults)
    return run, run.trainer.strategy.report()["counters"]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    return fit()[0]


def _same(run: Outcome, undisturbed: Outcome) -> None:
    assert difference(run.weights, undisturbed.weights) == 0.0
    assert difference(run.optimizer, undisturbed.optimizer) == 0.0


_USUAL = [(0, "reduced"), (1, "forward"), (1, "reduce"), (2, "accumulated")]
_OTHERS = sorted(set(itertools.product((0, 1, 2), ("forward", "accumulated", "reduce", "reduced"))) - set(_USUAL))


@pytest.mark.parametrize(("stage", "moment"), [*_USUAL, *long_run(*_OTHERS)])
def test_no_step_is_done_again(stage: int, moment: Moment, undisturbed: Outcome) -> None:
    run, counters = fit(Fault("kill", moment, stage=stage, step=2), Fault("kill", moment, stage=stage, step=5))
    _same(run, undisturbed)
    assert counters["stages rebuilt"] == 2
    assert not {"stages lost", "steps repeated"} & counters.keys()


def test_gradients_larger_than_a_message_are_logged(monkeypatch: pytest.MonkeyPatch, undisturbed: Outcome) -> None:
    parameters = sum(parameter.numel() for parameter in make().parameters()) // 3
    monkeypatch.setattr(node, "Limits", partial(Limits, body_bytes=2 * parameters))
    monkeypatch.setattr(parts, "_PART_BYTES", parameters)
    run, counters = fit(Fault("kill", "forward", stage=1, step=4))
    _same(run, undisturbed)
    assert counters["stages rebuilt"] == 1 and "snapshots" not in counters


def test_gradients_that_went_with_the_worker_are_made_again(undisturbed: Outcome) -> None:
    """It has committed, but the trainer has not its gradients."""
    run, counters = fit(Fault("kill", "committed", stage=1, step=4))
    _same(run, undisturbed)
    assert counters["stages lost"] >= 1 and counters["steps repeated"] == 5


def test_a_copy_that_is_ahead_of_the_swarm_is_given_to_nobody() -> None:
    """It was taken before a stage was lost and the others went back."""
    given: list[bool] = []

    class Look(pl.Callback):
        """Looks at what the trainer can give, as if its copy were of a later step."""

        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
            session: Any = trainer.strategy._session  # type: ignore[attr-defined]
            if index == 2:
                version, session.origin.version = session.origin.version, 3
                given.extend(session._can_give(stage, soon) for stage in range(3) for soon in (False, True))
                session.origin.version = version

    fit_swarm(make, CASES["gpt"].loader(3), 3, callbacks=[Look()])
    assert given == [False] * 6


@pytest.mark.parametrize("clipping", [{"gradient_clip_val": 0.01}, {"gradient_clip_val": 1e-3, "algorithm": "value"}])
def test_running_statistics_and_clipping_are_in_the_log(clipping: dict[str, Any]) -> None:
    more = {f"gradient_clip_{name}" if name == "algorithm" else name: value for name, value in clipping.items()}
    run, counters = fit(Fault("kill", "forward", stage=1, step=5), case="mlp", **more)
    _same(run, fit(case="mlp", **more)[0])
    assert counters["stages rebuilt"] == 1 and "stages lost" not in counters
