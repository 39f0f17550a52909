"""Whoever waits for a peer learns soon that it is gone or stuck, and waits for one that works."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_swarm.swarm import watched
from lightning_swarm.swarm.calls import ProbeReply
from lightning_swarm.swarm.errors import CallerError, DeadlineExceeded, PeerBusy, PeerUnreachable, SwarmError
from lightning_swarm.swarm.watched import watch


class Peer:
    """Answers a long call only when it has been asked what it does for as long as there are answers to that."""

    def __init__(self, *answers: ProbeReply | SwarmError) -> None:
        self.answers: Iterator[ProbeReply | SwarmError] = iter(answers)
        self.finished = asyncio.Event()

    async def call(self, peer: str, method: str, header: dict[str, Any], **options: Any) -> Any:
        """As of a node."""
        if method == "probe":
            answer = next(self.answers, None)
            if answer is None:
                self.finished.set()
                return ProbeReply(0.0).to_dict(), []
            if isinstance(answer, SwarmError):
                raise answer
            return answer.to_dict(), []
        await self.finished.wait()
        return {"answer": 1}, []


def call(*answers: ProbeReply | SwarmError, **options: Any) -> Any:
    async def scenario() -> Any:
        peer: Any = Peer(*answers)
        calling = asyncio.ensure_future(peer.call("peer", "state", {}))
        try:
            await watch(peer, "peer", {calling}, **options)
            return calling.result()[0]
        finally:
            calling.cancel()

    return asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_ASK_AFTER_S", 0.001)


@pytest.mark.parametrize(
    "answers",
    [
        [ProbeReply(0.0), ProbeReply(59.0), ProbeReply(0.0)],
        [ProbeReply(300.0, usual_s=100.0)],  # Its microbatches take minutes, as always.
        [CallerError("I answer no such call"), PeerBusy("not now")],  # It lives.
    ],
)
def test_a_peer_that_works_is_waited_for(answers: list[Any]) -> None:
    assert call(*answers) == {"answer": 1}


@pytest.mark.parametrize(
    ("answers", "error", "why"),
    [
        ([ProbeReply(0.0), PeerUnreachable("it is gone", "peer")], PeerUnreachable, "it is gone"),
        ([ProbeReply(59.0), ProbeReply(61.0, usual_s=0.5)], DeadlineExceeded, "no further for 61 s .* takes it 0.5 s"),
        ([ProbeReply(1001.0, usual_s=100.0)], DeadlineExceeded, "no further for 1001 s"),
    ],
)
def test_a_peer_that_is_gone_or_whose_compute_thread_is_stuck_is_given_up(
    answers: list[Any], error: type[SwarmError], why: str
) -> None:
    with pytest.raises(error, match=why):
        call(*answers)


def test_what_needs_no_compute_thread_is_waited_for_where_that_is_stuck() -> None:
    assert call(ProbeReply(1e6), computes=False) == {"answer": 1}
