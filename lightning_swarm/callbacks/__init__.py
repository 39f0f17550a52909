"""Callbacks that look into the swarm and keep it in balance."""

from lightning_swarm.callbacks.monitor import SwarmMonitor
from lightning_swarm.callbacks.rebalancing import Rebalancing

__all__ = ["Rebalancing", "SwarmMonitor"]
