"""Rebalancing: workers move to the stage that needs them most."""

import math
from typing import Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_swarm.callbacks._strategy import require_swarm
from lightning_swarm.policies.rebalancing import PaperRebalancer, Rebalancer, RebalancingPolicy

_RULES = {"swarm": Rebalancer, "paper": PaperRebalancer}


class Rebalancing(pl.Callback):
    """Moves workers between the stages while training goes on.

    A pipeline is as fast as its weakest stage, and every worker that comes or goes unbalances it. The trainer reads the
    stages' loads a few times a period (how busy each worker was, how much work waits for it), and moves workers from
    stages that have more than they need to the weakest one. A moving worker serves its old stage until it holds the
    state of the new one, and changes over between two steps. Weights are the same with and without moves.

    Decisions are logged at level INFO, with the numbers that caused them; the counters ``moves`` and ``moves called
    off`` are in ``strategy.report()`` and in :class:`~lightning_swarm.callbacks.SwarmMonitor`'s metrics.

    Args:
        period: Shortest time between two decisions, in seconds; a lost worker is answered sooner. Lower it when
            workers come and go within minutes and stages are downloaded in seconds.
        policy: ``"swarm"``: as many workers at once as pays, and only where two readings in a row show that it pays
            more than the downloads cost. ``"paper"``: the rule of Ryabinin et al. (ICML 2023, algorithm 2), for
            comparison: every ``period`` seconds one worker goes from the least to the most loaded stage, whatever that
            gains. Or a policy object of your own, which has its own period.

    Raises:
        MisconfigurationException: For a period or policy that makes no sense, or when the trainer's strategy is no
            ``SwarmStrategy``.

    Example:
        >>> from lightning_swarm.callbacks import Rebalancing
        >>> rebalancing = Rebalancing(period=30)
    """

    def __init__(self, period: float = 60.0, policy: Literal["swarm", "paper"] | RebalancingPolicy = "swarm") -> None:
        if isinstance(period, bool) or not isinstance(period, (int, float)) or not 0 < period < math.inf:
            raise MisconfigurationException(f"Rebalancing(period={period!r}) must be a number of seconds above 0.")
        self._chosen: RebalancingPolicy | None = None
        if isinstance(policy, str):
            if policy not in _RULES:
                raise MisconfigurationException(
                    f"Rebalancing(policy={policy!r}) must be 'swarm', 'paper', or an object that decides."
                )
        elif callable(getattr(policy, "decide", None)) and getattr(policy, "period_s", 0) > 0:
            self._chosen = policy
        else:
            raise MisconfigurationException(
                f"Rebalancing(policy={policy!r}) must be 'swarm', 'paper', or an object with the method `decide` and "
                "a `period_s` above 0."
            )
        self._period_s = float(period)
        self._rule = policy if isinstance(policy, str) else ""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        require_swarm(trainer, "Rebalancing", "rebalance")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        policy = self._chosen or _RULES[self._rule](self._period_s)
        trainer.strategy.rebalance(policy)  # type: ignore[attr-defined]
