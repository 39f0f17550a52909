"""Every microbatch of a small or a large swarm: forward, backward, transfers, steps, failures and repairs.

What the real swarm does is done here in simulated time, by the same policy objects:

* The trainer sends a microbatch along a route of :class:`StochasticWiring` and keeps as many in flight as that asks
  for.
* A worker runs one pass at a time: backward passes first, and of each kind the microbatch that was sent off first (in
  order of arrival, deep pipelines lose some 5 % since old microbatches hold places of those in flight). The activation
  goes to the next worker as soon as it exists, its gradient comes back; the last stage runs both passes at once. A
  transfer occupies the sender's uplink for its bytes and arrives a latency later.
* A step is a number of microbatches, then reduction and commit. Moved and joining workers begin to serve between two
  steps.
* When a worker is killed, whatever it was asked for or has accumulated in the step goes to another worker of its
  stage, which fetches the input and the gradient again from the neighbours: nothing else is repeated. When it hangs,
  the deadline finds out.

Not simulated: the bytes of single calls, the DHT, and what the trainer's process costs; ``overhead_s`` stands for the
latter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from lightning_swarm.policies.banning import BanList, Cause
from lightning_swarm.policies.deadlines import Deadlines
from lightning_swarm.policies.rebalancing import Move, RebalancingPolicy, assign_stage
from lightning_swarm.policies.routing import StageEmpty, StochasticWiring
from lightning_swarm.policies.utilization import SwarmLoad, WorkerLoad
from lightning_swarm.simulation.events import EventLoop
from lightning_swarm.simulation.model import Microbatch, SimulatedWorker, SwarmReport, SwarmSettings, Task
from lightning_swarm.simulation.network import Network

__all__ = ["SimulatedWorker", "SwarmReport", "SwarmSettings", "SwarmSimulation"]


class SwarmSimulation:
    """Simulates a swarm; see the module's docstring.

    Args:
        settings: its costs.
        workers: the workers at the start.
        network: the links.
        policy: moves workers; None for nobody.
        seed: of the noise.

    Example:
        >>> swarm = SwarmSimulation(SwarmSettings(2, forward_s=1.0), [SimulatedWorker("a", 0), SimulatedWorker("b", 1)])
        >>> round(swarm.run(3000.0).throughput, 2)
        0.33
    """

    def __init__(
        self,
        settings: SwarmSettings,
        workers: Sequence[SimulatedWorker],
        network: Network | None = None,
        policy: RebalancingPolicy | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = settings
        self.network = network or Network()
        self.policy = policy
        self.loop = EventLoop()
        self.bans = BanList()
        self.deadlines = Deadlines()
        self.workers: dict[str, SimulatedWorker] = {}
        self.moves: list[tuple[float, Move]] = []
        self.finished = self.steps = self.repeated = 0
        self._generator = random.Random(seed)
        self._in_step: dict[Microbatch, None] = {}
        self._number = self._attempt = self._issued = self._in_flight = self._target = self._target_age = 0
        self._arrivals: list[SimulatedWorker] = []
        self._unassigned: list[Task] = []
        self._stop_after: int | None = None
        self._last_reading_s = 0.0
        self.wiring = StochasticWiring(settings.stages, edge_cost=self._edge_cost if settings.near_first else None)
        self._edges: dict[tuple[str, str], float] = {}
        for worker in workers:
            self.workers[worker.name] = worker
            self.wiring.add(worker.stage, worker.name, capacity=worker.capacity)
        if policy is not None:
            self.loop.after(settings.reading_s, self._read_loads)
        self.loop.at(0.0, self._dispatch)

    # What the scenario does to the swarm.

    def kill(self, name: str) -> None:
        """The worker dies now; its connections break, so the trainer knows at once."""
        worker = self.workers.pop(name)
        worker.alive = False
        self.wiring.remove(name)
        self.deadlines.forget(name)
        self.bans.forget(name)
        self._target_age = 0
        for task in list(worker.held):
            self._repair(task)
        worker.held.clear()
        self._dispatch()

    def hang(self, name: str) -> None:
        """The worker answers nothing from now on, its connections stay."""
        worker = self.workers[name]
        worker.hung = True
        for task in worker.held:
            self._watch(task)

    def recover(self, name: str) -> None:
        """The hung worker goes on."""
        worker = self.workers[name]
        worker.hung = False
        self._start(worker)

    def slow(self, name: str, speed: float) -> None:
        """The worker computes at another speed from its next pass on."""
        self.workers[name].speed = speed

    def join(self, name: str, speed: float = 1.0, region: str = "") -> int:
        """A new worker comes; returns the stage whose state it downloads."""
        stage = assign_stage(self.load(), speed=speed)
        worker = SimulatedWorker(name, stage, speed, region, serving=False)
        self.workers[name] = worker
        self.loop.after(self.settings.download_s, self._downloaded, worker)
        return stage

    @property
    def in_flight_target(self) -> int:
        """How many microbatches the trainer keeps in flight at present."""
        if self._target <= 0:
            self._renew_target()
        return self._target

    def load(self) -> SwarmLoad:
        """A reading of all workers, as the trainer publishes it."""
        seconds = self.loop.now - self._last_reading_s
        loads = []
        for worker in self.workers.values():
            known = worker.serving and self.wiring.stage_of(worker.name) is not None
            loads.append(
                WorkerLoad(
                    worker.name,
                    worker.stage,
                    service_s=self.wiring.measured_s(worker.name) if known else None,
                    speed=worker.speed if not known else 1.0,
                    busy_share=min((worker.busy_s - worker.busy_read_s) / seconds, 1.0)
                    if seconds > 0 and known
                    else None,
                    queue_s=(len(worker.forwards) + len(worker.backwards)) * self.wiring.service_s(worker.name)
                    if known
                    else 0.0,
                    moving_to=worker.moving_to,
                    joining=not worker.serving,
                )
            )
        return SwarmLoad(self.settings.stages, tuple(loads))

    # Running.

    def run(self, seconds: float) -> SwarmReport:
        """Go on for so many simulated seconds; the report is on this time only."""
        return self._report(lambda: self.loop.run(self.loop.now + seconds))

    def run_microbatches(self, number: int) -> SwarmReport:
        """Go on until so many more microbatches are done; the report is on these only."""
        self._stop_after = self.finished + number
        report = self._report(self.loop.run)
        self._stop_after = None
        return report

    def _report(self, go: Callable[[], None]) -> SwarmReport:
        start, finished, steps, repeated = self.loop.now, self.finished, self.steps, self.repeated
        moved, events = len(self.moves), self.loop.handled
        before = {name: (worker.busy_s, worker.done) for name, worker in self.workers.items()}
        go()
        seconds = self.loop.now - start
        done = {name: worker.done - before.get(name, (0.0, 0))[1] for name, worker in self.workers.items()}
        by_stage = [0] * self.settings.stages
        for name, worker in self.workers.items():
            by_stage[worker.stage] += done[name]
        return SwarmReport(
            seconds,
            self.finished - finished,
            self.steps - steps,
            self.repeated - repeated,
            tuple(self.moves[moved:]),
            {name: done[name] / max(by_stage[worker.stage], 1) for name, worker in self.workers.items()},
            {name: (worker.busy_s - before.get(name, (0.0, 0))[0]) / seconds for name, worker in self.workers.items()}
            if seconds > 0
            else {},
            self.loop.handled - events,
        )

    # The trainer.

    def _dispatch(self) -> None:
        settings = self.settings
        while settings.microbatches is None or self._issued < settings.microbatches:
            if self._target_age <= 0:
                self._renew_target()
            if self._in_flight >= self._target:
                return
            now = self.loop.now
            try:
                route = self.wiring.route(now, self.bans.banned(now), source=settings.trainer_region)
            except StageEmpty:
                return
            self._target_age -= 1
            self._issued += 1
            self._in_flight += 1
            self._number += 1
            microbatch = Microbatch(self._number, missing=settings.stages)
            self._in_step[microbatch] = None
            for stage, name in enumerate(route):
                task = Task(microbatch, stage, self.workers[name])
                microbatch.tasks.append(task)
                self._ask(task)
            first = microbatch.tasks[0]
            self.loop.after(
                self._latency(settings.trainer_region, first.worker), self._input_arrives, first, first.attempt
            )

    def _renew_target(self) -> None:
        try:
            self._target = self.settings.in_flight or self.wiring.in_flight_target(slack=self.settings.slack)
        except StageEmpty:
            self._target = 0
        self._target_age = max(self._target // 4, 8)

    def _ask(self, task: Task) -> None:
        worker = task.worker
        worker.held[task] = None
        worker.tasks += 1
        task.sent_s = self.loop.now
        self.bans.dispatched(self.loop.now, worker.name)
        if worker.hung:
            self._watch(task)

    def _watch(self, task: Task) -> None:
        """Let the task's deadline pass. Only those of hung workers can pass unanswered, so others are not simulated."""
        wait = self.deadlines.deadline_s(task.worker.name, task.stage, "process")
        self.loop.at(max(task.sent_s, self.loop.now - wait) + wait, self._deadline, task, task.attempt)

    def _deadline(self, task: Task, attempt: int) -> None:
        if task.replied or task.attempt != attempt or not task.worker.alive:
            return
        if not task.worker.hung:
            self._watch(task)
            return
        now, worker = self.loop.now, task.worker
        self.deadlines.timed_out(worker.name, task.stage, "process")
        self.wiring.timed_out(task.stage, worker.name, now - task.sent_s)
        self.bans.report(now, worker.name, Cause.TIMEOUT)
        worker.held.pop(task, None)
        self._repair(task)

    def _repair(self, task: Task) -> None:
        """Give the task to another worker of its stage, which fetches from the neighbours again."""
        if task.microbatch not in self._in_step:
            return
        if task.replied:
            if not task.microbatch.missing:
                self._in_flight += 1
                self.finished -= 1
            task.microbatch.missing += 1
        failed = task.worker
        task.attempt += 1
        task.has_input = task.has_gradient = task.forward_done = task.done = task.replied = False
        task.computed_s = 0.0
        self.repeated += 1
        now = self.loop.now
        tasks, stage = task.microbatch.tasks, task.stage
        before = tasks[stage - 1].worker if stage else None
        after = tasks[stage + 1].worker if stage + 1 < len(tasks) else None
        try:
            name = self.wiring.pick(
                stage,
                now,
                banned=self.bans.banned(now),
                exclude=(failed.name,) if len(self.wiring.peers(stage)) > 1 else (),
                previous=before.name if before is not None else None,
                following=after.name if after is not None else None,
            )
        except StageEmpty:
            self._unassigned.append(task)
            return
        task.worker = self.workers[name]
        self._ask(task)
        if before is None:
            delay = self._latency(self.settings.trainer_region, task.worker)
            self.loop.after(delay, self._input_arrives, task, task.attempt)
        elif tasks[stage - 1].forward_done:
            self._send(before, task, self._input_arrives)
        if after is not None and tasks[stage + 1].done:
            self._send(after, task, self._gradient_arrives)

    def _reply(self, task: Task, attempt: int) -> None:
        if task.attempt != attempt or task.replied:
            return
        now, worker, microbatch = self.loop.now, task.worker, task.microbatch
        task.replied = True
        worker.done += 1
        self.wiring.complete(task.stage, worker.name, task.computed_s, now=now)
        self.deadlines.completed(worker.name, task.stage, "process", now - task.sent_s)
        self.bans.succeeded(now, worker.name)
        microbatch.missing -= 1
        if microbatch.missing:
            return
        self._in_flight -= 1
        self.finished += 1
        if self.settings.microbatches is None:
            self._forget(microbatch)
        elif self._issued == self.settings.microbatches and self._in_flight == 0:
            self._attempt += 1
            self.loop.after(self.settings.sync_s, self._commit, self._attempt)
        if self.finished == self._stop_after:
            self.loop.stop()
        self._dispatch()

    def _forget(self, microbatch: Microbatch) -> None:
        self._in_step.pop(microbatch, None)
        for task in microbatch.tasks:
            task.worker.held.pop(task, None)

    def _commit(self, attempt: int) -> None:
        """The step ends, unless a worker that died during the reduction has left microbatches to repeat."""
        if self._in_flight or attempt != self._attempt:
            return
        for microbatch in list(self._in_step):
            self._forget(microbatch)
        self.steps += 1
        self._issued = 0
        for worker in self._arrivals:
            self._serve(worker)
        self._arrivals.clear()
        self._dispatch()

    # Joining and moving.

    def _read_loads(self) -> None:
        assert self.policy is not None
        load = self.load()
        self._last_reading_s = self.loop.now
        for worker in self.workers.values():
            worker.busy_read_s = worker.busy_s
        for move in self.policy.decide(self.loop.now, load):
            self.moves.append((self.loop.now, move))
            worker = self.workers[move.peer]
            worker.moving_to = move.target
            self.loop.after(self.settings.download_s, self._downloaded, worker)
        self.loop.after(self.settings.reading_s, self._read_loads)

    def _downloaded(self, worker: SimulatedWorker) -> None:
        if not worker.alive:
            return
        stage = worker.stage if worker.moving_to is None else worker.moving_to
        if self.settings.microbatches is None or not self._in_step or not self.wiring.peers(stage):
            self._serve(worker)
            self._dispatch()
        else:
            self._arrivals.append(worker)

    def _serve(self, worker: SimulatedWorker) -> None:
        if not worker.alive:
            return
        if worker.moving_to is not None:
            old = list(worker.held)
            self.wiring.move(worker.name, worker.moving_to)
            worker.stage, worker.moving_to = worker.moving_to, None
            worker.held.clear()
            for task in old:
                self._repair(task)
        else:
            worker.serving = True
            self.wiring.add(worker.stage, worker.name, capacity=worker.capacity)
        self._target_age = 0
        waiting, self._unassigned = self._unassigned, []
        for task in waiting:
            self.repeated -= 1
            self._repair(task)

    # The workers.

    def _input_arrives(self, task: Task, attempt: int) -> None:
        if task.attempt == attempt and not task.has_input:
            task.has_input = True
            heappush(task.worker.forwards, (task.microbatch.number, attempt, task))
            self._start(task.worker)

    def _gradient_arrives(self, task: Task, attempt: int) -> None:
        if task.attempt == attempt and not task.has_gradient:
            task.has_gradient = True
            if task.forward_done:
                heappush(task.worker.backwards, (task.microbatch.number, attempt, task))
                self._start(task.worker)

    def _start(self, worker: SimulatedWorker) -> None:
        """Begin the next pass if the worker is free: backward passes first, they free memory and let others end."""
        if worker.current is not None or worker.hung or not worker.alive:
            return
        settings = self.settings
        while worker.backwards or worker.forwards:
            backward = bool(worker.backwards)
            _, attempt, task = heappop(worker.backwards if backward else worker.forwards)
            if task.attempt != attempt:
                continue
            last = task.stage == settings.stages - 1
            seconds = settings.forward_of(task.stage) / worker.speed
            if backward:
                seconds *= settings.backward_ratio
            elif last:
                seconds *= 1.0 + settings.backward_ratio
            if settings.noise:
                seconds *= self._generator.lognormvariate(-0.5 * settings.noise**2, settings.noise)
            seconds += settings.overhead_s * (2 if last else 1)
            worker.current = task
            self.loop.after(seconds, self._end, worker, task, attempt, backward or last, seconds)
            return

    def _end(self, worker: SimulatedWorker, task: Task, attempt: int, complete: bool, seconds: float) -> None:
        if not worker.alive:
            return
        worker.current = None
        worker.busy_s += seconds
        if worker.hung:
            queue = worker.backwards if task.forward_done else worker.forwards
            heappush(queue, (task.microbatch.number, attempt, task))
            return
        if task.attempt == attempt:
            task.computed_s += seconds
            tasks, stage = task.microbatch.tasks, task.stage
            task.forward_done = True
            if complete:
                task.done = True
                if stage:
                    self._send(worker, tasks[stage - 1], self._gradient_arrives)
                self.loop.after(self._latency(self.settings.trainer_region, worker), self._reply, task, attempt)
            else:
                if not tasks[stage + 1].has_input:
                    self._send(worker, tasks[stage + 1], self._input_arrives)
                if task.has_gradient:
                    heappush(worker.backwards, (task.microbatch.number, attempt, task))
        self._start(worker)

    def _send(self, worker: SimulatedWorker, task: Task, arrive: Callable[[Task, int], None]) -> None:
        """Send an activation or a gradient to the worker that holds the task."""
        latency, bandwidth = self.network.link(worker.region, task.worker.region)
        now = self.loop.now
        if self.settings.activation_bytes and bandwidth < math.inf:
            worker.uplink_free_s = max(worker.uplink_free_s, now) + self.settings.activation_bytes / bandwidth
            latency += worker.uplink_free_s - now
        self.loop.after(latency, arrive, task, task.attempt)

    def _latency(self, region: str, worker: SimulatedWorker) -> float:
        return self.network.link(region, worker.region)[0]

    def _edge_cost(self, source: str, target: str) -> float:
        here = self.workers[source].region if source in self.workers else self.settings.trainer_region
        there = self.workers[target].region
        seconds = self._edges.get((here, there))
        if seconds is None:
            seconds = self._edges[here, there] = 2.0 * self.network.seconds(here, there, self.settings.activation_bytes)
        return seconds
