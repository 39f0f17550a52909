"""The accumulator counts every microbatch once and hands gradients to and from the reduction unchanged."""

import pytest
import torch
from torch import nn

from lightning_swarm.worker.accumulator import Accumulator
from lightning_swarm.worker.statistics import squared_norm


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _backward(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    module(torch.randn(5, 4)).pow(2).mean().backward()


def _accumulate(module: nn.Module, accumulator: Accumulator, seeds: range | list[int]) -> None:
    for seed in seeds:
        with accumulator.counting(f"0:{seed}"):
            _backward(module, seed)


@pytest.mark.parametrize("reproducible", [False, True])
def test_sum_of_counted_microbatches_is_that_of_autograd(reproducible: bool) -> None:
    module, plain = _net(), _net()
    accumulator = Accumulator(dict(module.named_parameters()), reproducible=reproducible)
    names = [name for name, _ in module.named_parameters()]
    _accumulate(module, accumulator, range(6))
    for seed in range(6):
        _backward(plain, seed)
    assert accumulator.accumulated == {f"0:{seed}" for seed in range(6)}
    vector, present = accumulator.flat(names)
    assert vector.dtype == (torch.float64 if reproducible else torch.float32)
    accumulator.install(names, vector, present)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7)


def test_reproducible_sum_does_not_depend_on_the_order() -> None:
    vectors = []
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 3, 1, 0, 2, 6, 5, 4]):
        module = _net()
        accumulator = Accumulator(dict(module.named_parameters()), reproducible=True)
        names = [name for name, _ in module.named_parameters()]
        _accumulate(module, accumulator, order)
        vectors.append(accumulator.flat(names)[0].float())
    assert torch.equal(*vectors)


@pytest.mark.parametrize("reproducible", [False, True])
def test_microbatch_is_refused_before_it_counts_twice(reproducible: bool) -> None:
    module = _net()
    accumulator = Accumulator(dict(module.named_parameters()), reproducible=reproducible)
    names = [name for name, _ in module.named_parameters()]
    _accumulate(module, accumulator, range(2))
    before = accumulator.flat(names)[0]
    with pytest.raises(ValueError, match="'0:1' is accumulated already"):
        _accumulate(module, accumulator, [1])
    assert torch.equal(accumulator.flat(names)[0], before)
    assert accumulator.accumulated == {"0:0", "0:1"}


@pytest.mark.parametrize("reproducible", [False, True])
def test_second_backward_of_a_counted_microbatch_never_stays_in_the_sum(reproducible: bool) -> None:
    module = _net()
    accumulator = Accumulator(dict(module.named_parameters()), reproducible=reproducible)
    names = [name for name, _ in module.named_parameters()]
    _accumulate(module, accumulator, range(2))
    before = accumulator.flat(names)[0]
    _backward(module, 1)
    with pytest.raises(ValueError, match="is accumulated already"):
        accumulator.add("0:1")
    if reproducible:
        assert torch.equal(accumulator.flat(names)[0], before)
    else:
        assert accumulator.accumulated == frozenset()
        assert not accumulator.flat(names)[0].any()


@pytest.mark.parametrize("reproducible", [False, True])
def test_backward_that_fails_midway_leaves_nothing_partial(reproducible: bool) -> None:
    module = _net()
    accumulator = Accumulator(dict(module.named_parameters()), reproducible=reproducible)
    names = [name for name, _ in module.named_parameters()]
    _accumulate(module, accumulator, range(2))
    before = accumulator.flat(names)[0]

    def explode(gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    handle = module[0].weight.register_hook(explode)
    with pytest.raises(RuntimeError, match="out of memory"):
        _accumulate(module, accumulator, [2])
    handle.remove()
    assert torch.equal(accumulator.flat(names)[0], before if reproducible else torch.zeros_like(before))
    assert accumulator.accumulated == ({"0:0", "0:1"} if reproducible else frozenset())
    _accumulate(module, accumulator, [2])
    assert "0:2" in accumulator.accumulated


@pytest.mark.parametrize("reproducible", [False, True])
def test_absent_gradients_stay_none_and_frozen_parameters_take_no_room(reproducible: bool) -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2), "frozen": nn.Linear(50, 50)})
    module["frozen"].requires_grad_(False)
    names = [name for name, _ in module.named_parameters()]
    accumulator = Accumulator(dict(module.named_parameters()), reproducible=reproducible)
    with accumulator.counting("0:0"):
        module["used"](torch.ones(1, 2)).sum().backward()
    vector, present = accumulator.flat(names)
    assert vector.shape == (12,)
    assert present == (True, True, False, False, False, False)
    assert accumulator.absent(names) == ["unused.weight", "unused.bias", "frozen.weight", "frozen.bias"]
    accumulator.install(names, vector, (True, True, False, True, False, False))
    assert module["unused"].weight.grad is None
    assert torch.equal(module["unused"].bias.grad, torch.zeros(2))
    assert module["frozen"].weight.grad is None


def test_worker_without_microbatches_has_a_vector_without_memory() -> None:
    module = nn.Linear(1000, 1000)
    accumulator = Accumulator(dict(module.named_parameters()))
    vector, present = accumulator.flat(["weight", "bias"])
    assert vector.shape == (1_001_000,)
    assert vector.untyped_storage().nbytes() <= 8
    assert present == (False, False)


def test_sparse_gradients_become_dense() -> None:
    embedding = nn.Embedding(10, 2, sparse=True)
    accumulator = Accumulator(dict(embedding.named_parameters()))
    for microbatch in ("0:0", "0:1"):
        with accumulator.counting(microbatch):
            embedding(torch.tensor([1, 1, 3])).sum().backward()
    expected = torch.zeros(10, 2)
    expected[1], expected[3] = 4, 2
    assert torch.equal(accumulator.flat(["weight"])[0], expected.flatten())
    assert embedding.weight.grad.layout == torch.strided


def test_dtypes_and_layouts_come_back_as_the_parameters_have_them() -> None:
    parameters = {
        "half": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "single": nn.Parameter(torch.ones(2, 3)),
        "strided": nn.Parameter(torch.ones(2, 4, 3, 3).to(memory_format=torch.channels_last)),
        "complex": nn.Parameter(torch.ones(2, dtype=torch.complex64)),
    }
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    for reproducible in (False, True):
        accumulator = Accumulator(parameters, reproducible=reproducible)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        accumulator.add("0:0")
        names = list(parameters)
        vector, present = accumulator.flat(names)
        assert len(vector) == 3 + 6 + 72 + 4
        accumulator.install(names, vector, present)
        for name, parameter in parameters.items():
            assert torch.equal(parameter.grad, gradients[name])
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.stride() == parameter.stride()


def test_bfloat16_gradients_travel_as_bfloat16() -> None:
    module = nn.Linear(2, 2).to(torch.bfloat16)
    accumulator = Accumulator(dict(module.named_parameters()))
    assert accumulator.flat(["weight", "bias"])[0].dtype == torch.bfloat16


def test_installed_gradients_are_not_copied_but_a_snapshot_is_independent() -> None:
    module = _net()
    names = [name for name, _ in module.named_parameters()]
    accumulator = Accumulator(dict(module.named_parameters()))
    _accumulate(module, accumulator, [0])
    vector, present = accumulator.flat(names)
    before = vector.clone()
    _accumulate(module, accumulator, [1])
    assert torch.equal(vector, before)
    accumulator.install(names, vector, present)
    assert module[0].weight.grad.data_ptr() == vector.data_ptr()


def test_group_of_one_needs_no_copy() -> None:
    module = _net()
    names = [name for name, _ in module.named_parameters()]
    accumulator = Accumulator(dict(module.named_parameters()))
    _accumulate(module, accumulator, [0])
    gradient = module[0].weight.grad
    assert accumulator.squared_norm(names) == pytest.approx(float(accumulator.flat(names)[0].double().square().sum()))
    accumulator.install(names, None, (True,) * len(names))
    assert module[0].weight.grad is gradient


def test_reproducible_group_of_one_rounds_and_measures_as_a_larger_one() -> None:
    module = _net()
    names = [name for name, _ in module.named_parameters()]
    accumulator = Accumulator(dict(module.named_parameters()), reproducible=True)
    _accumulate(module, accumulator, range(3))
    vector, present = accumulator.flat(names)
    rounded = vector.to(accumulator.dtype(names))
    accumulator.install(names, None, present)
    assert torch.equal(torch.cat([p.grad.flatten() for p in module.parameters()]), rounded)
    assert accumulator.squared_norm(names) == squared_norm(rounded)


def test_wrong_length_is_refused_and_changes_nothing() -> None:
    module = _net()
    names = [name for name, _ in module.named_parameters()]
    accumulator = Accumulator(dict(module.named_parameters()))
    _accumulate(module, accumulator, [0])
    gradient = module[0].weight.grad
    with pytest.raises(ValueError, match="need a vector of 67 values"):
        accumulator.install(names, torch.zeros(5), (True,) * 4)
    assert module[0].weight.grad is gradient


def test_reset_begins_a_new_step() -> None:
    module = _net()
    _backward(module, 0)
    accumulator = Accumulator(dict(module.named_parameters()))
    assert module[0].weight.grad is None
    _accumulate(module, accumulator, [0])
    accumulator.reset()
    assert accumulator.accumulated == frozenset()
    assert all(parameter.grad is None for parameter in module.parameters())
    _accumulate(module, accumulator, [0])
    assert accumulator.accumulated == {"0:0"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_measuring_a_gradient_leaves_it_as_it_is(dtype: torch.dtype) -> None:
    gradient = torch.randn(70_001, dtype=dtype)
    before = gradient.clone()
    squared_norm(gradient)
    assert torch.equal(gradient, before)
