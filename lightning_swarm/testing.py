"""A whole swarm in one process, for tests of the swarm and of your own set-ups.

Every worker is a thread that runs Lightning with ``role="worker"``; everything else is real: each has a libp2p peer
of its own, and all that crosses between them crosses the network stack. :class:`Faults` makes them fail, at exactly
the moments that you choose.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_swarm.faults import Fault, Faults
from lightning_swarm.launcher import WorkerDied
from lightning_swarm.strategy import SwarmStrategy
from lightning_swarm.swarm.node import Node
from lightning_swarm.worker.executor import PROCESS_GENERATORS

__all__ = ["Fault", "Faults", "ThreadSwarmStrategy"]


class _ThreadWorkers:
    """Stands where the launcher's child processes stand otherwise."""

    def __init__(self, strategy: "ThreadSwarmStrategy", node: Node) -> None:
        self._strategy = strategy
        self._node = node
        self._errors: list[str] = []
        self._threads: list[threading.Thread] = []
        self.strategies: dict[int, SwarmStrategy] = {}
        self._killed: set[int] = set()
        for index in range(strategy.thread_workers):
            self.start(index)

    def start(self, index: int, make_module: Callable[[], LightningModule] | None = None, **options: Any) -> None:
        """One more worker, of another module or with other options if given."""
        arguments = (index, make_module or self._strategy.make_module, {**self._strategy.worker_options, **options})
        thread = threading.Thread(target=self._work, args=arguments, name=f"swarm worker {index}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, index: int, make_module: Callable[[], LightningModule], options: dict[str, Any]) -> None:
        try:
            with PROCESS_GENERATORS:  # It draws its weights while other workers may be in a step of theirs.
                module = make_module()
            strategy = SwarmStrategy(
                role="worker", initial_peers=self._node.maddrs, run_id=self._node.run_id, **options
            )
            if self._strategy.faults is not None:
                self._strategy.faults.inject(strategy)
            self.strategies[index] = strategy
            trainer = Trainer(
                strategy=strategy,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                **self._strategy.worker_trainer_options,
            )
            data: DataLoader[Any] = DataLoader([0])  # type: ignore[arg-type]
            for call in self._strategy.calls:
                getattr(trainer, call)(module, data)
        except SystemExit:
            return
        except BaseException:
            if index not in self._killed:
                self._errors.append(traceback.format_exc())
        finally:
            if index in self._killed:
                self.strategies.pop(index, None)  # A machine that has vanished holds no memory here.

    def kill(self, peer: str) -> None:
        """Let a worker vanish without a word, as a machine does that loses its power."""
        for index, strategy in list(self.strategies.items()):
            if strategy._peer is not None and strategy._peer.node.peer_id == peer:
                self._killed.add(index)
                strategy._peer.node.close()

    def joined(self, index: int) -> None:
        """As the launcher's."""

    def check(self) -> None:
        """As the launcher's."""
        if self._errors:
            raise WorkerDied(f"A worker thread has ended. Its last output:\n\n{self._errors[0]}")

    def end(self, wait_s: float = 10.0) -> None:
        """Wait for the threads, which cannot be killed: the trainer has told them that the run is over."""
        if self._strategy.faults is not None:
            self._strategy.faults.end()
        for thread in self._threads:
            thread.join(timeout=10.0)


class ThreadSwarmStrategy(SwarmStrategy):
    """A :class:`~lightning_swarm.SwarmStrategy` whose local workers are threads of this process.

    Args:
        make_module: Makes each worker's copy of the module.
        stages: As for ``SwarmStrategy``.
        workers: How many; by default one a stage.
        calls: The Lightning calls that the script makes, in order; a worker follows them.
        worker_options: More arguments for the workers' strategies.
        worker_trainer_options: More arguments for their ``Trainer``, such as ``precision``.
        faults: What shall happen to the workers, and when.
        options: More arguments for ``SwarmStrategy``.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = Trainer(strategy=ThreadSwarmStrategy(BoringModel, stages=2), max_steps=2, accelerator="cpu")
        >>> trainer.fit(BoringModel())
    """

    def __init__(
        self,
        make_module: Callable[[], LightningModule],
        stages: int | Sequence[str] = 2,
        workers: int | None = None,
        calls: Sequence[str] = ("fit",),
        worker_options: dict[str, Any] | None = None,
        worker_trainer_options: dict[str, Any] | None = None,
        faults: Faults | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stages=stages, workers=workers, **options)
        self.make_module = make_module
        self.thread_workers = self._workers
        self.calls = tuple(calls)
        self.worker_options = worker_options or {}
        self.worker_trainer_options = worker_trainer_options or {}
        self.faults = faults

    def _start_workers(self, node: Node) -> Any:
        workers = _ThreadWorkers(self, node)
        if self.faults is not None:
            self.faults.kill_with(workers.kill)
        return workers
