"""Batches are cut by samples, and results are put together as if nothing had been cut."""

from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swarm.trainer.microbatches import batch_size, merge, split


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


def test_samples_are_spread_evenly_and_in_order() -> None:
    parts = split(torch.arange(10), 4)
    assert [part.samples for part in parts] == [2, 3, 2, 3]
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    assert torch.equal(torch.cat([part.batch for part in parts]), torch.arange(10))


def test_every_kind_of_container_is_cut() -> None:
    batch = {
        "pair": Pair(torch.arange(4), ["a", "b", "c", "d"]),
        "encoding": UserDict(ids=torch.ones(4, 3)),
        "shared": torch.ones(7),
        "scalar": torch.tensor(1.0),
        "none": None,
    }
    second = split(batch, 2)[1].batch
    assert isinstance(second["pair"], Pair) and second["pair"].names == ["c", "d"]
    assert second["pair"].x.tolist() == [2, 3]
    assert isinstance(second["encoding"], UserDict) and second["encoding"]["ids"].shape == (2, 3)
    assert second["shared"].shape == (7,) and second["scalar"] == 1.0 and second["none"] is None


def test_a_batch_of_as_many_tensors_as_samples_keeps_its_tensors() -> None:
    x, y = split([torch.ones(2, 3), torch.zeros(2)], 2)[0].batch
    assert x.shape == (1, 3) and y.shape == (1,)


def test_a_batch_without_a_batch_dimension_says_so() -> None:
    with pytest.raises(MisconfigurationException, match="no tensor with a batch dimension.*microbatches=1"):
        batch_size({"x": torch.tensor(1.0)})


def test_one_microbatch_needs_no_batch_dimension() -> None:
    (whole,) = split(torch.tensor(1.0), 1)
    assert whole.batch == 1.0 and whole.share == 1.0


def test_means_are_weighted_by_samples() -> None:
    parts = split(torch.arange(5.0), 2)
    merged = merge([{"loss": part.batch.mean(), "rows": part.batch} for part in parts], parts)
    assert merged["loss"] == pytest.approx(2.0)
    assert torch.equal(merged["rows"], torch.arange(5.0))


def test_lists_of_samples_are_joined_and_missing_results_left_out() -> None:
    parts = split(torch.arange(4), 2)
    assert merge([["a", "b"], ["c", "d"]], parts) == ["a", "b", "c", "d"]
    assert merge([None, None], parts) is None
    assert merge([None, torch.tensor(3.0)], parts) == 3.0
