"""Whom a session believes when a stage's state is handed over, and whom of its newcomers it gives up."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_swarm.policies.banning import Cause
from lightning_swarm.swarm.calls import ProbeReply
from lightning_swarm.swarm.errors import PeerBusy, ProtocolError, SwarmError
from lightning_swarm.trainer import session as module
from lightning_swarm.trainer.session import Session, Settings
from tests.trainer.test_roster import make

SETTINGS = Settings(
    in_flight=None,
    snapshot_every_n_steps=100,
    startup_timeout_s=10.0,
    codec="none",
    reduce_codec="none",
    reproducible=False,
    run_seed=0,
)


def session(*workers: str, version: int = 7, step: int = 7, node: Any = None) -> Any:
    """At a step, with these workers at stage 0 and the trainer's copy of a version."""
    node = node or SimpleNamespace(peer_id="trainer")
    identity: Any = SimpleNamespace(session=0)
    origin: Any = SimpleNamespace(version=version)
    made: Any = Session(node, identity, origin, SETTINGS, lambda: None, lambda index, stage: None)
    made.roster, made.step = make(*((worker, 0) for worker in workers)), step
    made._gradient_log.covers = lambda stage, steps: version >= 0
    made.pipeline = SimpleNamespace(lose=lambda peer: made.roster.remove(peer))
    return made


@pytest.mark.parametrize(
    ("version", "banned", "expected"),
    [
        (7, "", "a b trainer"),
        (3, "", "a b trainer"),
        (-1, "", "a b"),
        (7, "a", "b trainer a"),
        (3, "a", "b trainer a"),
        (-1, "a", "b a"),
        (7, "ab", "trainer a b"),
        (3, "ab", "a b trainer"),  # Else many steps would have to be applied to an old copy.
        (-1, "ab", "a b"),
    ],
)
def test_banned_workers_are_the_last_to_be_believed(version: int, banned: str, expected: str) -> None:
    async def scenario() -> None:
        swarm = session("a", "b", version=version)
        for worker in banned:
            swarm.roster.ban(worker, 0, Cause.WRONG_RESULT, "it lied")
        assert " ".join(swarm._donors(0)) == expected

    asyncio.run(scenario())


def test_the_trainers_copy_comes_from_a_banned_worker_only_if_no_other_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def refuse(node: Any, peer: str, request: Any) -> Any:
        asked.append(peer)
        raise PeerBusy("not now", peer)

    async def scenario() -> None:
        swarm = session("a", "b", "c")
        swarm.roster.ban("a", 0, Cause.PROTOCOL, "it sent garbage")
        with pytest.raises(SwarmError, match="No worker could give the state of stage 0"):
            await swarm._stage_state(0, 7)

    monkeypatch.setattr(module, "fetch_state", refuse)
    asyncio.run(scenario())
    assert asked == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("answers", "given", "banned"),
    [
        ("nan finite", "b", {"a": Cause.WRONG_RESULT}),
        ("corrupt finite", "b", {"a": Cause.PROTOCOL}),
        ("nan corrupt finite", "c", {"a": Cause.WRONG_RESULT, "b": Cause.PROTOCOL}),
        ("nan nan", "a", {}),  # What training has come to.
        ("nan busy", None, {}),  # The other one may say something else.
        ("busy nan", None, {}),
    ],
)
def test_a_state_with_nan_is_believed_only_if_all_say_the_same(
    answers: str, given: str | None, banned: dict[str, Cause], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = dict(zip("abc", answers.split()))

    async def give(node: Any, peer: str, request: Any) -> Any:
        if of[peer] == "busy":
            raise PeerBusy("not now", peer)
        if of[peer] == "corrupt":
            raise ProtocolError("a checksum is wrong", peer)
        return SimpleNamespace(version=7, giver=peer, is_finite=lambda: of[peer] == "finite")

    async def scenario() -> None:
        swarm = session(*of)
        if given is None:
            with pytest.raises(SwarmError, match="its parameters are not finite"):
                await swarm._stage_state(0, 7)
        else:
            assert (await swarm._stage_state(0, 7)).giver == given
        assert {ban["peer"]: Cause(ban["cause"]) for ban in swarm.roster.tally.bans} == banned
        assert swarm.roster.workers.keys() == of.keys() - banned.keys()

    monkeypatch.setattr(module, "fetch_state", give)
    asyncio.run(scenario())


@pytest.mark.parametrize(("computing_s", "given_up"), [(61.0, True), (59.0, False)])
def test_a_newcomer_whose_compute_thread_is_stuck_is_given_up(
    computing_s: float, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_AFTER_NEWCOMERS_S", 0.0)
    looks, lost = [], []

    async def scenario() -> None:
        async def call(peer: str, method: str, header: dict[str, Any], **options: Any) -> Any:
            looks.append(method)
            if len(looks) == 10:
                newcomer.ready = True
            return ProbeReply(computing_s).to_dict(), []

        swarm = session("a", node=SimpleNamespace(peer_id="trainer", call=call))
        newcomer = swarm.roster.join("b", "cpu", -1, 0)
        pipeline: Any = SimpleNamespace(lose=lambda peer: (lost.append(peer), swarm.roster.remove(peer)))
        await swarm._watch(newcomer, swarm.roster, pipeline)

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert looks == ["probe"] * (3 if given_up else 10) and lost == (["b"] if given_up else [])


def test_a_newcomer_from_before_all_were_spread_anew_is_watched_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_AFTER_NEWCOMERS_S", 0.0)

    async def scenario() -> None:
        swarm = session("a")
        earlier = swarm.roster
        newcomer = earlier.join("b", "cpu", -1, 0)
        swarm.roster = make(("a", 0))
        await swarm._watch(newcomer, earlier, swarm.pipeline)

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_what_is_left_of_a_snapshot_that_failed_goes_on_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def give(node: Any, peer: str, request: Any) -> Any:
        if request.stage == 1:
            raise PeerBusy("not now", peer)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(peer)

    async def scenario() -> None:
        swarm = session("a", "b", version=3)
        swarm.roster = make(("a", 0), ("b", 1))
        swarm.plan = SimpleNamespace(stages=[SimpleNamespace(index=0), SimpleNamespace(index=1)])
        with pytest.raises(SwarmError, match="No worker could give the state of stage 1"):
            await swarm._update_origin()
        assert ended == ["a"]

    monkeypatch.setattr(module, "fetch_state", give)
    asyncio.run(asyncio.wait_for(scenario(), 20))
