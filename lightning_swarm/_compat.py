"""Private names of Lightning that cannot be avoided, each with the reason, in one place.

hivemind's stand in ``_compat_hivemind.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import RunningStage
from torch.optim import Optimizer

# The base class that Trainer expects of what Strategy.launcher returns; there is no public one.
Launcher = _Launcher

# What stands for an optimizer when configure_optimizers returns None.
MockOptimizer = _MockOptimizer


def rerun_command() -> Sequence[str]:
    """The command that started this script, as Lightning's own script launcher repeats it."""
    return list(_basic_subprocess_cmd())


def closure_with_hooks(precision: Any, model: LightningModule, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    """Run the training closure and the hooks around clipping, as Precision.optimizer_step does before it steps.

    There is no public way to have these without calling ``optimizer.step``.
    """
    return precision._wrap_closure(model, optimizer, closure)


def replace_run_stage(trainer: Trainer, serve: Callable[[], Any]) -> None:
    """Let ``trainer._run`` set everything up and tear it down, but serve instead of looping over batches."""
    trainer._run_stage = serve  # type: ignore[method-assign]


def restore_run_stage(trainer: Trainer) -> None:
    """Undo :func:`replace_run_stage`."""
    trainer.__dict__.pop("_run_stage", None)


def mirror_progress(trainer: Trainer, epoch: int, global_step: int, running_stage: str) -> None:
    """Make a worker's ``current_epoch``, ``global_step`` and stage flags those of the trainer.

    Lightning derives them from its loops' progress, which a worker's loops do not make.
    """
    trainer.fit_loop.epoch_progress.current.processed = epoch  # type: ignore[attr-defined]
    trainer.fit_loop.epoch_progress.current.completed = epoch
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = global_step
    trainer.state.stage = RunningStage(running_stage)


def current_fx(module: LightningModule, name: str | None) -> None:
    """Name the hook that runs, as Lightning does around hooks; ``self.log`` asks for it."""
    module._current_fx_name = name


def ignore_checkpoint_path(trainer: Trainer) -> None:
    """Let a worker's ``fit(ckpt_path=...)`` load no file: its state comes from the trainer, which may be on another
    machine.
    """
    trainer._checkpoint_connector._select_ckpt_path = lambda *args, **kwargs: None  # type: ignore[method-assign]


def first_step(trainer: Trainer) -> int:
    """The step that ``fit`` begins at, when the strategy is set up already but the loops' progress is not
    restored yet.
    """
    checkpoint: dict[str, Any] = trainer._checkpoint_connector._loaded_checkpoint
    return int(checkpoint.get("global_step", trainer.global_step))
