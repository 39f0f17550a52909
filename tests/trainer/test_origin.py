"""The trainer's copy of the model, which may be on its way to a worker when a newer one arrives."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.trainer.origin import Origin
from lightning_swarm.worker.state import StageState
from tests.models import Regressor


def test_a_state_that_is_handed_over_stays_as_it_is_while_the_copy_becomes_a_newer_one() -> None:
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module = Regressor(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), convolution))
    origin = Origin(module, None, version=0)
    origin.optimizer_state = {"net.0.weight": {"momentum": torch.zeros(3, 2)}}
    held = {name: value.clone() for name, value in module.state_dict().items()}
    stage = SimpleNamespace(
        parameters=tuple(name for name, _ in module.named_parameters()),
        buffers=tuple(name for name, _ in module.named_buffers()),
    )
    plan: Any = SimpleNamespace(stages=[stage])
    given = origin.stage_state(plan, 0)
    digest = given.digest()

    def newer(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: (value + 1).contiguous() for name, value in values.items()}

    momentum: dict[str, Any] = {"net.0.weight": {"momentum": torch.ones(3, 2)}}
    origin.update([StageState(5, newer(given.parameters), newer(given.buffers), momentum)])
    assert given.digest() == digest and origin.version == 5
    assert all(torch.equal(value, held[name] + 1) for name, value in module.state_dict().items())
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert origin.stage_state(plan, 0).optimizer == momentum
