"""One worker fails at one moment of the protocol, in one way: the weights are those of an undisturbed run, bit for bit.

Two workers serve each of three stages, so nothing but the work of the one that fails has to be repeated.
"""

import lightning.pytorch as pl
import pytest

from lightning_swarm.faults import Kind, Moment
from lightning_swarm.testing import Fault, Faults
from tests.harness import AllAtWork, Outcome, difference, fit_swarm
from tests.models import CASES, GPT

pytestmark = pytest.mark.chaos
CASE = CASES["gpt"]
STEPS = 4


def make() -> pl.LightningModule:
    """With everything random, so that a repeated microbatch shows whether its masks were the same."""
    return GPT(layers=3, width=16, dropout=0.1, noise=0.1, tied=True, optimizer="adamw")


def fit(*faults: Fault, workers: int = 6) -> tuple[Outcome, dict[str, int], Faults]:
    """The run, the counters of its report and the faults."""
    schedule = Faults(faults)
    options = {"workers": workers, "microbatches": 6, "reproducible": True, "snapshot_every_n_steps": 2}
    run = fit_swarm(make, CASE.loader(STEPS), 3, swarm={**options, "faults": schedule}, callbacks=[AllAtWork()])
    return run, run.trainer.strategy.report()["counters"], schedule


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    """The same run without faults, with one worker a stage."""
    return fit(workers=3)[0]


def _same(run: Outcome, undisturbed: Outcome) -> None:
    assert difference(run.weights, undisturbed.weights) == 0.0
    assert difference(run.optimizer, undisturbed.optimizer) == 0.0


IN_A_STEP = ["forward", "forwarded", "fetched", "accumulated", "reduce", "reducing", "reduced", "commit", "committed"]


@pytest.mark.parametrize("moment", IN_A_STEP)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_worker_that_vanishes_is_replaced(moment: Moment, stage: int, undisturbed: Outcome) -> None:
    fault = Fault("kill", moment, stage=stage, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["leaves"] >= 1 and "stages lost" not in counters


@pytest.mark.parametrize("moment", IN_A_STEP)
def test_a_worker_that_hangs_is_given_up(moment: Moment, undisturbed: Outcome) -> None:
    fault = Fault("hang", moment, stage=1, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["leaves"] >= 1 and "stages lost" not in counters


@pytest.mark.parametrize("moment", ["forward", "accumulated", "reduce", "committed"])
def test_a_worker_that_is_slow_for_a_moment_is_waited_for(moment: Moment, undisturbed: Outcome) -> None:
    fault = Fault("slow", moment, stage=1, step=2, seconds=0.2)
    run, _, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]


@pytest.mark.parametrize("moment", [*IN_A_STEP, "snapshot", "drain"])
def test_a_call_that_arrives_twice_counts_once(moment: Moment, undisturbed: Outcome) -> None:
    fault = Fault("duplicate", moment, stage=1, step=None if moment == "drain" else 2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert not {"leaves", "bans", "stages lost"} & counters.keys()


@pytest.mark.parametrize("moment", IN_A_STEP)
def test_a_call_that_is_refused_is_made_again_or_elsewhere(moment: Moment, undisturbed: Outcome) -> None:
    fault = Fault("refuse", moment, stage=1, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["failed: busy"] >= 1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_does_not_come_over_a_dead_link_comes_from_another_worker(stage: int, undisturbed: Outcome) -> None:
    fault = Fault("cut", "fetched", stage=stage, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["links banned"] >= 1


def test_two_dead_links_are_gone_around(undisturbed: Outcome) -> None:
    links = [Fault("cut", "fetched", stage=stage, step=step) for stage, step in ((0, 1), (1, 2))]
    run, counters, faults = fit(*links)
    _same(run, undisturbed)
    assert faults.fired == links
    assert counters["links banned"] >= 2 and "stages lost" not in counters


def test_workers_of_a_stage_that_cannot_reach_each_other_do_not_hold_up_the_step(undisturbed: Outcome) -> None:
    fault = Fault("cut", "reducing", stage=1, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["leaves"] >= 1


@pytest.mark.parametrize("moment", ["fetched", "reducing"])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_worker_that_sends_other_shapes_is_banned(moment: Moment, stage: int, undisturbed: Outcome) -> None:
    fault = Fault("corrupt", moment, stage=stage, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["failed: protocol"] == 1 and counters["bans"] >= 1


@pytest.mark.parametrize("moment", ["fetched", "reducing"])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_worker_that_alone_sends_nan_is_banned(moment: Moment, stage: int, undisturbed: Outcome) -> None:
    fault = Fault("nan", moment, stage=stage, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["failed: wrong_result"] == 1 and "NaN accepted" not in counters


@pytest.mark.parametrize("kind", ["kill", "corrupt", "nan"])
def test_a_snapshot_that_fails_at_one_worker_is_taken_from_another(kind: Kind, undisturbed: Outcome) -> None:
    fault = Fault(kind, "snapshot", stage=1, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["snapshots"] >= 1


@pytest.mark.parametrize(
    "pair",
    [
        (Fault("kill", "accumulated", stage=0, step=2), Fault("kill", "reduced", stage=2, step=2)),
        (Fault("kill", "forwarded", stage=1, step=2), Fault("duplicate", "reduce", stage=1, step=2)),
        (Fault("nan", "fetched", stage=0, step=2), Fault("kill", "commit", stage=1, step=2)),
        (Fault("corrupt", "fetched", stage=2, step=1), Fault("cut", "fetched", stage=0, step=2)),
        (Fault("refuse", "reduced", stage=0, step=1), Fault("kill", "committed", stage=0, step=2)),
    ],
    ids=lambda pair: " and ".join(f"{fault.kind} {fault.moment}" for fault in pair),
)
def test_two_faults_in_one_run(pair: tuple[Fault, Fault], undisturbed: Outcome) -> None:
    run, _, faults = fit(*pair)
    _same(run, undisturbed)
    assert sorted(faults.fired, key=pair.index) == list(pair)


def test_a_fault_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="'nan' goes with fetched"):
        Fault("nan", "commit")
    with pytest.raises(ValueError, match="there are: kill, hang"):
        Fault("explode", "commit")  # type: ignore[arg-type]
