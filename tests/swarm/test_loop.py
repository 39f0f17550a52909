"""The main thread waits for the event loop so that signals are heard."""

import concurrent.futures
import threading
from typing import Any

import pytest

from lightning_swarm.swarm.loop import result_of


class Deaf(concurrent.futures.Future):  # type: ignore[type-arg]
    """Its result is waited for by a thread to which a signal has come just before each wait."""

    def __init__(self, spells: int) -> None:
        super().__init__()
        self.spells = spells

    def result(self, timeout: float | None = None) -> Any:
        """As if the time were over at once."""
        assert timeout is not None and timeout <= 1.0, "the signal would be heard much later"
        if not self.spells:
            raise KeyboardInterrupt
        self.spells -= 1
        raise concurrent.futures.TimeoutError


@pytest.mark.parametrize("timeout_s", [None, 600.0])
def test_a_signal_is_heard_soon_even_if_it_comes_before_the_wait(timeout_s: float | None) -> None:
    with pytest.raises(KeyboardInterrupt):
        result_of(Deaf(spells=3), timeout_s)


def test_results_errors_and_the_end_of_the_time_are_those_of_the_future() -> None:
    done: concurrent.futures.Future[int] = concurrent.futures.Future()
    threading.Timer(0.01, done.set_result, [1]).start()
    assert result_of(done) == result_of(done, 0.0) == 1
    failed: concurrent.futures.Future[int] = concurrent.futures.Future()
    failed.set_exception(concurrent.futures.TimeoutError("its own"))
    with pytest.raises(concurrent.futures.TimeoutError, match="its own"):
        result_of(failed)
    with pytest.raises(concurrent.futures.TimeoutError):
        result_of(concurrent.futures.Future(), 0.05)
