"""What a worker holds while it serves one stage, and what it does with a task.

A microbatch goes through a stage in five moves: fetch the input activation, run the user's step from this stage's split
point to the next one, put the activation into the outbox, fetch its gradient, run the backward pass and put the input's
gradient into the outbox. The last stage has no gradient to fetch and goes backward at once.

What makes a repeated task harmless: every microbatch has one :class:`_Progress`, and the closures that compute look
into it first, on the compute thread, which runs one at a time. A task for a microbatch that is under way takes the
place of the earlier one (its sources may be gone) and goes on where that one was.

A task may also ask for one output alone, which the outbox has evicted: it is made again from its own sources, by the
same computation, of which nothing counts: no gradient, no running buffer, no effect.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.slicing.ghost import buffer_entries, put
from lightning_swarm.slicing.plan import Plan, StepSignature
from lightning_swarm.slicing.stage import GhostLeaf, Stage, StageOutput
from lightning_swarm.swarm.calls import Assignment, Context, Task, TaskReply
from lightning_swarm.swarm.errors import PeerStale, ProtocolError, RemoteError
from lightning_swarm.swarm.outbox import Outbox
from lightning_swarm.swarm.tree import decode_tree, encode_tree
from lightning_swarm.worker.accumulator import Accumulator
from lightning_swarm.worker.checks import check_finite, check_gradients, check_inputs, check_not_nan
from lightning_swarm.worker.executor import Executor, Priority
from lightning_swarm.worker.recorder import Recorded, Recorder
from lightning_swarm.worker.saved import SavedBytes
from lightning_swarm.worker.statistics import averaged_buffers, weighted_buffers

# Values in which NaN is sought on the event loop; more would hold it up.
_CHECKED_AT_ONCE = 1 << 16

Fetch = Callable[[str, str, float], Awaitable[tuple[list[Tensor], float]]]
"""``(peer, key, deadline_s) -> tensors, seconds of the transfer``."""


@dataclass
class _Progress:
    """How far one microbatch has come."""

    output: StageOutput | None = None
    effects: dict[str, Any] = field(default_factory=dict)
    accumulated: bool = False
    compute_s: float = 0.0
    transfers: dict[str, float] = field(default_factory=dict)
    """Seconds that tensors took from other workers."""
    reply: tuple[TaskReply, list[Tensor]] | None = None
    runner: asyncio.Task | None = None


class StageServer:
    """A stage of the user's module, its gradients and its place in the run.

    Args:
        module: The LightningModule of this process.
        assignment: What the trainer wants served.
        device: Where to compute.
        executor: The compute thread.
        outbox: Where results wait for their consumers.
        fetch: Gets tensors from another peer's outbox.
        mirror: Applies a task's :class:`~lightning_swarm.swarm.calls.Context` to module and Lightning trainer.
        step_context: The precision's context manager for a step, by step name.
    """

    def __init__(
        self,
        module: nn.Module,
        assignment: Assignment,
        device: torch.device,
        executor: Executor,
        outbox: Outbox,
        fetch: Fetch,
        mirror: Callable[[Context], None],
        step_context: Callable[[str], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.assignment = assignment
        self.plan = Plan.from_dict(assignment.plan)
        self.index = assignment.stage
        self.last = self.index == len(self.plan.stages) - 1
        self.version: int | None = None
        self.stage = Stage(module, self.plan, self.index, device)
        self.accumulator = Accumulator(self.stage.owned_parameters(), reproducible=assignment.reproducible)
        self.outbox = outbox
        self._executor = executor
        self._fetch = fetch
        self._mirror = mirror
        self._step_context = step_context
        self._device = device
        self._recorder = Recorder(module, lambda: self.stage.active)
        self._progress: dict[str, _Progress] = {}
        self._sources: dict[str, dict[str, list[Tensor]]] = {}
        """Of outputs that are to be made again, by the output's key: what has been fetched for them so far."""
        self._signatures: dict[str, StepSignature] = dict(self.plan.signatures)
        self._evaluated_before = 0
        self._buffers_before = {name: buffer.clone() for name, buffer in self._running_buffers().items()}
        self._samples = 0
        self._run_here: set[str] = set()
        """The step's microbatches that have changed the running buffers."""
        self._held_bytes: int | None = None
        """What one training microbatch keeps for its backward pass, as the first one did."""
        self.forward_s = self.backward_s = self.waiting_s = 0.0
        self.processed = 0

    def stop(self) -> None:
        """Take nothing further that is under way; what is being computed ends."""
        for progress in self._progress.values():
            if progress.runner is not None:
                progress.runner.cancel()

    def close(self) -> None:
        """Leave the module; its parameters stay as they are. On the compute thread, which may be in the module else."""
        self._recorder.close()
        self.stage.close()

    def owned_names(self) -> frozenset[str]:
        """The parameters of the stage."""
        return frozenset(self.plan.stages[self.index].parameters)

    async def process(self, task: Task, tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        """Bring one microbatch through this stage; see the module's docstring.

        Returns:
            The reply's header (``effects`` of the step, as far as the stage speaks) and its tensors.
        """
        if self.version != task.step:
            raise PeerStale(f"this worker is at step {self.version}, the task at step {task.step}")
        if not task.training and task.first > self._evaluated_before:
            over = {f"{task.step}:e{order}" for order in range(self._evaluated_before, task.first)}
            self._forget(over.__contains__)
            self._evaluated_before = task.first
        if task.remake is not None:
            await self._remake(task, tensors)
            return {}, []
        progress = self._progress.setdefault(task.microbatch, _Progress())
        if progress.runner is not None:
            progress.runner.cancel()
        progress.runner = asyncio.current_task()
        duplicate = progress.reply is not None
        try:
            if progress.reply is None:
                progress.reply = await self._advance(progress, task, tensors)
            reply, reply_tensors = progress.reply
            return replace(reply, duplicate=duplicate).to_dict(), reply_tensors
        finally:
            if progress.runner is asyncio.current_task():
                progress.runner = None
            if not task.training and progress.reply is not None:
                progress.output = None

    async def _advance(self, progress: _Progress, task: Task, tensors: list[Tensor]) -> tuple[TaskReply, list[Tensor]]:
        if progress.output is None:
            inputs = await self._fetch_inputs(progress, task)
            await self._executor.do(
                Priority.FORWARD, lambda: self._forward(progress, task, tensors, inputs), order=task.order
            )
        if task.training and not progress.accumulated:
            gradients: list[Tensor | None] | None = None
            if task.gradient_peer is not None:
                gradients = await self._fetch_gradients(progress, task)
            await self._executor.do(
                Priority.BACKWARD, lambda: self._backward(progress, task, gradients), order=task.order
            )
        self.processed += 1
        effects, reply_tensors = encode_tree(progress.effects)
        reply = TaskReply(effects, progress.compute_s, self._held_bytes or 0, progress.transfers, False)
        return reply, reply_tensors

    async def _remake(self, task: Task, tensors: list[Tensor]) -> None:
        """Put an output into the outbox again that it has evicted."""
        activation = task.remake == "activation"
        key = self._activation_key(task) if activation else self._gradient_key(task)
        progress = self._progress.get(task.microbatch)
        at_hand = progress.output.tensors if activation and progress is not None and progress.output is not None else []
        if at_hand:  # The backward pass is still to come.
            await self._executor.do(Priority.FORWARD, lambda: self._offer(key, at_hand), order=task.order)
            return
        # Kept over several tasks: a source that was made again for us is evicted as soon as we have fetched it.
        sources = self._sources.setdefault(key, {})
        fetching = _Progress()
        if "inputs" not in sources:
            sources["inputs"] = await self._fetch_inputs(fetching, task)
        if not activation and not self.last and "gradients" not in sources:
            assert task.gradient_peer is not None
            gradient_key = f"{task.microbatch}/g{self.index + 1}"
            sources["gradients"] = await self._wait(fetching, task, task.gradient_peer, gradient_key, check_finite)
        await self._executor.do(
            Priority.FORWARD if activation else Priority.BACKWARD,
            lambda: self._repeat(task, tensors, sources, key),
            order=task.order,
        )
        self._sources.pop(key, None)

    async def _fetch_inputs(self, progress: _Progress, task: Task) -> list[Tensor]:
        if task.input_peer is None:
            return []
        key = f"{task.microbatch}/a{self.index}"
        inputs = await self._wait(progress, task, task.input_peer, key, check_not_nan)
        check_inputs(inputs, self._signature(task).boundaries[self.index - 1].specs, task.input_peer)
        return inputs

    async def _fetch_gradients(self, progress: _Progress, task: Task) -> list[Tensor | None] | None:
        assert task.gradient_peer is not None and progress.output is not None
        outputs = progress.output.tensors  # Released by an earlier task that was just ahead: then none are needed.
        key = f"{task.microbatch}/g{self.index + 1}"
        received = await self._wait(progress, task, task.gradient_peer, key, check_finite)
        return None if progress.accumulated else check_gradients(received, outputs, task.gradient_peer)

    async def _wait(
        self,
        progress: _Progress,
        task: Task,
        peer: str,
        key: str,
        check: Callable[[Sequence[Tensor], str, str], None],
    ) -> list[Tensor]:
        started = time.perf_counter()
        try:
            tensors, progress.transfers[peer] = await self._fetch(peer, key, task.deadline_s)
        finally:
            self.waiting_s += time.perf_counter() - started
        if not task.allow_nan:
            if sum(tensor.numel() for tensor in tensors) < _CHECKED_AT_ONCE:
                check(tensors, peer, key)
            else:
                await asyncio.to_thread(check, tensors, peer, key)
        return tensors

    def _forward(self, progress: _Progress, task: Task, tensors: list[Tensor], inputs: list[Tensor]) -> None:
        """On the compute thread. The last stage goes on to its backward pass at once."""
        if progress.output is not None:
            return
        started = time.perf_counter()
        if task.training:
            self._run_here.add(task.microbatch)
        unweighed = task.training and self._held_bytes is None
        saved = SavedBytes(self.stage.owned_parameters().values()) if unweighed else None
        with saved or contextlib.nullcontext():
            output, effects = self._run(task, tensors, inputs)
        if saved is not None:
            self._held_bytes = saved.bytes
        if self._signature(task).speaking[self.index]:
            progress.effects = asdict(effects)
        progress.output = output
        if self.last:
            progress.effects["result"] = _to_host(output.result)
        else:
            self._offer(self._activation_key(task), output.tensors)
        elapsed = time.perf_counter() - started
        self.forward_s += elapsed
        progress.compute_s += elapsed
        if task.training:
            self._samples += task.samples
        if self.last and task.training:
            self._backward(progress, task, None)

    def _run(self, task: Task, tensors: list[Tensor], inputs: list[Tensor]) -> tuple[StageOutput, Recorded]:
        """The user's step, as far as this stage goes."""
        context = Context.from_dict(task.context)
        self._mirror(context)
        batch = decode_tree(
            task.batch, tensors, restore=lambda spec: GhostLeaf(tuple(spec[0]), getattr(torch, spec[1]))
        )
        self._recorder.begin(context.attributes)
        try:
            with self._step_context(task.kind), torch.set_grad_enabled(task.training):
                output = self.stage.run(
                    task.kind,
                    _to_device(batch, self._device),
                    task.step_args,
                    self._signature(task),
                    [t.to(self._device, non_blocking=True) for t in inputs],
                    task.seed,
                )
        finally:
            effects = self._recorder.end()
        return output, effects

    def _backward(self, progress: _Progress, task: Task, gradients: list[Tensor | None] | None) -> None:
        """On the compute thread."""
        output = progress.output
        if progress.accumulated or output is None:
            return
        started = time.perf_counter()
        with self.accumulator.counting(task.microbatch):
            input_gradients = self._differentiate(output, task, gradients)
        progress.accumulated = True
        if self.index > 0:
            self._offer_gradients(task, input_gradients)
            if not task.gradient_wanted:
                self.outbox.release(self._gradient_key(task))
        # Its gradient has come, so the stage behind has it; after a repair there may be nobody who fetches it.
        self.outbox.release(self._activation_key(task))
        output.release()
        elapsed = time.perf_counter() - started
        self.backward_s += elapsed
        progress.compute_s += elapsed

    def _differentiate(
        self, output: StageOutput, task: Task, gradients: list[Tensor | None] | None
    ) -> list[Tensor | None]:
        if gradients is not None:
            return output.backward([None if g is None else g.to(self._device) for g in gradients])
        if loss_of(output.result) is not None:
            return output.backward(task.scale)
        return [None] * len(output.inputs)

    def _repeat(self, task: Task, tensors: list[Tensor], sources: dict[str, list[Tensor]], key: str) -> None:
        """On the compute thread: one output again, and no trace of it elsewhere."""
        if key in self.outbox:
            return
        with self._running_buffers_aside():
            output, _ = self._run(task, tensors, sources["inputs"])
        if task.remake == "activation":
            self._offer(key, output.tensors)
            return
        gradients: list[Tensor | None] | None = None
        if "gradients" in sources:
            gradients = check_gradients(sources["gradients"], output.tensors, task.gradient_peer or "")
        with self.accumulator.ignoring():
            self._offer_gradients(task, self._differentiate(output, task, gradients))

    def _activation_key(self, task: Task) -> str:
        return f"{task.microbatch}/a{self.index + 1}"

    def _gradient_key(self, task: Task) -> str:
        return f"{task.microbatch}/g{self.index}"

    def _offer(self, key: str, tensors: Sequence[Tensor]) -> None:
        self.outbox.put(key, [tensor.detach().cpu() for tensor in tensors], evictable=True)

    def _offer_gradients(self, task: Task, gradients: Sequence[Tensor | None]) -> None:
        flags = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.bool)
        self._offer(self._gradient_key(task), [flags, *(gradient for gradient in gradients if gradient is not None)])

    def _signature(self, task: Task) -> StepSignature:
        if task.signature is not None:
            self._signatures[task.kind] = StepSignature.from_dict(task.signature)
        if task.kind not in self._signatures:
            raise ProtocolError(f"the plan says nothing of {task.kind}")
        return self._signatures[task.kind]

    def arrive(self, version: int) -> None:
        """This stage is at a step now: nothing of earlier ones is needed any more. On the compute thread."""
        self.version = version
        self.accumulator.reset()
        self._buffers_before = {name: buffer.clone() for name, buffer in self._running_buffers().items()}
        self._samples = 0
        self._run_here.clear()

    @property
    def strayed(self) -> frozenset[str]:
        """Microbatches that were given to others after they had changed the running buffers here, which cannot be
        undone: there they count twice.
        """
        return frozenset(self._run_here - self.accumulator.accumulated) if self._running_buffers() else frozenset()

    def forget_step(self, step: int) -> None:
        """Let go of what a committed step needed."""
        self._forget(lambda name: name.partition(":")[0] == str(step))
        self._evaluated_before = 0

    def _forget(self, unwanted: Callable[[str], bool]) -> None:
        """Let go of microbatches, by name; of some there is only what was made again."""
        for name in [name for name in self._progress if unwanted(name)]:
            progress = self._progress.pop(name)
            if progress.runner is not None:
                progress.runner.cancel()
        self._sources = {key: kept for key, kept in self._sources.items() if not unwanted(key.partition("/")[0])}
        self.outbox.drop(lambda key: unwanted(str(key).partition("/")[0]))

    def _running_buffers(self) -> dict[str, Tensor]:
        """Buffers that training changes here (BatchNorm's), in a fixed order."""
        signature = self._signatures.get("training_step")
        written = signature.written[self.index] if signature is not None else frozenset()
        buffers = self.stage.owned_buffers()
        return {name: buffers[name] for name in sorted(written) if name in buffers}

    @contextlib.contextmanager
    def _running_buffers_aside(self) -> Iterator[None]:
        """Code inside changes copies. The buffers themselves must not be written to, as graphs of microbatches that are
        under way have saved them.
        """
        entries = buffer_entries(self.stage.module)
        aside = [entries[name] for name in self._running_buffers()]
        for entry in aside:
            put(entry, entry.tensor.clone())
        try:
            yield
        finally:
            for entry in aside:
                put(entry, entry.tensor)

    def buffers_of_version(self) -> dict[str, Tensor]:
        """The stage's buffers as of the beginning of the step: what microbatches have changed since is not agreed
        upon yet.
        """
        return {**self.stage.owned_buffers(), **self._buffers_before}

    def buffer_sums(self) -> Tensor:
        """What this worker adds to the average of the running buffers."""
        return weighted_buffers(self._buffers_before, self._running_buffers(), self._samples)

    def average_buffers(self, sums: Tensor) -> None:
        """Take over the average of all workers. On the compute thread."""
        buffers = self._running_buffers()
        with torch.no_grad():
            for name, value in averaged_buffers(self._buffers_before, sums).items():
                buffers[name].copy_(value)


def loss_of(result: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned; ``None`` where the step skips.

    Raises:
        RemoteError: It returned something else.
    """
    if result is None:
        return None
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise RemoteError(
            "MisconfigurationException",
            "In automatic_optimization, `training_step` must return a Tensor, a dict with key 'loss', or None. "
            f"It returned {type(result).__name__}.",
            "",
        )
    return loss


def _to_device(value: Any, device: torch.device) -> Any:
    from lightning.fabric.utilities import move_data_to_device

    return value if device.type == "cpu" else move_data_to_device(value, device)


def _to_host(value: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, value)
