"""Trains LightningModules that are too big for one machine on whatever machines there are.

``import lightning_swarm`` also registers the name ``"swarm"``, so that ``Trainer(strategy="swarm")`` works.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_swarm.callbacks import FaultBanning, Rebalancing, SwarmMonitor
from lightning_swarm.strategy import SwarmStrategy

__version__ = "0.1.0"
__all__ = ["FaultBanning", "Rebalancing", "SwarmMonitor", "SwarmStrategy"]

SwarmStrategy.register_strategies(StrategyRegistry)
