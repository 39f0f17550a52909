"""What a stage gives for one microbatch, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class StageOutput:
    """The outcome of `Stage.run`.

    Args:
        result: What the step returned, on the last stage; None on the others.
        tensors: What crosses to the next stage, attached to the graph; empty on the last stage.
        inputs: The received tensors as autograd saw them.
        wants: For each input, whether a gradient goes back for it.

    """

    result: Any
    tensors: list[Tensor]
    inputs: list[Tensor]
    wants: tuple[bool, ...]

    def backward(self, gradients_or_scale: Sequence[Tensor | None] | float | Tensor = 1.0) -> list[Tensor | None]:
        """Runs the backward pass of this stage.

        Args:
            gradients_or_scale: The gradients of ``tensors`` in their order; on the last stage the number by which the
                loss is multiplied.

        Returns:
            A gradient for each input that wants one, zeros where none arrived, and None for the others.

        """
        if isinstance(gradients_or_scale, (int, float, Tensor)):
            loss = self.loss()
            if loss is not None and loss.requires_grad:
                scaled = loss * gradients_or_scale if gradients_or_scale != 1.0 else loss
                scaled.backward()
        else:
            pairs = [
                (tensor, gradient)
                for tensor, gradient in zip(self.tensors, gradients_or_scale, strict=True)
                if gradient is not None and tensor.requires_grad
            ]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        return [
            (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) if wanted else None
            for leaf, wanted in zip(self.inputs, self.wants, strict=True)
        ]

    def loss(self) -> Tensor | None:
        """The loss among what ``training_step`` returned; None where it skips."""
        value = self.result.get("loss") if isinstance(self.result, Mapping) else self.result
        return value if isinstance(value, Tensor) else None

    def release(self) -> None:
        """Lets go of tensors and graph."""
        self.result = None
        self.tensors = []
        self.inputs = []
        self.wants = ()
