"""SwarmMonitor: what the swarm does, in any Lightning logger."""

from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_swarm.callbacks._strategy import require_swarm


class SwarmMonitor(pl.Callback):
    """Logs workers, throughput, seconds and bytes of every stage, and the swarm's events.

    Args:
        every_n_steps: How often; each time costs one small call to every worker.
        workers: Whether to log what happened to each worker's microbatches, too; one that comes back has another name.

    Raises:
        MisconfigurationException: The trainer's strategy is no ``SwarmStrategy``, or has no logger.

    Example:
        >>> from lightning_swarm.callbacks import SwarmMonitor
        >>> monitor = SwarmMonitor(every_n_steps=50)
    """

    def __init__(self, every_n_steps: int = 50, workers: bool = False) -> None:
        if every_n_steps < 1:
            raise MisconfigurationException(f"SwarmMonitor(every_n_steps={every_n_steps}) must be at least 1.")
        self._every_n_steps = every_n_steps
        self._workers = workers
        self._last: dict[str, Any] = {}
        self._logged = -1

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        require_swarm(trainer, "SwarmMonitor", "report")
        if trainer.is_global_zero and not trainer.loggers:
            raise MisconfigurationException("SwarmMonitor needs a logger: this Trainer was made with logger=False.")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._logged or step % self._every_n_steps:
            return
        self._logged = step
        report = trainer.strategy.report()  # type: ignore[attr-defined]
        metrics = self.metrics(report, self._last, self._workers)
        self._last = report
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    @staticmethod
    def metrics(report: dict[str, Any], before: dict[str, Any], workers: bool = False) -> dict[str, float]:
        """The numbers to log.

        Args:
            report: Of ``SwarmStrategy.report()``.
            before: The report before; rates are those since then.
            workers: Whether each worker's microbatches are wanted, too.

        Returns:
            ``swarm/samples_per_s``, ``swarm/recoveries`` and ``swarm/recovery_s`` (of all together),
            ``swarm/stage{k}/{workers,queued,forward_s,processed,retried,duplicate,lost,replayed,bans,...}``,
            ``swarm/bans/{cause}``, ``swarm/{event}`` and, for workers, ``swarm/worker/{end of peer id}/{lost,...}``.
        """
        elapsed = report["elapsed_s"] - before.get("elapsed_s", 0.0)
        metrics: dict[str, float] = defaultdict(float)
        metrics["swarm/samples_per_s"] = (report["samples"] - before.get("samples", 0)) / max(elapsed, 1e-9)
        for row in report["workers"]:
            prefix = f"swarm/stage{row['stage']}"
            metrics[f"{prefix}/workers"] += 1
            for name in ("microbatches", "queued", "bytes_sent", "bytes_received"):
                metrics[f"{prefix}/{name}"] += row.get(name, 0)
            for name in ("forward_s", "backward_s", "waiting_s", "reduction_s", "commit_s"):
                metrics[f"{prefix}/{name}"] += row.get(name, 0.0)
        for stage, counts in enumerate(report["by_stage"]):
            metrics.update({f"swarm/stage{stage}/{event}": count for event, count in counts.items()})
        for peer, counts in report["by_worker"].items() if workers else ():
            metrics.update({f"swarm/worker/{peer[-6:]}/{event}": count for event, count in counts.items()})
        for ban in report["bans"]:
            metrics[f"swarm/bans/{ban['cause']}"] += 1
        metrics["swarm/recoveries"] = len(report["recoveries_s"])
        metrics["swarm/recovery_s"] = sum(report["recoveries_s"])
        for event, count in report["counters"].items():
            metrics[f"swarm/{event.replace(': ', '_').replace(' ', '_')}"] = count
        return dict(metrics)
