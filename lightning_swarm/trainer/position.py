"""Where Lightning stood at the beginning of a step, and what the step's batches gave: bytes that go to the workers with
the step's commit, and that only a trainer looks into.

A worker that holds the weights of step ``t + 1`` has them from the commit of step ``t``. So a trainer that is started
again finds the weights and what it takes to bring Lightning there, or neither: it sets Lightning to the beginning of
step ``t`` and lets it go through that step once more, with what the batches gave then instead of computing, and without
a commit.
"""

import io
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from lightning_swarm.swarm.tree import decode_tree, encode_tree

_LARGE_BYTES = 1 << 16
_MOST_BYTES = 8 << 20
"""Of a record: it goes to every worker in the header of each commit."""

Effects = list[list[dict[str, Any]]]
"""Of one batch, by microbatch and stage; see ``worker/recorder.py``."""


@dataclass(frozen=True)
class StepRecord:
    """See the module's docstring; empty where nobody asked for it."""

    position: bytes = b""
    effects: tuple[bytes, ...] = ()
    """By batch."""

    @property
    def travels(self) -> bool:
        """Whether it is small enough to go to the workers."""
        return len(self.position) + sum(map(len, self.effects)) <= _MOST_BYTES


def pack(value: Any) -> bytes:
    """Anything that ``torch.save`` takes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return zlib.compress(buffer.getbuffer(), level=1)


def unpack(packed: bytes, *, weights_only: bool = True) -> Any:
    """What was packed.

    Raises:
        pickle.UnpicklingError: With ``weights_only``, it holds more than tensors and plain values.
    """
    return torch.load(io.BytesIO(zlib.decompress(packed)), weights_only=weights_only)


def pack_effects(effects: Effects) -> bytes:
    """The effects of a batch, for a trainer that replays them.

    What a step returns besides its loss is left out where it is large: only callbacks see it.
    """
    header, tensors = encode_tree(effects)
    if sum(tensor.nbytes for tensor in tensors) > _LARGE_BYTES:
        header, tensors = encode_tree([[_loss_alone(of_stage) for of_stage in stages] for stages in effects])
    # Copies: what came over the network is a view of all that came with it.
    return pack((header, [tensor.clone() for tensor in tensors]))


def unpack_effects(packed: bytes) -> Effects:
    """The effects that were packed."""
    effects: Effects = decode_tree(*unpack(packed))
    return effects


def _loss_alone(effects: dict[str, Any]) -> dict[str, Any]:
    result = effects.get("result")
    return {**effects, "result": {"loss": result["loss"]}} if isinstance(result, dict) else effects
