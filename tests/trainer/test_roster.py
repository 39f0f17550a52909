"""Whom the roster chooses after faults, by the clock."""

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from lightning_swarm.policies.banning import BanList, BanRule, Cause, link
from lightning_swarm.trainer import roster as module
from lightning_swarm.trainer.roster import Roster
from lightning_swarm.trainer.tally import Tally

T = TypeVar("T")


class Clock:
    """Stands where the roster reads the time."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def make(*workers: tuple[str, int], bans: BanList | None = None) -> Roster:
    """Two stages, and all workers at work."""
    roster = Roster(
        2, Tally(), 10.0, check=lambda: None, replaceable=lambda _: False, state_bytes=lambda _: 0, bans=bans
    )
    for peer, stage in workers:
        come(roster, peer, stage)
    return roster


def come(roster: Roster, peer: str, stage: int) -> None:
    roster.join(peer, "cpu", -1, stage)
    roster.admit(peer)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def route(roster: Roster) -> tuple[str, ...]:
    return run(roster.route())


def answer(roster: Roster, chosen: tuple[str, ...], seconds: float = 0.1) -> None:
    for stage, peer in enumerate(chosen):
        roster.completed(peer, stage, seconds)


@pytest.mark.parametrize("cause", list(Cause))
def test_joining_again_forgives_only_that_one_could_not_be_reached(cause: Cause, clock: Clock) -> None:
    roster = make(("a1", 0), ("a2", 0), ("b", 1))
    roster.failed("a1", 0, cause, "it failed")
    roster.remove("a1")
    clock.now_s += 1.0
    come(roster, "a1", 0)
    chosen = set()
    for _ in range(6):
        taken = route(roster)
        answer(roster, taken)
        chosen.add(taken[0])
    forgiven = cause in (Cause.REFUSED, Cause.RESET, Cause.BUSY, Cause.CALLER)
    assert chosen == ({"a1", "a2"} if forgiven else {"a2"})
    assert roster.counters["bans"] == (cause not in (Cause.BUSY, Cause.CALLER))


def test_a_hung_worker_gets_two_tasks_in_the_window_of_a_ban(clock: Clock) -> None:
    """It answers nothing, is given up at its deadline, and comes back each time."""
    roster = make(("a", 0), ("b", 1))
    got: list[float] = []
    banned: list[float] = []

    async def scenario() -> None:
        for _ in range(10):
            answer(roster, await roster.route())
        come(roster, "hung", 0)
        waits_until = math.inf
        while len(banned) < 4 and clock.now_s < 3000.0:
            taken = await roster.route()
            if taken[0] == "hung":
                got.append(clock.now_s)
                waits_until = min(waits_until, clock.now_s + roster.deadline_s("hung", 0))
            answer(roster, ("" if taken[0] == "hung" else taken[0], taken[1]))
            clock.now_s += 0.5
            if clock.now_s > waits_until:
                roster.failed("hung", 0, Cause.TIMEOUT, "no answer")
                banned.append(clock.now_s)
                roster.remove("hung")
                come(roster, "hung", 0)
                waits_until = math.inf

    run(scenario())
    lengths = [ban["seconds"] for ban in roster.tally.bans]
    assert lengths == [15.0, 30.0, 60.0, 120.0]
    taken = [sum(began_s <= at_s < ended_s for at_s in got) for began_s, ended_s in zip([0.0, *banned], banned)]
    assert 1 <= taken[0] <= 2 and taken[1:] == [1, 1, 1], "after a ban it is on probation"
    for began_s, length_s in zip(banned, lengths):
        assert not any(began_s <= at_s < began_s + length_s for at_s in got)


def test_a_dead_link_is_tried_again_after_ever_longer_times(clock: Clock) -> None:
    roster = make(("a", 0), ("b1", 1), ("b2", 1))
    pauses = []

    async def scenario() -> None:
        while len(pauses) < 3:
            roster.ban_link(link("a", "b1"))
            cut_s, taken = clock.now_s, ("", "")
            while taken[1] != "b1" and clock.now_s < cut_s + 100:
                taken = await roster.route()
                answer(roster, taken)
                clock.now_s += 0.5
            pauses.append(clock.now_s - cut_s)

    run(scenario())
    assert [round(pause, -1) for pause in pauses] == [10, 20, 40]


def test_a_repair_takes_a_worker_that_reaches_its_neighbours(clock: Clock) -> None:
    roster = make(("a", 0), ("b1", 1), ("b2", 1), ("b3", 1))
    roster.ban_link(link("a", "b1"))
    roster.ban_link(link("a", "b2"))
    chosen = {run(roster.pick(1, "b2", previous="a")) for _ in range(6)}
    assert chosen == {"b3"}


def test_all_banned_are_chosen_or_waited_for_as_told(clock: Clock) -> None:
    ignoring = make(("a", 0), ("b", 1))
    ignoring.failed("a", 0, Cause.TIMEOUT, "no answer")
    assert route(ignoring) == ("a", "b")

    waiting = make(("a", 0), ("b", 1), bans=BanList({Cause.TIMEOUT: BanRule(30.0)}, when_all_banned="wait"))
    waiting.failed("a", 0, Cause.TIMEOUT, "no answer")

    async def scenario() -> tuple[str, ...]:
        routing = asyncio.create_task(waiting.route())
        await asyncio.sleep(0.05)
        assert not routing.done()
        clock.now_s += 31.0
        waiting._notify()
        return await routing

    assert run(scenario()) == ("a", "b")


def test_a_stages_only_worker_may_become_slow_fifty_times_but_not_for_ever(clock: Clock) -> None:
    roster = make(("a", 0), ("b", 1))
    for _ in range(10):
        answer(roster, route(roster), 10.0)
    computing_s = 0.0
    while computing_s < 50 * 10.0:
        if computing_s > roster.deadline_s("a", 0):
            assert roster.waits_for("a", 0)
        computing_s += 1.0
    assert "bans" not in roster.counters
    for _ in range(3):
        roster.waits_for("a", 0)
    assert not roster.waits_for("a", 0), "it hangs"
    come(roster, "a2", 0)
    assert not roster.waits_for("a2", 0), "another one can do its work"


def test_a_worker_twenty_times_slower_than_the_other_never_passes_its_deadline(clock: Clock) -> None:
    roster = make(("a1", 0), ("a2", 0), ("b", 1))
    usual_s = {"a1": 1.0, "a2": 20.0, "b": 1.0}
    done: Counter[str] = Counter()
    for _ in range(200):
        taken = route(roster)
        for stage, peer in enumerate(taken):
            assert usual_s[peer] < roster.deadline_s(peer, stage)
            roster.completed(peer, stage, usual_s[peer])
            done[peer] += 1
    assert done["a2"] >= 5 and done["a1"] > 10 * done["a2"]


def donors(roster: Roster) -> str:
    trusted, banned = roster.donors(0)
    return " ".join(worker.peer for worker in trusted) + " | " + " ".join(worker.peer for worker in banned)


def test_newcomers_spread_over_the_donors(clock: Clock) -> None:
    roster = make(("a1", 0), ("a2", 0), ("a3", 0), ("b", 1))
    for _ in range(3):
        roster.donors(1)
    assert [donors(roster) for _ in range(4)] == ["a1 a2 a3 | ", "a2 a3 a1 | ", "a3 a1 a2 | ", "a1 a2 a3 | "]


def test_donors_that_leave_come_late_and_banned_ones_are_not_trusted(clock: Clock) -> None:
    roster = make(("a1", 0), ("a2", 0), ("a3", 0), ("b", 1))
    roster.leaves("a1")
    assert [donors(roster) for _ in range(3)] == ["a2 a3 a1 | ", "a2 a3 a1 | ", "a3 a2 a1 | "]
    roster.ban("a3", 0, Cause.WRONG_RESULT, "it lied")
    assert donors(roster) == "a2 a1 | a3"
    clock.now_s += 301.0
    assert donors(roster) == "a2 a3 a1 | "
