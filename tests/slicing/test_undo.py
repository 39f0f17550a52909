"""What code stores on modules can be taken back, also when more was stored since."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from lightning_swarm.slicing.undo import Attributes


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 1
        self.seen = ["a"]
        self.table = {"inner": [1], "n": 0}
        self.kinds = {"x"}
        self.recent = deque([1], maxlen=3)
        self.register_buffer("mean", torch.zeros(2))


def test_everything_is_restored() -> None:
    module = Keeper()
    mean = module.mean
    before = Attributes([module])
    assert not before.changed()
    module.count += 1
    module.fresh = object()
    module.seen.append("b")
    module.table["inner"].append(2)
    module.table["more"] = 1
    module.kinds.add("y")
    module.recent.append(2)
    module.mean = torch.ones(2)
    del module.table["n"]
    assert before.changed() and before.changed_modules() == [module]
    before.restore()
    assert (module.count, module.seen, module.table) == (1, ["a"], {"inner": [1], "n": 0})
    assert (module.kinds, list(module.recent)) == ({"x"}, [1])
    assert module.mean is mean and not hasattr(module, "fresh")
    assert not before.changed()


def test_what_was_stored_later_stays_when_what_was_stored_before_is_taken_back() -> None:
    module = Keeper()
    before = Attributes([module])
    module.count = 5
    module.noted = "prefix"
    module.seen.append("prefix")
    module.table["prefix"] = 1
    module.kinds.add("prefix")
    changes = before.changes()
    module.count = 6
    module.seen.append("own")
    module.table["own"] = 2
    module.kinds.add("own")
    changes.revert()
    assert module.count == 6 and not hasattr(module, "noted")
    assert module.seen == ["a", "own"]
    assert module.table == {"inner": [1], "n": 0, "own": 2}
    assert module.kinds == {"x", "own"}


def test_a_list_that_was_replaced_is_put_back() -> None:
    module = Keeper()
    original = module.seen
    before = Attributes([module])
    module.seen = []
    module.seen.append("other")
    before.changes().revert()
    assert module.seen is original and original == ["a"]


def test_parameters_submodules_and_hooks_are_not_touched() -> None:
    module = Keeper()
    before = Attributes([module])
    module.register_forward_hook(lambda *args: None)
    assert not before.changed()


@pytest.mark.parametrize("items", [998, 1000, 5000])
def test_long_lists_are_cut_back_to_their_length(items: int) -> None:
    module = Keeper()
    module.seen = list(range(items))
    before = Attributes([module])
    module.seen += ["prefix"] * 3
    changes = before.changes()
    module.seen.append("own")
    changes.revert()
    assert module.seen == [*range(items), "own"]
    before = Attributes([module])
    module.seen.append("more")
    assert before.changed()
    before.restore()
    assert module.seen == [*range(items), "own"]
