"""The event loop keeps time and order."""

from lightning_swarm.simulation.events import EventLoop


def test_events_run_in_order_of_time_and_then_of_scheduling() -> None:
    loop, seen = EventLoop(), []
    for time, name in [(2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b"), (-5.0, "first")]:
        loop.at(time, lambda name: seen.append((loop.now, name)), name)
    loop.run()
    assert seen == [(0.0, "first"), (1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert loop.handled == 5


def test_run_stops_at_its_time_and_goes_on_later() -> None:
    loop, seen = EventLoop(), []
    loop.at(1.0, seen.append, 1)
    loop.at(3.0, seen.append, 3)
    loop.run(until=2.0)
    assert (loop.now, seen) == (2.0, [1])
    loop.run(until=4.0)
    assert seen == [1, 3]


def test_callback_can_stop_the_loop() -> None:
    loop = EventLoop()
    loop.at(1.0, loop.stop)
    loop.at(2.0, loop.stop)
    loop.run()
    assert loop.now == 1.0
