"""Whose fault it is that a step could not be reduced, and when that is the end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_swarm.swarm.errors import PeerBusy, PeerUnreachable, SourceFailed, SwarmError
from lightning_swarm.trainer import commit, pipeline
from lightning_swarm.trainer.commit import Clipping, StepEnd, _culprits
from lightning_swarm.trainer.pipeline import Pipeline
from lightning_swarm.trainer.position import StepRecord
from lightning_swarm.trainer.roster import Roster
from lightning_swarm.trainer.tally import Tally


def complaint(about: str) -> SourceFailed:
    return SourceFailed(f"{about} did not deliver", about)


def culprits(**errors: SwarmError) -> set[str]:
    return set(_culprits(errors, {"a", "b", "c"}))


def test_those_who_waited_for_a_dead_member_are_innocent() -> None:
    assert culprits(a=complaint("c"), b=complaint("c"), c=PeerUnreachable("gone", "c")) == {"c"}
    assert culprits(c=PeerUnreachable("gone", "c"), a=complaint("c"), b=complaint("a")) == {"c"}


def test_all_that_are_dead_are_given_up_at_once() -> None:
    assert culprits(a=complaint("b"), b=PeerUnreachable("gone", "b"), c=PeerUnreachable("gone", "c")) == {"b", "c"}


def test_among_the_living_the_one_that_most_complain_about_goes_alone() -> None:
    assert culprits(a=complaint("b"), b=complaint("a"), c=complaint("b")) == {"b"}
    assert culprits(a=complaint("b"), b=complaint("a")) == {"a"}
    assert culprits(a=complaint("a stranger")) == {"a"}


def test_who_has_broken_off_a_sum_because_another_one_had_failed_is_innocent() -> None:
    liar = SourceFailed("it has another shape", "c", "ProtocolError")
    broken_off = SourceFailed("a did not deliver", "a", "CancelledError")
    for errors in ({"a": liar, "b": broken_off, "c": broken_off}, {"b": broken_off, "c": broken_off, "a": liar}):
        assert _culprits(errors, {"a", "b", "c"}) == {"c": liar}
    assert _culprits({"b": broken_off}, {"a", "b", "c"}) == {"a": broken_off}


def test_a_step_that_cannot_be_reduced_ends_the_run_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_MOST_ATTEMPTS", 3)
    monkeypatch.setattr(pipeline, "_BUSY_S", 0.0)
    asked: list[tuple[str, int]] = []

    async def call(peer: str, name: str, header: dict[str, Any], **options: Any) -> Any:
        asked.append((name, header["attempt"]))
        raise PeerBusy("full", peer)

    async def scenario() -> None:
        node: Any = SimpleNamespace(call=call)
        roster = Roster(1, Tally(), 10.0, check=lambda: None, replaceable=lambda _: False, state_bytes=lambda _: 0)
        roster.join("a", "cpu", -1, 0)
        roster.admit("a")
        stage = SimpleNamespace(index=0, parameters=("weight",))
        plan: Any = SimpleNamespace(stages=[stage], shared={}, signatures={})
        end = StepEnd(node, roster, Pipeline(node, roster), plan, session=0)
        committed: list[bool] = []
        with pytest.raises(SwarmError, match=r"^Step 7 could not be reduced in 3 attempts; the last time: full$"):
            await end.finish(7, [], Clipping(), StepRecord(b"", ()), asyncio.Lock(), lambda: committed.append(True))
        assert asked == [("reduce", 0), ("reduce", 1), ("reduce", 2)], "each under a number of its own"
        assert not committed and roster.workers.keys() == {"a"}

    asyncio.run(asyncio.wait_for(scenario(), 20))
