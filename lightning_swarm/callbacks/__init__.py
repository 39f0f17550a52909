"""Callbacks that look into the swarm."""

from lightning_swarm.callbacks.monitor import SwarmMonitor

__all__ = ["SwarmMonitor"]
