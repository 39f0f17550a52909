"""One worker fails at one moment of the protocol, in one way: the weights are those of an undisturbed run, bit for bit.

Two workers serve each of three stages, so nothing but the work of the one that fails has to be repeated.
"""

import itertools
import os
import random
from typing import Any, get_args

import lightning.pytorch as pl
import pytest

from lightning_swarm.faults import Kind, Moment
from lightning_swarm.testing import Fault, Faults
from tests.harness import AllAtWork, Outcome, difference, fit_swarm
from tests.models import CASES, GPT

pytestmark = pytest.mark.chaos
CASE = CASES["gpt"]
STEPS, MICROBATCHES = 4, 6
PAIRS = int(os.environ.get("CHAOS_PAIRS", "24"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))


def make() -> pl.LightningModule:
    """With everything random, so that a repeated microbatch shows whether its masks were the same."""
    return GPT(layers=3, width=16, dropout=0.1, noise=0.1, tied=True, optimizer="adamw")


def fit(*faults: Fault, workers: int = 6, **more: Any) -> tuple[Outcome, dict[str, int], Faults]:
    """The run, the counters of its report and the faults."""
    schedule = Faults(faults)
    options = {"microbatches": MICROBATCHES, "reproducible": True, "snapshot_every_n_steps": 2, **more}
    swarm = {**options, "workers": workers, "faults": schedule}
    run = fit_swarm(make, CASE.loader(STEPS), 3, swarm=swarm, callbacks=[AllAtWork()])
    return run, run.trainer.strategy.report()["counters"], schedule


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    """The same run without faults, with one worker a stage."""
    return fit(workers=3)[0]


def _same(run: Outcome, undisturbed: Outcome) -> None:
    assert difference(run.weights, undisturbed.weights) == 0.0
    assert difference(run.optimizer, undisturbed.optimizer) == 0.0
    _exactly_once(run)


def _exactly_once(run: Outcome) -> None:
    """Of what was accumulated, and not lost with its worker, there is one of each microbatch at each stage."""
    report: Any = run.trainer.strategy.report()  # type: ignore[attr-defined]
    if "stages lost" not in report["counters"]:
        for stage in report["by_stage"]:
            assert stage["processed"] - stage["lost"] == STEPS * MICROBATCHES


IN_A_STEP = ["forward", "forwarded", "fetched", "accumulated", "reduce", "reducing", "reduced", "commit", "committed"]


@pytest.mark.parametrize("moment", IN_A_STEP)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_worker_that_vanishes_is_replaced(moment: Moment, stage: int, undisturbed: Outcome) -> None:
    fault = Fault("kill", moment, stage=stage, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["leaves"] >= 1 and "stages lost" not in counters


@pytest.mark.parametrize("moment", IN_A_STEP)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_worker_that_hangs_is_given_up(moment: Moment, stage: int, undisturbed: Outcome) -> None:
    fault = Fault("hang", moment, stage=stage, step=2)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert counters["leaves"] >= 1 and "stages lost" not in counters


@pytest.mark.parametrize("moment", [*IN_A_STEP, "snapshot"])
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
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_call_that_is_refused_is_made_again_or_elsewhere(moment: Moment, stage: int, undisturbed: Outcome) -> None:
    fault = Fault("refuse", moment, stage=stage, step=2)
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


@pytest.mark.parametrize("kind", ["kill", "hang", "refuse"])
def test_a_worker_that_fails_when_it_is_told_to_leave_its_stage_holds_nobody_up(
    kind: Kind, undisturbed: Outcome
) -> None:
    fault = Fault(kind, "drain", stage=1)
    run, counters, faults = fit(fault)
    _same(run, undisturbed)
    assert faults.fired == [fault]
    assert "stages lost" not in counters


@pytest.mark.parametrize("kind", ["kill", "hang", "refuse", "corrupt", "nan"])
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
    ids=lambda pair: _name(pair),
)
def test_two_faults_in_one_run(pair: tuple[Fault, Fault], undisturbed: Outcome) -> None:
    run, _, faults = fit(*pair)
    _same(run, undisturbed)
    assert sorted(faults.fired, key=pair.index) == list(pair)


def _any_two() -> list[tuple[Fault, Fault]]:
    """Pairs of any faults at two stages, drawn with the seed."""
    faults = [
        Fault(kind, moment, stage=stage, step=2, seconds=0.2)
        for kind in get_args(Kind)
        for moment in (("fetched", "reducing") if kind in ("corrupt", "nan", "cut") else IN_A_STEP)
        for stage in range(3)
    ]
    pairs = [pair for pair in itertools.combinations(faults, 2) if pair[0].stage != pair[1].stage]
    return random.Random(SEED).sample(pairs, PAIRS)


def _name(pair: tuple[Fault, Fault]) -> str:
    return " and ".join(f"{fault.kind} {fault.moment} at {fault.stage}" for fault in pair)


@pytest.mark.parametrize("pair", _any_two(), ids=_name)
def test_any_two_faults_in_one_step(pair: tuple[Fault, Fault], undisturbed: Outcome) -> None:
    """The first may take the second one's moment away; the weights are the same all the same."""
    run, counters, faults = fit(*pair)
    _same(run, undisturbed)
    assert faults.fired and set(faults.fired) <= set(pair)
    assert "stages lost" not in counters, "each stage has another worker, and so the totals were proved"


def test_without_sums_in_float64_rounding_is_all_that_differs(undisturbed: Outcome) -> None:
    pair = Fault("kill", "accumulated", stage=1, step=1), Fault("kill", "reduced", stage=2, step=2)
    run, _, faults = fit(*pair, reproducible=False)
    assert set(faults.fired) == set(pair)
    assert difference(run.weights, undisturbed.weights) <= 1e-6
    _exactly_once(run)


def test_a_fault_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="'nan' goes with fetched"):
        Fault("nan", "commit")
    with pytest.raises(ValueError, match="there are: kill, hang"):
        Fault("explode", "commit")  # type: ignore[arg-type]
