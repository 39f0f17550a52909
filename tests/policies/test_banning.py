"""Bans have causes, grow, end, and never leave a stage without anybody."""

import pytest

from lightning_swarm.policies.banning import DEFAULT_RULES, Ban, BanList, BanRule, Cause, link


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_a_rule_and_only_busy_and_caller_ban_nobody(cause: Cause) -> None:
    ban = BanList().report(10.0, "a", cause)
    if cause in (Cause.BUSY, Cause.CALLER):
        assert ban is None
    else:
        assert ban == Ban("a", cause, 10.0, 10.0 + DEFAULT_RULES[cause].first_s, 1)


@pytest.mark.parametrize(("now", "banned"), [(99.9, False), (100.0, True), (114.9, True), (115.0, False)])
def test_ban_lasts_as_long_as_its_cause_says(now: float, banned: bool) -> None:
    bans = BanList()
    if now >= 100.0:
        bans.report(100.0, "a", Cause.TIMEOUT)
    assert bans.is_banned(now, "a") is banned
    assert bans.avoid(now, ["a", "b"]) == (frozenset("a") if banned else frozenset())
    assert len(bans.bans(now)) == banned


def test_bans_grow_up_to_a_bound_and_are_forgotten() -> None:
    bans = BanList({Cause.TIMEOUT: BanRule(10.0, growth=3.0, longest_s=50.0)}, forget_after_s=1000.0)
    now = 0.0
    for expected in (10.0, 30.0, 50.0, 50.0):
        ban = bans.report(now, "a", Cause.TIMEOUT)
        assert ban is not None
        assert ban.until_s - now == expected
        now = ban.until_s + 1.0
    ban = bans.report(now + 2000.0, "a", Cause.TIMEOUT)
    assert ban is not None and ban.repetition == 1


def test_peers_that_are_gone_for_long_do_not_pile_up() -> None:
    bans = BanList(forget_after_s=900.0)
    for k in range(1000):
        bans.report(10.0 * k, f"peer {k}", Cause.RESET)
        bans.dispatched(10.0 * k, f"peer {k}")
    assert 90 <= len(bans.banned(0.0)) <= len(bans._records) <= 92


def test_peer_that_fails_every_other_task_is_banned_ever_longer() -> None:
    bans, now, lengths = BanList(), 0.0, []
    for _ in range(4):
        ban = bans.report(now, "a", Cause.RESET)
        assert ban is not None
        lengths.append(ban.until_s - ban.since_s)
        now = ban.until_s + 1.0
        bans.dispatched(now, "a")
        bans.succeeded(now + 1.0, "a")
        now += 2.0
    assert lengths == [2.0, 4.0, 8.0, 16.0]


def test_ten_tasks_that_were_out_when_a_peer_hung_are_one_ban() -> None:
    bans = BanList()
    first = bans.report(0.0, "a", Cause.TIMEOUT)
    assert [bans.report(now / 10, "a", Cause.TIMEOUT) for now in range(1, 10)] == [None] * 9
    assert bans.bans(1.0) == (first,)


def test_worse_evidence_lengthens_a_running_ban() -> None:
    bans = BanList()
    bans.report(0.0, "a", Cause.RESET)
    ban = bans.report(1.0, "a", Cause.WRONG_RESULT)
    assert ban == Ban("a", Cause.WRONG_RESULT, 1.0, 301.0, 1)
    assert bans.report(2.0, "a", Cause.RESET) is None


@pytest.mark.parametrize(
    ("cause", "made_at", "restarted", "lifted"),
    [
        (Cause.REFUSED, 11.0, False, True),
        (Cause.RESET, 11.0, False, True),
        (Cause.REFUSED, 9.0, False, False),
        (Cause.TIMEOUT, 11.0, False, False),
        (Cause.TIMEOUT, 11.0, True, True),
        (Cause.PROTOCOL, 11.0, False, False),
        (Cause.WRONG_RESULT, 11.0, False, False),
        (Cause.WRONG_RESULT, 11.0, True, False),
    ],
)
def test_announcements_lift_what_they_refute(cause: Cause, made_at: float, restarted: bool, lifted: bool) -> None:
    bans = BanList()
    bans.report(10.0, "a", cause)
    assert bans.announced("a", made_at, restarted=restarted) is lifted
    assert bans.is_banned(11.0, "a") is not lifted


def test_heartbeat_lifts_only_the_first_of_a_series() -> None:
    bans = BanList()
    bans.report(0.0, "a", Cause.REFUSED)
    assert bans.announced("a", 1.0)
    bans.report(2.0, "a", Cause.REFUSED)
    assert not bans.announced("a", 3.0)


def test_peer_on_probation_gets_one_task_until_it_answers() -> None:
    bans = BanList()
    bans.report(0.0, "a", Cause.TIMEOUT)
    assert not bans.is_banned(16.0, "a")
    bans.dispatched(16.0, "a")
    assert bans.is_banned(16.0, "a")
    bans.succeeded(17.0, "a")
    assert not bans.is_banned(17.0, "a")
    bans.dispatched(18.0, "a")
    assert not bans.is_banned(18.0, "a"), "proven again"


def test_probation_ends_without_an_answer_in_the_end() -> None:
    bans = BanList()
    bans.report(0.0, "a", Cause.TIMEOUT)
    bans.dispatched(16.0, "a")
    assert bans.is_banned(30.0, "a")
    assert not bans.is_banned(31.0, "a")
    bans.dispatched(31.0, "a")
    bans.withdrawn("a")
    assert not bans.is_banned(31.0, "a")


def test_old_answer_does_not_end_a_running_ban() -> None:
    bans = BanList()
    bans.report(0.0, "a", Cause.TIMEOUT)
    bans.succeeded(1.0, "a")
    assert bans.is_banned(1.0, "a")


def test_all_banned_means_nobody_is_and_tells_how_long_to_back_off() -> None:
    bans = BanList()
    bans.report(0.0, "a", Cause.TIMEOUT)
    assert bans.next_release_s(1.0, ["a", "b"]) is None
    bans.report(0.0, "b", Cause.REFUSED)
    assert bans.avoid(1.0, ["a", "b"]) == frozenset()
    assert bans.avoid(1.0, ["a", "b", "c"]) == {"a", "b"}
    assert bans.next_release_s(1.0, ["a", "b"]) == 5.0
    bans.forget("b")
    assert bans.banned(1.0) == {"a"}


def test_links_are_banned_like_peers() -> None:
    bans = BanList()
    bans.report(0.0, link("a", "b"), Cause.LINK)
    assert bans.is_banned(1.0, link("a", "b"))
    assert not bans.is_banned(1.0, link("b", "a"))
    assert not bans.is_banned(1.0, "a")
