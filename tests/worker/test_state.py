"""A state survives the way to another worker bit for bit, or is refused whole."""

import math
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_swarm.worker import state as state_module
from lightning_swarm.worker.state import StageState, StateRejected


def _net(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def _train(module: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()


def _capture(module: nn.Module, optimizer: Optimizer | None, version: int = 3, **options: Any) -> StageState:
    return StageState.capture(
        version, dict(module.named_parameters()), dict(module.named_buffers()), optimizer, **options
    )


def _load(state: StageState, module: nn.Module, optimizer: Optimizer | None) -> None:
    state.load(dict(module.named_parameters()), dict(module.named_buffers()), optimizer)


def _over_the_wire(state: StageState) -> StageState:
    header, tensors = state.to_wire()
    header = msgpack.unpackb(msgpack.packb(header), use_list=False)
    return StageState.from_wire(header, [tensor.clone() for tensor in tensors])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_joined_worker_goes_on_with_the_same_bits(name: str) -> None:
    donor, joiner = _net(0), _net(1)
    donor_optimizer, joiner_optimizer = (OPTIMIZERS[name](module.parameters()) for module in (donor, joiner))
    _train(donor, donor_optimizer, range(3))
    state = _over_the_wire(_capture(donor, donor_optimizer))
    _load(state, joiner, joiner_optimizer)
    assert _capture(joiner, joiner_optimizer).digest() == _capture(donor, donor_optimizer).digest() == state.digest()
    for module, optimizer in ((donor, donor_optimizer), (joiner, joiner_optimizer)):
        _train(module, optimizer, range(3, 6))
    assert _capture(joiner, joiner_optimizer).digest() == _capture(donor, donor_optimizer).digest()


def test_8_bit_optimizer_state_survives() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    donor, joiner = _net(0, 2048), _net(1, 2048)
    optimizers = [bitsandbytes.optim.AdamW8bit(m.parameters(), lr=0.01, min_8bit_size=1) for m in (donor, joiner)]
    _train(donor, optimizers[0], range(3))
    state = _over_the_wire(_capture(donor, optimizers[0]))
    kept = [value for entries in state.optimizer.values() for value in entries.values() if isinstance(value, Tensor)]
    assert any(tensor.dtype == torch.uint8 for tensor in kept)
    _load(state, joiner, optimizers[1])
    for module, optimizer in zip((donor, joiner), optimizers, strict=True):
        _train(module, optimizer, range(3, 6))
    assert _capture(joiner, optimizers[1]).digest() == _capture(donor, optimizers[0]).digest()


def test_optimizer_dtypes_are_kept_and_step_counts_stay_float32() -> None:
    donor, joiner = _net(0).to(torch.bfloat16), _net(1).to(torch.bfloat16)
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (donor, joiner)]
    for parameter in donor.parameters():
        moments = {key: torch.rand(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
        optimizers[0].state[parameter] = {"step": torch.tensor(3.0), **moments}
    _load(_over_the_wire(_capture(donor, optimizers[0])), joiner, optimizers[1])
    for state in optimizers[1].state.values():
        assert [state[key].dtype for key in ("step", "exp_avg", "exp_avg_sq")] == [torch.float32] * 3


def test_snapshot_does_not_follow_the_training() -> None:
    module = _net()
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    _train(module, optimizer, range(2))
    snapshot, shared = _capture(module, optimizer), _capture(module, optimizer, copy=False)
    before = snapshot.digest()
    assert shared.digest() == before
    _train(module, optimizer, range(2, 4))
    assert snapshot.digest() == before
    assert shared.digest() != before
    _load(snapshot, module, optimizer)
    _train(module, optimizer, range(2, 4))
    assert snapshot.digest() == before


def test_version_and_numbers_travel_but_are_not_part_of_the_digest() -> None:
    module = _net()
    numbers = {"scale": 65536.0, "growth": 3, "name": "stage1", "none": None, "flag": True}
    state = _capture(module, None, 7, numbers=numbers)
    arrived = _over_the_wire(state)
    assert (arrived.version, arrived.numbers) == (7, state.numbers)
    assert arrived.digest() == _capture(module, None, 8).digest()


@pytest.mark.parametrize("section", ["parameters", "buffers", "optimizer"])
def test_digest_sees_every_bit(section: str) -> None:
    module = _net()
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    _train(module, optimizer, range(2))
    before = _capture(module, optimizer).digest()
    tensors = {
        "parameters": module[0].bias.data,
        "buffers": module[1].num_batches_tracked,
        "optimizer": optimizer.state[module[2].weight]["exp_avg_sq"],
    }
    tensors[section].view(-1)[:1].view(torch.uint8)[0] ^= 1
    assert _capture(module, optimizer).digest() != before


def test_large_tensors_are_copied_in_parts_and_each_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "_SLICE_BYTES", 100)
    tensors = {"rows": torch.randn(20, 5), "strided": torch.randn(5, 20).T, "flat": torch.randn(1, 100)}
    told: list[int] = []
    state = StageState.capture(0, tensors, {"scalar": torch.tensor(1.0)}, progressed=lambda: told.append(0))
    assert len(told) == 4 + 4 + 1 + 1
    for name, tensor in tensors.items():
        assert torch.equal(state.parameters[name], tensor) and state.parameters[name].is_contiguous()


def test_any_dtype_and_shape_survives() -> None:
    tensors = {
        str(dtype): torch.arange(6).view(2, 3).to(dtype)
        for dtype in (torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "strided": torch.randn(4, 6).T[::2]}
    state = _over_the_wire(StageState.capture(0, {}, tensors))
    assert state.buffers.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert state.buffers[name].dtype == tensor.dtype
        assert torch.equal(state.buffers[name], tensor)


@pytest.mark.parametrize("number", range(12))
def test_every_damaged_tensor_is_refused_by_name(number: int) -> None:
    module = _net()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    _train(module, optimizer, range(2))
    header, tensors = _capture(module, optimizer).to_wire()
    tensors = [tensor.clone() for tensor in tensors]
    tensors[number].view(-1)[-1:].view(torch.uint8)[0] ^= 64
    with pytest.raises(StateRejected, match=r"(Parameter '|Buffer '|The optimizer's 'momentum_buffer' of ').*checksum"):
        StageState.from_wire(header, tensors)


def _without(header: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in header.items() if name != key}


def test_malformed_headers_are_refused() -> None:
    module = _net()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    _train(module, optimizer, range(2))
    header, tensors = _capture(module, optimizer).to_wire()
    bad: list[tuple[dict[str, Any], list[Tensor]]] = [
        *((_without(header, key), tensors) for key in header),
        ({**header, "version": "3"}, tensors),
        ({**header, "parameters": {**header["parameters"], "0.weight": 5}}, tensors),
        ({**header, "buffers": [1, 2]}, tensors),
        ({**header, "optimizer": {"0.weight": 4}}, tensors),
        ({**header, "optimizer": {"0.weight": {"a": [1]}}}, tensors),
        ({**header, "numbers": {"a": b"b"}}, tensors),
        (header, tensors[:-1]),
        (header, [*tensors, torch.zeros(1)]),
        (header, tensors[::-1]),
        ({**header, "parameters": dict.fromkeys(header["parameters"], b"")}, tensors),
    ]
    for changed, sent in bad:
        with pytest.raises(StateRejected):
            StageState.from_wire(changed, sent)


def _rename(state: StageState) -> None:
    state.parameters["renamed"] = state.parameters.pop("0.bias")


def _grow(state: StageState) -> None:
    state.parameters["2.bias"] = torch.zeros(4)


def _cast(state: StageState) -> None:
    state.buffers["1.running_var"] = state.buffers["1.running_var"].double()


def _spoil(state: StageState) -> None:
    state.parameters["2.bias"][1] = math.inf


def _spoil_optimizer(state: StageState) -> None:
    state.optimizer["2.bias"]["momentum_buffer"][0] = math.nan  # type: ignore[index]


def _foreign_optimizer(state: StageState) -> None:
    state.optimizer["stranger"] = {"momentum_buffer": torch.zeros(3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_rename, r"parameters missing: \['0.bias'\], unknown: \['renamed'\]"),
        (_grow, r"parameter '2.bias' is torch.float32 of shape \(4,\) in the state, here it is .* of shape \(3,\)"),
        (_cast, "buffer '1.running_var' is torch.float64"),
        (_spoil, "'2.bias' has values that are not finite"),
        (_spoil_optimizer, "'momentum_buffer' of '2.bias' has values that are not numbers"),
        (_foreign_optimizer, "optimizer state of 'stranger', which SGD does not train"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(change: Callable[[StageState], None], message: str) -> None:
    donor, joiner = _net(0), _net(1)
    optimizers = [OPTIMIZERS["sgd"](module.parameters()) for module in (donor, joiner)]
    _train(donor, optimizers[0], range(2))
    _train(joiner, optimizers[1], range(2))
    state, before = _capture(donor, optimizers[0]), _capture(joiner, optimizers[1]).digest()
    change(state)
    with pytest.raises(StateRejected, match=message):
        _load(state, joiner, optimizers[1])
    assert _capture(joiner, optimizers[1]).digest() == before


def test_infinite_buffers_are_no_damage() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.full((2,), -math.inf))
    state = _over_the_wire(_capture(module, None))
    _load(state, module, None)


def test_load_keeps_identity_strides_and_requires_grad_of_parameters() -> None:
    donor, joiner = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    weight, stride = joiner.weight, joiner.weight.stride()
    _load(_over_the_wire(_capture(donor, None)), joiner, None)
    assert joiner.weight is weight and weight.stride() == stride and weight.requires_grad
    assert torch.equal(weight, donor.weight)


def test_optimizer_that_keeps_more_than_tensors_and_numbers_is_named() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight]["history"] = [torch.zeros(2)]
    with pytest.raises(MisconfigurationException, match="SGD keeps a list as 'history' of 'weight'"):
        _capture(module, optimizer)


def test_optimizer_over_foreign_parameters_is_refused() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[other.weight]["momentum_buffer"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="not among"):
        _capture(module, optimizer)
