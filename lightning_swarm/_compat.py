"""Private names of Lightning that cannot be avoided, each with the reason, in one place.

hivemind's stand in ``_compat_hivemind.py``.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
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


def choose_checkpoint(trainer: Trainer, choose: Callable[[str], str | None]) -> None:
    """Let ``choose`` say what ``ckpt_path="swarm"`` means: a path for ``Strategy.load_checkpoint``, or to begin anew.

    When Lightning asks the strategy to load, it is too late to say that there is nothing.
    """
    connector = trainer._checkpoint_connector
    select = type(connector)._select_ckpt_path

    def select_path(function: TrainerFn, path: Any, **more: Any) -> Any:
        return choose(function.value) if path == "swarm" else select(connector, function, path, **more)

    connector._select_ckpt_path = select_path  # type: ignore[method-assign, assignment]


def describe_progress(trainer: Trainer) -> dict[str, Any]:
    """What a Lightning checkpoint would be now."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def watch_batches(trainer: Trainer, epoch_begins: Callable[[], None], batch_begins: Callable[[Any], None]) -> None:
    """Be called before the training dataloader's iterator is made for an epoch, and before each batch is fetched (with
    the data fetcher).

    No hook runs there; between two batches is the only moment when a batch and the validation that follows it are
    over for callbacks, schedulers and loops alike, and when the dataloader has not gone on yet.
    """
    loop = trainer.fit_loop.epoch_loop
    run_start, advance = type(loop).on_run_start, type(loop).advance

    def on_run_start(data_fetcher: Any) -> None:
        epoch_begins()
        run_start(loop, data_fetcher)

    def advance_watched(data_fetcher: Any) -> None:
        batch_begins(data_fetcher)
        advance(loop, data_fetcher)

    loop.on_run_start, loop.advance = on_run_start, advance_watched  # type: ignore[method-assign]


def end_restart(trainer: Trainer, data_fetcher: Any) -> None:
    """Before the first batch after a restart: from here on the loops are where they were before the batch was fetched.

    Lightning would take a restart for one from a checkpoint that a callback has saved, count a step for the loggers
    twice where validation was due, and leave out ``ReduceLROnPlateau`` at the end of the epoch. A dataloader that
    cannot be set to a position gives what the epoch has had already once more, so that is fetched and let go of.
    """
    loop = trainer.fit_loop.epoch_loop
    trainer.fit_loop.restarting = False
    loader = trainer.fit_loop._combined_loader
    assert loader is not None
    if not all(isinstance(part, _Stateful) for part in loader.flattened):
        had = loop.batch_progress.current.ready  # on_run_start has counted these as fetched.
        data_fetcher.fetched -= had
        for _ in range(had):
            next(data_fetcher)


def ignore_unresumable_loader() -> None:
    """Lightning warns of a dataloader that it cannot set to a position; :func:`end_restart` does."""
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
