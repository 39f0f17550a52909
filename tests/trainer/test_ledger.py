"""Every microbatch counts exactly once at every stage."""

import pytest

from lightning_swarm.trainer.ledger import Ledger


def test_a_second_holder_of_a_microbatch_is_refused() -> None:
    ledger = Ledger(stages=2)
    ledger.record("0:0", 1, "a")
    ledger.record("0:0", 1, "a")
    with pytest.raises(ValueError, match="accumulated twice at stage 1: by a and by b"):
        ledger.record("0:0", 1, "b")


def test_a_lost_worker_leaves_exactly_what_it_held_to_be_repeated() -> None:
    ledger = Ledger(stages=2)
    for microbatch, workers in {"0:0": "ab", "0:1": "cb", "0:2": "ad"}.items():
        for stage, worker in enumerate(workers):
            ledger.record(microbatch, stage, worker)
    assert ledger.lose("a") == [("0:0", 0), ("0:2", 0)]
    assert ledger.missing(["0:0", "0:1", "0:2"]) == [("0:0", 0), ("0:2", 0)]
    ledger.record("0:0", 0, "c")
    assert ledger.held_by("c") == {"0:0", "0:1"}
    assert ledger.contributors() == {0: {"c"}, 1: {"b", "d"}}
