"""An output that was evicted is made again bit for bit, and nothing else changes."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.slicing.ghost import buffer_entries
from lightning_swarm.slicing.plan import make_plan
from lightning_swarm.swarm.calls import Assignment, Context, Task
from lightning_swarm.swarm.errors import Evicted
from lightning_swarm.swarm.outbox import Outbox
from lightning_swarm.swarm.tree import encode_tree
from lightning_swarm.worker.executor import Executor
from lightning_swarm.worker.stage_server import StageServer
from tests.models import Regressor

CUTS = ["net.3", "net.6"]


def make() -> Regressor:
    """Three stages with everything that a repetition could disturb: running buffers, dropout, logs."""
    parts = [[nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)] for _ in range(3)]
    return Regressor(nn.Sequential(*(layer for part in parts for layer in part)))


class Stages:
    """All stages of a module, each with a compute thread and an outbox from which its neighbours fetch."""

    def __init__(self, reproducible: bool) -> None:
        torch.manual_seed(3)
        self.batch = (torch.randn(6, 4), torch.randn(6, 4))
        module = make()
        self.plan = make_plan(module, self.batch, CUTS)
        weights = module.state_dict()
        self.executors = [Executor() for _ in range(3)]
        self.outboxes = [Outbox(limit_bytes=0) for _ in range(3)]
        self.servers = []
        for index in range(3):
            assignment = Assignment(0, self.plan.to_dict(), 1, index, 0, (), "none", "none", reproducible)
            own = make()
            own.load_state_dict(weights)
            server = StageServer(
                own,
                assignment,
                torch.device("cpu"),
                self.executors[index],
                self.outboxes[index],
                self._fetch,
                lambda context: None,
                lambda kind: contextlib.nullcontext(),
            )
            server.arrive(0)
            self.servers.append(server)

    async def _fetch(self, peer: str, key: str, deadline_s: float) -> tuple[list[Tensor], float]:
        _, tensors = await self.outboxes[int(peer)].answer_fetch("", {"key": key}, [])
        return [tensor.clone() for tensor in tensors], 0.0

    def task(self, stage: int, microbatch: int) -> tuple[Task, list[Tensor]]:
        batch, tensors = encode_tree(self.batch)
        task = Task(
            session=0,
            plan_version=1,
            step=0,
            microbatch=f"0:{microbatch}",
            order=microbatch,
            first=0,
            samples=6,
            kind="training_step",
            stage=stage,
            input_peer=str(stage - 1) if stage > 0 else None,
            gradient_peer=str(stage + 1) if stage < 2 else None,
            seed=microbatch,
            scale=0.5,
            batch=batch,
            step_args=(0,),
            context=Context(0, 0, "train", (), {}).to_dict(),
            signature=None,
            deadline_s=10.0,
        )
        return task, tensors

    async def run(self, microbatches: int) -> None:
        tasks = [self.task(stage, microbatch) for microbatch in range(microbatches) for stage in range(3)]
        await asyncio.gather(*(self.servers[task.stage].process(task, tensors) for task, tensors in tasks))

    async def remake(self, stage: int, microbatch: int, output: str) -> None:
        """As the trainer does it."""
        task, tensors = self.task(stage, microbatch)
        while True:
            try:
                await self.servers[stage].process(replace(task, remake=output), tensors)  # type: ignore[arg-type]
                return
            except Evicted as evicted:
                kind, of_stage = str(evicted).split("/")[1][:2]
                source = int(of_stage) - 1 if kind == "a" else int(of_stage)
                await self.remake(source, microbatch, "activation" if kind == "a" else "gradient")

    def everything(self) -> dict[str, Tensor]:
        """What a repetition must not change."""
        found = {}
        for server in self.servers:
            names = list(server.owned_names())
            found[f"{server.index}.gradients"] = server.accumulator.flat(names)[0]
            found[f"{server.index}.samples"] = torch.tensor(server._samples)
            buffers = {name: entry.tensor for name, entry in buffer_entries(server.stage.module).items()}
            found.update({f"{server.index}.{name}": value.clone() for name, value in buffers.items()})
        return found


@pytest.fixture(params=[True, False], ids=["float64 sums", "autograd's sums"])
def stages(request: pytest.FixtureRequest) -> Iterator[Stages]:
    stages = Stages(request.param)
    threads = [threading.Thread(target=executor.run, daemon=True) for executor in stages.executors]
    for thread in threads:
        thread.start()
    yield stages
    for executor in stages.executors:
        executor.stop()


@pytest.mark.parametrize(("stage", "output"), [(0, "activation"), (1, "activation"), (1, "gradient"), (2, "gradient")])
def test_an_evicted_output_is_made_again_from_its_sources_and_counts_nowhere(
    stages: Stages, stage: int, output: str
) -> None:
    key = f"0:1/a{stage + 1}" if output == "activation" else f"0:1/g{stage}"

    async def scenario() -> None:
        kept = asyncio.create_task(stages.outboxes[stage].get(key))
        await stages.run(3)
        first = (await kept).tensors
        assert not any(map(len, stages.outboxes)), "all was fetched"
        before = stages.everything()
        await stages.remake(stage, 1, output)
        again = (await stages.outboxes[stage].get(key, 0)).tensors
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        after = stages.everything()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert stages.servers[stage].accumulator.accumulated == {"0:0", "0:1", "0:2"}
        assert "log" in vars(stages.servers[stage].stage.module), "the recorder is still there"

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_an_activation_whose_backward_pass_is_to_come_is_not_computed_again(stages: Stages) -> None:
    async def scenario() -> None:
        task, tensors = stages.task(0, 0)
        running = asyncio.create_task(stages.servers[0].process(task, tensors))
        first = (await stages.outboxes[0].get("0:0/a1", 10)).tensors
        stages.outboxes[0].release("0:0/a1")
        await stages.remake(0, 0, "activation")
        again = (await stages.outboxes[0].get("0:0/a1", 0)).tensors
        assert first[0].data_ptr() == again[0].data_ptr() and not running.done()
        others = (stages.servers[stage].process(*stages.task(stage, 0)) for stage in (1, 2))
        await asyncio.gather(running, *others)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_what_nobody_waits_for_is_not_kept(stages: Stages) -> None:
    """As where a stage repeats what a dead worker had accumulated, whose neighbours have its outputs already."""

    async def scenario() -> None:
        await stages.run(1)
        await stages.remake(0, 0, "activation")
        await stages.remake(2, 0, "gradient")
        await stages.remake(0, 0, "activation")
        successor = stages.servers[1]
        successor.accumulator.reset()
        successor._progress.clear()
        task, tensors = stages.task(1, 0)
        await successor.process(replace(task, gradient_wanted=False), tensors)
        assert successor.accumulator.accumulated == {"0:0"}
        assert not any(map(len, stages.outboxes))

    asyncio.run(asyncio.wait_for(scenario(), 30))
