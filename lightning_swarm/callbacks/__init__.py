"""Callbacks that look into the swarm, keep it in balance, and say whom it avoids."""

from lightning_swarm.callbacks.banning import FaultBanning
from lightning_swarm.callbacks.monitor import SwarmMonitor
from lightning_swarm.callbacks.rebalancing import Rebalancing

__all__ = ["FaultBanning", "Rebalancing", "SwarmMonitor"]
