"""What a microbatch costs in memory."""

import torch
from torch import nn

from lightning_swarm.worker.saved import SavedBytes


def test_parameters_do_not_count_and_shared_memory_counts_once() -> None:
    layer = nn.Linear(8, 4)
    saved = SavedBytes(layer.parameters())
    x = torch.ones(16, 8)
    with saved:
        hidden = layer(x)
        loss = (hidden.exp() * hidden).sum()
    # The input, the hidden values and their exponentials; the product saves the latter two again.
    assert saved.bytes == 4 * 16 * (8 + 4 + 4)
    loss.backward()
    assert layer.weight.grad is not None


def test_gradients_are_those_without_counting() -> None:
    def gradient(saved: SavedBytes | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if saved is None:
            loss = model(torch.ones(2, 4)).square().sum()
        else:
            with saved:
                loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad

    assert torch.equal(gradient(None), gradient(SavedBytes()))
