"""What the callbacks ask of the trainer's strategy."""

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException


def require_swarm(trainer: pl.Trainer, callback: str, method: str) -> None:
    """See that the strategy has the method by which the callback of this name does its work.

    Raises:
        MisconfigurationException: It has not, so it is no ``SwarmStrategy``.
    """
    if not hasattr(trainer.strategy, method):
        raise MisconfigurationException(
            f"{callback} needs Trainer(strategy=SwarmStrategy(...)), not {type(trainer.strategy).__name__}."
        )
