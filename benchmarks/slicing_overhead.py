"""What slicing costs: the stages of a GPT run in turn in one process, against the whole step.

Every stage runs the user's step from its beginning, over ghosts until its split point; this measures what that adds.
Both sides do the same microbatch, forward and backward, alternating so that a busy machine hits both, and the ratio
is the median of the pairs' ratios.

    python benchmarks/slicing_overhead.py --width 64 --json overhead.json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_swarm.slicing.plan import Plan, make_plan
from lightning_swarm.slicing.stage import Stage, StageOutput, replay_seed

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(width // 32, 1)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.embedding(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Slices:
    """All stages of a plan, and when each reaches its split point."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.signature = plan.signatures["training_step"]
        self.stages = [Stage(copy.deepcopy(module), plan, k, torch.device("cpu")) for k in range(len(plan.stages))]
        self.prefix_s = [0.0] * len(self.stages)
        self._begun = 0.0
        for stage in self.stages[1:]:
            begin = stage.module.get_submodule(stage.plan.cuts[stage.index - 1].module)
            begin.register_forward_pre_hook(self._clock(stage))

    def __call__(self, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        """One microbatch through all stages, forward and backward."""
        outputs: list[StageOutput] = []
        received: list[Tensor] = []
        for stage in self.stages:
            self._begun = time.perf_counter()
            outputs.append(
                stage.run("training_step", batch, (step,), self.signature, received, replay_seed(0, step, 0))
            )
            received = [tensor.detach() for tensor in outputs[-1].tensors]
        gradients = outputs[-1].backward(1.0)
        for output in reversed(outputs[:-1]):
            gradients = output.backward(gradients)
        loss = outputs[-1].result
        for output in outputs:
            output.release()
        return loss

    def _clock(self, stage: Stage) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if stage.active:
                self.prefix_s[stage.index] = time.perf_counter() - self._begun

        return hook


def measure(width: int, layers: int, length: int, samples: int, stages: int, pairs: int) -> dict[str, object]:
    """Times pairs of whole step and slices."""
    torch.manual_seed(0)
    module = GPT(width, layers, length)
    batch = torch.randint(0, VOCABULARY, (samples, length)), torch.randint(0, VOCABULARY, (samples, length))
    plan = make_plan(module, batch, stages)
    print(plan, end="\n\n")
    slices = Slices(module, plan)
    whole_s, slices_s = [], []
    prefix_s: list[list[float]] = []
    for pair in range(pairs + 2):
        for parameter in module.parameters():
            parameter.grad = None
        begun = time.perf_counter()
        loss = module.training_step(batch, pair)
        loss.backward()
        halfway = time.perf_counter()
        for stage in slices.stages:
            for parameter in stage.owned_parameters().values():
                parameter.grad = None
        resumed = time.perf_counter()
        other = slices(batch, pair)
        ended = time.perf_counter()
        assert torch.equal(loss, other)
        if pair >= 2:  # the first ones learn
            whole_s.append(halfway - begun)
            slices_s.append(ended - resumed)
            prefix_s.append(list(slices.prefix_s))
    return {
        "width": width,
        "layers": layers,
        "tokens": length,
        "microbatch": samples,
        "stages": stages,
        "whole_ms": 1e3 * statistics.median(whole_s),
        "slices_ms": 1e3 * statistics.median(slices_s),
        "ratio": statistics.median(s / w for s, w in zip(slices_s, whole_s, strict=True)),
        "prefix_ms": [1e3 * statistics.median(column) for column in zip(*prefix_s, strict=True)],
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[384], help="widths to measure (default: 384)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=15, help="how often each side is timed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(width, options.layers, options.tokens, options.microbatch, options.stages, options.pairs)
        for width in options.width
    ]
    print(f"{'width':>5}  {'whole step':>10}  {'slices':>10}  {'ratio':>5}  until split point, by stage")
    for row in rows:
        prefixes = ", ".join(f"{value:.2f}" for value in row["prefix_ms"])  # type: ignore[attr-defined]
        print(
            f"{row['width']:>5}  {row['whole_ms']:>7.1f} ms  {row['slices_ms']:>7.1f} ms  {row['ratio']:>5.3f}  "
            f"{prefixes} ms"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
