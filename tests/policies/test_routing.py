"""Stochastic wiring: shares follow speeds, nobody is flooded, nobody hangs the swarm."""

import math
import random
from collections import Counter

import pytest

from lightning_swarm.policies.banning import BanList, Cause
from lightning_swarm.policies.routing import LinkCosts, StageEmpty, StochasticWiring


def serve(
    wiring: StochasticWiring, seconds: dict[str, float], number: int, noise: float = 0.0, seed: int = 0
) -> Counter[str]:
    """Route microbatches one after the other through one stage; each is done before the next is sent."""
    generator = random.Random(seed)
    served: Counter[str] = Counter()
    for now in range(number):
        (peer,) = wiring.route(float(now))
        wiring.complete(0, peer, seconds[peer] * generator.uniform(1 - noise, 1 + noise), now=float(now))
        served[peer] += 1
    return served


def one_stage(*peers: str, **options: object) -> StochasticWiring:
    wiring = StochasticWiring(1, **options)  # type: ignore[arg-type]
    for peer in peers:
        wiring.add(0, peer)
    return wiring


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("speeds", [(1, 1), (1, 2, 4, 8), (1, 20), (3, 3, 3, 1)])
def test_shares_are_proportional_to_speeds(speeds: tuple[int, ...], noise: float) -> None:
    seconds = {f"p{index}": 1.0 / speed for index, speed in enumerate(speeds)}
    served = serve(one_stage(*seconds), seconds, 4000, noise)
    for index, speed in enumerate(speeds):
        assert served[f"p{index}"] / 4000 == pytest.approx(speed / sum(speeds), rel=0.05)


def test_shares_that_are_told_are_those_that_are_given() -> None:
    wiring = one_stage("a", "b")
    served = serve(wiring, {"a": 1.0, "b": 3.0}, 400)
    assert wiring.shares(0) == pytest.approx({"a": served["a"] / 400, "b": served["b"] / 400}, abs=0.01)


def test_first_measurement_counts_in_full_and_later_ones_are_averaged() -> None:
    wiring = one_stage("a", smoothing=0.5)
    for value, expected in [(4.0, 4.0), (1.0, (0.5 * 0.5 * 4.0 + 0.5 * 1.0) / 0.75)]:
        wiring.route(0.0)
        wiring.complete(0, "a", value, now=0.0)
        assert wiring.service_s("a") == pytest.approx(expected)
        assert wiring.measured_s("a") == pytest.approx(expected)


def test_peers_without_a_measurement_are_taken_for_typical_ones() -> None:
    wiring = one_stage("a", "b", "c")
    assert wiring.measured_s("a") is None
    assert wiring.route(0.0) == ("a",)
    wiring.complete(0, "a", 0.01, now=0.0)
    assert wiring.service_s("b") == wiring.service_s("c") == 0.01
    assert Counter(wiring.route(1.0)[0] for _ in range(30)) == {"a": 10, "b": 10, "c": 10}


def test_worker_that_becomes_slow_is_followed_within_20_microbatches() -> None:
    seconds = {"a": 1.0, "b": 1.0, "c": 1.0}
    wiring = one_stage(*seconds)
    in_flight = [wiring.route(0.0)[0] for _ in range(9)]

    def run(number: int) -> Counter[str]:
        served: Counter[str] = Counter()
        for _ in range(number):
            peer = in_flight.pop(0)
            wiring.complete(0, peer, seconds[peer], now=0.0)
            in_flight.append(wiring.route(0.0)[0])
            served[in_flight[-1]] += 1
        return served

    run(60)
    seconds["a"] = 4.0
    run(20)
    assert run(90)["a"] == pytest.approx(90 / 9, abs=2)


def test_new_peer_is_neither_flooded_nor_starved() -> None:
    seconds = {"a": 1.0, "b": 1.0, "new": 1.0}
    wiring = one_stage("a", "b")
    serve(wiring, seconds, 300)
    wiring.add(0, "new")
    served = serve(wiring, seconds, 30)
    assert 8 <= served["new"] <= 11


@pytest.mark.parametrize("late", [False, True])
def test_silent_peer_that_nobody_measured_holds_few_microbatches(late: bool) -> None:
    """Of the systems before, one gave such a peer 300 of 400 requests."""
    wiring = one_stage("a", "b", "c") if late else one_stage("a", "b", "c", "silent")
    serve(wiring, {"a": 1.0, "b": 1.0, "c": 1.0, "silent": 1.0}, 0 if not late else 30)
    if late:
        wiring.add(0, "silent")
    in_flight: list[str] = []
    for _ in range(400):
        in_flight.append(wiring.route(0.0)[0])
        answering = [peer for peer in in_flight if peer != "silent"]
        if len(in_flight) > 8 and answering:
            in_flight.remove(answering[0])
            wiring.complete(0, answering[0], 1.0, now=0.0)
    assert wiring.outstanding("silent") <= (2 if late else 8)


def test_timeout_is_charged_and_remembered() -> None:
    wiring = one_stage("a", "b")
    serve(wiring, {"a": 1.0, "b": 1.0}, 20)
    wiring.pick(0, 0.0, exclude=("b",))
    wiring.timed_out(0, "a", 30.0, now=30.0)
    assert wiring.service_s("a") > 5.0
    assert serve(wiring, {"a": 1.0, "b": 1.0}, 25) == {"b": 25}


def test_hung_peer_gets_at_most_two_tasks_in_a_ban_window() -> None:
    wiring, bans = one_stage("a", "b", "hung"), BanList()
    given: list[float] = []
    now = 0.0
    waiting: list[float] = []
    while now < 400.0:
        (peer,) = wiring.route(now, bans.banned(now))
        bans.dispatched(now, peer)
        if peer == "hung":
            given.append(now)
            waiting.append(now + 5.0)
        else:
            wiring.complete(0, peer, 1.0, now=now)
            bans.succeeded(now, peer)
        now += 1.0
        while waiting and waiting[0] <= now:
            waiting.pop(0)
            wiring.timed_out(0, "hung", 5.0, now=now)
            bans.report(now, "hung", Cause.TIMEOUT)
    first_ban = given[0] + 5.0
    for start in range(int(first_ban), 400, 5):
        assert sum(start <= time < start + 15.0 for time in given) <= 2
    assert len([time for time in given if time > first_ban]) <= 6


def test_banned_peers_are_avoided_and_earn_no_credit() -> None:
    seconds = {"a": 1.0, "b": 1.0}
    wiring = one_stage(*seconds)
    serve(wiring, seconds, 10)
    for now in range(100):
        assert wiring.route(now, banned={"a"}) == ("b",)
        wiring.complete(0, "b", 1.0, now=now)
    assert serve(wiring, seconds, 20)["a"] in (10, 11)


def test_bans_are_ignored_where_all_are_banned() -> None:
    wiring = one_stage("a", "b")
    assert {wiring.route(0.0, banned={"a", "b"})[0] for _ in range(4)} == {"a", "b"}


def test_repair_excludes_and_says_when_nobody_is_left() -> None:
    wiring = one_stage("a", "b")
    assert wiring.pick(0, 0.0, exclude=("a",)) == "b"
    with pytest.raises(StageEmpty, match=r"^Stage 0 has no worker besides a, b\.$"):
        wiring.pick(0, 0.0, exclude=("a", "b"))
    assert wiring.pick(0, 0.0, exclude=("b",), banned=("a",)) == "a"


def test_route_that_cannot_be_completed_charges_nobody() -> None:
    wiring = StochasticWiring(2)
    wiring.add(0, "a")
    with pytest.raises(StageEmpty, match=r"^Stage 1 has no worker\.$"):
        wiring.route(0.0)
    assert wiring.outstanding("a") == 0


@pytest.mark.parametrize(("fails", "later"), [(True, {"a": 1, "b": 5}), (False, {"a": 3, "b": 3})])
def test_who_fails_pays_and_who_was_not_needed_does_not(fails: bool, later: dict[str, int]) -> None:
    wiring = one_stage("a", "b")
    for _ in range(4):
        wiring.pick(0, 0.0, exclude=("b",))
        (wiring.failed if fails else wiring.withdraw)(0, "a")
    assert Counter(wiring.route(0.0)[0] for _ in range(6)) == later


def test_capacity_bounds_what_a_peer_holds_while_others_have_room() -> None:
    wiring = StochasticWiring(1)
    wiring.add(0, "small", capacity=1)
    wiring.add(0, "large")
    held = Counter(wiring.route(0.0)[0] for _ in range(6))
    assert held == {"small": 1, "large": 5}
    wiring.complete(0, "small", 1.0, now=1.0)
    assert "small" in [wiring.route(2.0)[0] for _ in range(2)]


def test_moved_peer_keeps_its_relative_speed_and_late_answers_are_ignored() -> None:
    wiring = StochasticWiring(2)
    for stage, peer in enumerate(["a", "b"]):
        wiring.add(stage, peer)
    wiring.add(0, "mover")
    for peer, stage, seconds in [("a", 0, 1.0), ("mover", 0, 0.5), ("b", 1, 8.0)]:
        wiring.pick(stage, 0.0, exclude=set(wiring.peers(stage)) - {peer})
        wiring.complete(stage, peer, seconds, now=1.0)
    wiring.pick(0, 1.0, exclude=("a",))
    wiring.move("mover", 1)
    assert (wiring.stage_of("mover"), wiring.peers(0)) == (1, ("a",))
    assert wiring.service_s("mover") == pytest.approx(0.5 / 0.75 * 8.0)
    wiring.complete(0, "mover", 0.5, now=2.0)
    wiring.remove("mover")
    wiring.complete(1, "mover", 0.5, now=2.0)
    wiring.timed_out(1, "mover", 9.0)
    wiring.failed(1, "mover")
    assert wiring.stage_of("mover") is None
    assert wiring.outstanding("mover") == 0


def test_silence_is_measured_from_the_last_answer() -> None:
    wiring = one_stage("a", "b")
    wiring.pick(0, 5.0, exclude=("b",))
    wiring.pick(0, 6.0, exclude=("b",))
    assert wiring.silent(9.0) == {"a": 4.0}
    wiring.complete(0, "a", 1.0, now=8.0)
    assert wiring.silent(9.0) == {"a": 1.0}


def linked(costs: LinkCosts, **places: str) -> StochasticWiring:
    wiring = StochasticWiring(2, edge_cost=costs)
    for peer, place in places.items():
        wiring.add(int(place[0]), peer)
        for other, there in places.items():
            costs.measured(peer, other, 0.0 if place[1:] == there[1:] else 0.2)
    return wiring


def test_near_peers_are_preferred_and_far_ones_keep_their_share() -> None:
    wiring = linked(LinkCosts(0.0), e0="0east", w0="0west", e1="1east", w1="1west")
    near = 0
    served: Counter[str] = Counter()
    for now in range(400):
        route = wiring.route(float(now))
        for stage, peer in enumerate(route):
            wiring.complete(stage, peer, 0.1, now=float(now))
        near += route[0][0] == route[1][0]
        served.update(route)
    assert near > 390
    assert all(190 <= served[peer] <= 210 for peer in ("e0", "w0", "e1", "w1"))


def test_only_far_peers_are_used_when_there_are_no_near_ones() -> None:
    wiring = linked(LinkCosts(0.0), e0="0east", w1="1west")
    assert wiring.route(0.0) == ("e0", "w1")


def test_broken_link_is_not_used_until_it_is_restored() -> None:
    costs = LinkCosts(1e6, latency_s=0.01, bytes_per_s=1e8)
    assert costs("a", "b") == pytest.approx(2 * (0.01 + 0.01))
    wiring = StochasticWiring(2, edge_cost=costs)
    for stage, peer in [(0, "a"), (1, "b"), (1, "c")]:
        wiring.add(stage, peer)
    costs.cut("b", "a")
    assert math.isinf(costs("a", "b"))
    assert [wiring.route(0.0)[1] for _ in range(3)] == ["c", "c", "c"]
    assert wiring.pick(0, 0.0, following="b") == "a", "where no other link is left a broken one is tried"
    costs.restore("b", "a")
    assert wiring.route(0.0)[1] == "b"


@pytest.mark.parametrize(
    ("seconds", "edge_s", "slack", "capacity", "expected"),
    [
        (((1.0,), (1.0,)), (0.0, 0.0), 1.0, None, 2),
        (((1.0,), (1.0,)), (0.0, 3.0), 1.0, None, 5),
        (((1.0, 1.0), (0.5,)), (0.0, 0.0), 2.0, None, 6),
        (((1.0,), (0.25,)), (0.0, 0.0), 1.0, None, 2),
        (((1.0, 1.0), (1.0, 1.0)), (0.0, 9.0), 3.0, 4, 8),
    ],
)
def test_in_flight_follows_rates_latencies_and_memory(
    seconds: tuple[tuple[float, ...], ...], edge_s: tuple[float, ...], slack: float, capacity: int | None, expected: int
) -> None:
    wiring = StochasticWiring(len(seconds))
    for stage, values in enumerate(seconds):
        for index in range(len(values)):
            wiring.add(stage, f"{stage}.{index}", capacity=capacity)
        for index, value in enumerate(values):
            wiring.pick(stage, 0.0, exclude=[peer for peer in wiring.peers(stage) if peer != f"{stage}.{index}"])
            wiring.complete(stage, f"{stage}.{index}", value, now=0.0)
    assert wiring.in_flight_target(edge_s=edge_s, slack=slack) == expected


def test_few_are_in_flight_before_anything_is_known() -> None:
    wiring = one_stage("a", "b")
    assert wiring.in_flight_target() == 4
    with pytest.raises(StageEmpty):
        StochasticWiring(1).in_flight_target()


def test_random_sequence_keeps_its_books() -> None:
    """Whatever happens in whatever order, what is out is what was given and not answered."""
    generator = random.Random(3)
    wiring = StochasticWiring(2)
    out: list[tuple[int, str]] = []
    for now in range(1500):
        action = generator.randrange(8)
        peer = f"p{generator.randrange(12)}"
        if action == 0:
            wiring.add(generator.randrange(2), peer, capacity=generator.choice([None, 1, 3]))
            out = [entry for entry in out if entry[1] != peer]
        elif action == 1 and now % 5 == 0:
            wiring.remove(peer)
            out = [entry for entry in out if entry[1] != peer]
        elif action < 5 and all(wiring.peers(stage) for stage in range(2)):
            out.extend(enumerate(wiring.route(now, banned={f"p{generator.randrange(12)}" for _ in range(4)})))
        elif out:
            stage, name = out.pop(generator.randrange(len(out)))
            end = generator.randrange(4)
            if end == 0:
                wiring.complete(stage, name, generator.uniform(0.1, 2.0), now=now)
            elif end == 1:
                wiring.timed_out(stage, name, 3.0)
            else:
                (wiring.failed if end == 2 else wiring.withdraw)(stage, name)
        for stage in range(2):
            for name in wiring.peers(stage):
                assert wiring.outstanding(name) == sum(entry == (stage, name) for entry in out)
            if wiring.peers(stage):
                assert sum(wiring.shares(stage).values()) == pytest.approx(1.0)


def test_observed_transfers_are_smoothed_and_count_both_ways() -> None:
    costs = LinkCosts(0.0, smoothing=0.5)
    assert costs("a", "b") == 0.0
    costs.observed("a", "b", 0.2)
    assert costs("a", "b") == costs("b", "a") == pytest.approx(0.4), "the way back is taken to be alike"
    costs.observed("b", "a", 0.6)
    costs.observed("a", "b", 0.4)
    assert costs("a", "b") == costs("b", "a") == pytest.approx(0.9)
    costs.forget("a")
    assert costs("a", "b") == 0.0


def test_a_peer_holds_no_more_than_its_memory_allows() -> None:
    wiring = StochasticWiring(1)
    wiring.add(0, "small")
    wiring.add(0, "large")
    for _ in range(4):
        peer = wiring.pick(0, 0.0)
        wiring.complete(0, peer, 1.0, now=1.0)
    wiring.limit("small", 1)
    assert [wiring.pick(0, 1.0) for _ in range(5)].count("small") == 1
    wiring.limit("nobody", 1)


def test_who_comes_while_all_is_guessed_is_not_shut_out_when_the_guess_was_far_too_high() -> None:
    """Before the first answer a microbatch is taken to last a second; they take 5 ms."""
    wiring = StochasticWiring(1)
    wiring.add(0, "first")
    for _ in range(3):
        wiring.pick(0, 0.0)
    wiring.add(0, "second")
    for _ in range(3):
        wiring.complete(0, "first", 0.005, now=1.0)
    chosen = []
    for _ in range(100):
        chosen.append(wiring.pick(0, 2.0))
        wiring.complete(0, chosen[-1], 0.005, now=2.0)
    assert 40 <= chosen.count("second") <= 60
