"""A worker takes part in nothing but the step, plan and session that it serves, and does not move for anything else."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_swarm.swarm.calls import CommitRequest, Group, GroupMember, ProbeRequest, ReduceRequest, StateRequest
from lightning_swarm.swarm.errors import PeerStale
from lightning_swarm.swarm.messages import Message
from lightning_swarm.swarm.tree import encode_tree
from lightning_swarm.worker import executor
from lightning_swarm.worker.executor import Executor, Priority
from lightning_swarm.worker.service import WorkerService
from tests.worker.test_stage_server import Stages, stages

__all__ = ["stages"]  # A fixture.

ME = "me"


class Served:
    """Stage 0 as a worker serves it, with one microbatch accumulated in step 0."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.server = stages.servers[0]
        self.optimizer = torch.optim.SGD(self.server.stage.owned_parameters().values(), lr=0.1)
        self.service = WorkerService(SimpleNamespace(peer_id=ME), stages.executors[0])  # type: ignore[arg-type]
        self.service.begin(self.server, self.optimizer)
        names = tuple(sorted(self.server.owned_names()))
        self.group = Group("stage0", names, (GroupMember(ME, 1.0, True),))

    def parameters(self) -> nn.ParameterDict:
        return {name: p.detach().clone() for name, p in self.server.stage.owned_parameters().items()}

    def valid(self, call: str) -> Message:
        """The message that is of the step, plan and session."""
        if call == "process":
            return self.stages.task(0, 1)[0]
        if call == "reduce":
            return ReduceRequest(0, 0, 0, (self.group,), ("0:0",), 10.0)
        if call == "commit":
            return CommitRequest(0, 0, {"stage0": 0}, (encode_tree({"lr": 0.1})[0],), 1.0, None, ())
        return StateRequest(0, 1, 0)

    async def send(self, call: str, message: Message) -> Any:
        handler: Callable[..., Any] = self.service.handlers()[call]
        answer = handler("trainer", message.to_dict(), self.stages.task(0, 1)[1] if call == "process" else [])
        if call != "state":
            return await answer
        # It is given for as long as it is asked for.
        giving = asyncio.ensure_future(answer)
        first = asyncio.ensure_future(self.service.outbox.get("parts/state/trainer//0"))
        await asyncio.wait({giving, first}, return_when=asyncio.FIRST_COMPLETED)
        if giving.done():
            first.cancel()
            return giving.result()
        giving.cancel()
        return first.result().header["header"], []


def until(condition: Callable[[], bool]) -> None:
    """Wait on a thread for something that happens on another one."""
    while not condition():
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("call", "changed", "why"),
    [
        ("process", {"session": 1}, "serves no stage in session 1"),
        ("process", {"plan_version": 2}, "the task is for stage 0"),
        ("process", {"stage": 1}, "the task is for stage 1"),
        ("process", {"step": 1}, "at step 0, the task at step 1"),
        ("reduce", {"session": 1}, "serves no stage in session 1"),
        ("reduce", {"step": 1}, "at step 0, not 1"),
        ("reduce", {"expected": ()}, r"0 microbatches of step 0, it has accumulated 1; different: \['0:0'\]"),
        ("reduce", {"expected": ("0:0", "0:1")}, r"2 microbatches of step 0, it has .* 1; different: \['0:1'\]"),
        ("reduce", {"expected": ("0:1",)}, r"1 microbatches of step 0, it has .* 1; different: \['0:0', '0:1'\]"),
        ("commit", {"session": 1}, "serves no stage in session 1"),
        ("commit", {"step": 1}, "has not reduced all of its gradients of step 1"),
        ("commit", {"attempts": {"stage0": 1}}, "has not reduced all of its gradients of step 0"),
        ("commit", {"attempts": {}}, "has not reduced all of its gradients of step 0"),
        ("state", {"session": 1}, "serves no stage in session 1"),
        ("state", {"plan_version": 2}, "holds no state of stage 0"),
        ("state", {"stage": 1}, "holds no state of stage 1"),
    ],
)
def test_what_is_of_another_step_plan_or_session_is_refused_and_changes_nothing(
    stages: Stages, call: str, changed: dict[str, Any], why: str
) -> None:
    async def scenario() -> None:
        await stages.run(1)
        served = Served(stages)
        before = served.parameters()
        if call == "commit":
            await served.send("reduce", served.valid("reduce"))
        with pytest.raises(PeerStale, match=why):
            await served.send(call, replace(served.valid(call), **changed))
        assert served.server.version == 0 and served.server.accumulator.accumulated == {"0:0"}
        assert all(torch.equal(value, before[name]) for name, value in served.parameters().items())
        # What is of this step is answered still, and the step can be made.
        assert "parameters" in (await served.send("state", served.valid("state")))[0]
        assert (await served.send("reduce", served.valid("reduce")))[0]["squared_norms"]
        for _ in range(2):  # One that is repeated finds its work done.
            await served.send("commit", served.valid("commit"))
        assert served.server.version == 1 and not served.server.accumulator.accumulated
        assert not all(torch.equal(value, before[name]) for name, value in served.parameters().items())

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_state_is_given_although_its_giver_leaves_the_stage_meanwhile(stages: Stages) -> None:
    async def scenario() -> None:
        served = Served(stages)
        key = "parts/state/caller//0"
        giving = asyncio.ensure_future(served.service.state("caller", served.valid("state").to_dict(), []))
        await served.service.outbox.get(key, timeout_s=10)
        served.service.end()
        assert served.service.outbox.keys() == [key]
        giving.cancel()
        await asyncio.wait({giving})
        assert not len(served.service.outbox)

    asyncio.run(asyncio.wait_for(scenario(), 30))


class Clock:
    """Stands where the compute thread reads the time; every part of a copy takes a second and a half."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.mark.parametrize("doing", ["giving", "taking"])
def test_a_worker_that_copies_its_state_for_long_does_not_seem_to_hang(
    stages: Stages, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, computing_s = Clock(), []
    monkeypatch.setattr(executor, "time", clock)

    async def scenario() -> None:
        served = Served(stages)
        state = await served.stages.executors[0].do(
            Priority.COMMIT, lambda: served.service._capture(served.server, copy=True)
        )
        progressed = Executor.progressed

        def watched(running: Executor) -> None:
            clock.now_s += 1.5
            computing_s.append(running.computing_s())
            progressed(running)

        monkeypatch.setattr(Executor, "progressed", watched)
        await (served.send("state", served.valid("state")) if doing == "giving" else served.service.load(state))

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert len(computing_s) > 4 and set(computing_s) == {1.5}


def test_a_sum_is_of_no_use_after_another_microbatch(stages: Stages) -> None:
    """It lacks that one's gradients, so a commit with it would lose them."""

    async def scenario() -> None:
        await stages.run(1)
        served = Served(stages)
        await served.send("reduce", served.valid("reduce"))
        with served.server.accumulator.counting("0:1"):
            pass
        with pytest.raises(PeerStale, match="has not reduced all of its gradients of step 0"):
            await served.send("commit", served.valid("commit"))
        assert served.server.version == 0

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_microbatch_that_others_have_accumulated_must_not_stay_in_the_running_buffers(stages: Stages) -> None:
    async def scenario() -> None:
        await stages.run(1)
        served = Served(stages)
        task, tensors = stages.task(0, 1)
        strays = asyncio.ensure_future(served.server.process(task, tensors))
        await stages.outboxes[0].get("0:1/a1")
        strays.cancel()  # It is given to another worker, as this one cannot reach the stage behind.
        with pytest.raises(PeerStale, match=r"running buffers have seen \['0:1'\]"):
            await served.send("reduce", served.valid("reduce"))

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_what_failed_attempts_and_repetitions_have_left_goes(stages: Stages) -> None:
    async def scenario() -> None:
        await stages.run(1)
        served = Served(stages)
        outbox = served.service.outbox
        for key in ("reduce/0/0/stage0/me/1", "reduce/0/0/stage0+1/me/1", "reduce/0/1/stage0/me/1", "1:0/a1", "0:7/a1"):
            outbox.put(key, [torch.ones(1)])
        await served.send("reduce", replace(served.valid("reduce"), attempt=1))
        assert outbox.keys() == ["reduce/0/0/stage0+1/me/1", "reduce/0/1/stage0/me/1", "1:0/a1", "0:7/a1"]
        stages.outboxes[0].put("0:7/a1", [torch.ones(1)])  # Made again for a neighbour, without having been done here.
        await served.send("commit", replace(served.valid("commit"), attempts={"stage0": 1}))
        assert outbox.keys() == ["1:0/a1", "0:7/a1"]
        kept = stages.outboxes[0].keys()
        assert not [key for key in kept if str(key).startswith("0:")]

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("begun", [True, False], ids=["in the optimizer", "waiting for the compute thread"])
def test_a_commit_that_has_come_is_made_even_if_the_trainer_dies(stages: Stages, begun: bool) -> None:
    """Else the worker would be at the next step without being able to say so, or have lost the sums of this one."""

    async def scenario() -> None:
        await stages.run(1)
        served = Served(stages)
        await served.send("reduce", served.valid("reduce"))
        reached, go_on = threading.Event(), threading.Event()

        def occupy(*args: Any) -> None:
            reached.set()
            assert go_on.wait(20)

        if begun:
            served.optimizer.register_step_pre_hook(occupy)
        else:
            occupied = asyncio.ensure_future(stages.executors[0].do(Priority.COMMIT, occupy))
        commit = asyncio.ensure_future(served.send("commit", served.valid("commit")))
        await asyncio.to_thread(reached.wait, 20)
        if not begun:
            await asyncio.to_thread(until, lambda: stages.executors[0].queued == 1)
        commit.cancel()  # As the answering end does when the caller is gone.
        with pytest.raises(asyncio.CancelledError):
            await commit
        held = asyncio.ensure_future(served.service.holding())
        go_on.set()
        holding = await held
        assert holding.step == 1
        assert holding.commit is not None and CommitRequest.from_dict(holding.commit).step == 0
        if not begun:
            await occupied

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_which_gradients_are_absent_is_looked_at_between_microbatches(stages: Stages) -> None:
    """While an output is made again there are none; a sum that said so would leave the optimizer without any."""

    async def scenario() -> None:
        await stages.run(1)
        served, executor = Served(stages), stages.executors[0]
        begin, repeating, go_on = threading.Event(), threading.Event(), threading.Event()

        def repeat() -> None:
            with served.server.accumulator.ignoring():
                repeating.set()
                assert go_on.wait(20)

        occupied = asyncio.ensure_future(executor.do(Priority.COMMIT, begin.wait))
        reduce = asyncio.ensure_future(served.send("reduce", served.valid("reduce")))
        await asyncio.to_thread(until, lambda: executor.computing_s() > 0 and executor.queued == 1)
        repeated = asyncio.ensure_future(executor.do(Priority.BACKWARD, repeat))
        await asyncio.to_thread(until, lambda: executor.queued == 2)
        begin.set()
        assert repeating.wait(20)  # The event loop goes on only now.
        reply, _ = await reduce
        go_on.set()
        await asyncio.gather(occupied, repeated)
        assert not reply["absent"]

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_stage_that_ends_leaves_the_module_only_when_nothing_is_being_computed_there(stages: Stages) -> None:
    """What a forward pass undoes at its end would come over the next stage's wrappers."""

    async def scenario() -> None:
        served, executor = Served(stages), stages.executors[0]
        module = served.server.stage.module
        computing, go_on = threading.Event(), threading.Event()

        def compute() -> bool:
            computing.set()
            assert go_on.wait(20)
            return "log" in vars(module)

        passing = asyncio.ensure_future(executor.do(Priority.FORWARD, compute))
        await asyncio.to_thread(computing.wait, 20)
        served.service.end()
        leaving = asyncio.ensure_future(executor.do(Priority.COMMIT, served.service.leave_module))
        go_on.set()
        assert await passing
        await leaving
        assert "log" not in vars(module)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_reduction_over_slow_links_waits_since_something_came_and_a_microbatch_since_it_was_asked_for(
    stages: Stages,
) -> None:
    """Many chunks share a link, so none of them arrives for long although the link is well."""
    served, now = Served(stages), time.monotonic()
    served.service.node.silent_s = {"slow": 1.0, "dead": 60.0, "new": math.inf}.__getitem__  # type: ignore[method-assign]
    served.service._fetches = {
        0: ("slow", "reduce/0/0/stage0/slow/1", now - 100),
        1: ("dead", "reduce/0/0/stage0/dead/1", now - 100),
        2: ("new", "reduce/0/0/stage0/new/1", now - 30),
        3: ("slow", "0:1/a1", now - 100),
    }

    async def waits(**about: Any) -> dict[str, int]:
        header, _ = await served.service.probe("trainer", ProbeRequest(**about).to_dict(), [])
        return {wait["peer"]: round(wait["seconds"]) for wait in header["waits"]}

    assert asyncio.run(waits()) == {"dead": 60, "new": 30, "slow": 1}
    assert asyncio.run(waits(microbatch="0:1")) == {"slow": 100}
