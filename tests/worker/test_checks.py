"""What another worker must not send."""

import pytest
import torch

from lightning_swarm.slicing.points import LeafSpec
from lightning_swarm.swarm.errors import NotFinite, ProtocolError, SourceFailed, pack_error, unpack_error
from lightning_swarm.worker.checks import check_finite, check_gradients, check_inputs, check_not_nan, has_nan

SPECS = [LeafSpec.of(torch.zeros(4, 3)), LeafSpec.of(torch.zeros(4, dtype=torch.long))]
OUTPUTS = [torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, dtype=torch.float64)]


def flags(*marked: bool) -> torch.Tensor:
    return torch.tensor(marked)


def test_an_activation_may_have_another_batch_size_but_nothing_else() -> None:
    good = [torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)]
    check_inputs(good, SPECS, "a")
    for bad in (good[:1], [*good, good[0]], [good[0].double(), good[1]], [good[0][None], good[1]], []):
        with pytest.raises(ProtocolError) as caught:
            check_inputs(bad, SPECS, "a")
        assert caught.value.peer == "a"


def test_gradients_are_exactly_like_the_outputs_that_they_are_of() -> None:
    first, _, last = OUTPUTS
    gradients = check_gradients([flags(True, False, True), first, last], OUTPUTS, "a")
    assert gradients[0] is first and gradients[1] is None and gradients[2] is last
    for bad in (
        [],
        [flags(True, False), first],
        [flags(True, False, False).int(), first],
        [flags(True, False, False)],
        [flags(True, False, False), first, last],
        [flags(True, False, False), first[:1]],
        [flags(True, False, False), first.half()],
    ):
        with pytest.raises(ProtocolError) as caught:
            check_gradients(bad, OUTPUTS, "a")
        assert caught.value.peer == "a"


def test_nan_is_blamed_and_infinities_are_not() -> None:
    infinite = torch.tensor([torch.inf, -torch.inf, 1.0])
    check_not_nan([infinite, torch.tensor([1]), torch.tensor([True]), torch.zeros(0)], "a", "0:0/a1")
    assert not has_nan(infinite) and has_nan(torch.tensor([1.0, torch.nan], dtype=torch.bfloat16))
    with pytest.raises(NotFinite) as caught:
        check_not_nan([torch.zeros(3), torch.tensor([torch.nan])], "a", "0:0/a1")
    crossed = unpack_error(pack_error(caught.value, "trainer"), "b")
    assert isinstance(crossed, SourceFailed) and (crossed.peer, crossed.cause) == ("a", "NotFinite")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_gradients_must_be_finite(value: float) -> None:
    large = torch.full((4,), 3e38)  # Their sum is not.
    check_finite([large, torch.tensor([1]), torch.tensor([True]), torch.zeros(0)], "a", "0:0/g1")
    with pytest.raises(NotFinite) as caught:
        check_finite([large, torch.tensor([1.0, value])], "a", "0:0/g1")
    assert caught.value.peer == "a"
