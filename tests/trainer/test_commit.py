"""Whose fault it is that a step could not be reduced."""

from lightning_swarm.swarm.errors import PeerUnreachable, SourceFailed, SwarmError
from lightning_swarm.trainer.commit import _culprits


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
