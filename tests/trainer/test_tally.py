"""Events are counted where they happen, and a loss is over when all that went with it is done again."""

from lightning_swarm.trainer.tally import Tally


class Clock:
    """Stands still until it is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_counts_are_kept_by_stage_by_worker_and_in_all() -> None:
    tally = Tally(Clock())
    tally.count("processed", 1, "a", 3)
    tally.count("lost", 1, "a")
    tally.count("lost", 0, "b")
    tally.count("joins", 0, "b")
    tally.banned("a", 1, "timeout", 15.0)
    assert tally.counters == {"lost microbatches": 2, "joins": 1, "bans": 1}
    by_stage = tally.by_stage(3)
    assert [of_stage["lost"] for of_stage in by_stage] == [1, 1, 0] and by_stage[1]["bans"] == 1
    assert tally.by_worker()["a"]["processed"] == 3 and tally.by_worker()["b"]["joins"] == 1
    assert tally.bans == [{"peer": "a", "stage": 1, "cause": "timeout", "seconds": 15.0, "at_s": 0.0}]


def test_a_recovery_lasts_until_the_last_of_what_was_lost_is_done_again() -> None:
    clock = Clock()
    tally = Tally(clock)
    tally.missing([("0:0", 1), ("0:1", 1)])
    clock.now_s = 1.0
    tally.missing([("0:1", 1)])
    clock.now_s = 3.0
    tally.done("0:1", 0)
    tally.done("0:1", 1)
    assert tally.recoveries_s == [2.0]
    clock.now_s = 4.0
    tally.done("0:0", 1)
    assert tally.recoveries_s == [2.0, 4.0]


def test_what_a_stage_takes_with_it_is_not_waited_for() -> None:
    tally = Tally(Clock())
    tally.missing([])
    tally.missing([("0:0", 1)])
    tally.spread_anew()
    tally.done("0:0", 1)
    assert tally.recoveries_s == []
