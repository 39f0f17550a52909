"""How a trainer that was killed goes on: ``trainer.fit(..., ckpt_path="swarm")``.

There are two places to go on from, and the newer one is taken. *The workers* hold the weights of the step that they are
at, and with them the position that Lightning was at when that step's predecessor began, and what its batches gave
(:mod:`~lightning_swarm.trainer.position`). *The disk* has a plain Lightning checkpoint (``snapshot_dir``).

A position is a Lightning checkpoint without weights, taken between two steps.
"""

import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_swarm._compat import describe_progress, end_restart, ignore_unresumable_loader, watch_batches
from lightning_swarm.swarm.errors import CallerError, SwarmError
from lightning_swarm.trainer.origin import Origin
from lightning_swarm.trainer.peer import TrainerPeer
from lightning_swarm.trainer.position import Effects, pack, unpack, unpack_effects
from lightning_swarm.trainer.recovery import Recovered, Unrecoverable
from lightning_swarm.trainer.session import Session
from lightning_swarm.trainer.snapshots import Snapshots

log = logging.getLogger(__name__)

SWARM = "swarm"
_OWN_KEY = "lightning_swarm"
# As long as a worker may take to announce itself in the DHT again, where the trainer was the only one who knew it.
_LOOK_S = 12.0


class Resuming:
    """One ``fit`` of the trainer: where it goes on from, and where it stands at each step, for the next one.

    Args:
        snapshots: Those on disk.
        run_seed: Of the run, unless it goes on with that of an earlier trainer.

    Attributes:
        repeated: What the batches gave of the step that Lightning goes through once more.
        describing: Whether Lightning is asked for a position now, so that no weights need be there.
        follows: Whether workers are to know at each step where Lightning stands.
    """

    def __init__(self, snapshots: Snapshots | None, run_seed: int) -> None:
        self.run_seed = run_seed
        self.repeated: list[Effects] = []
        self.describing = False
        self._snapshots = snapshots
        self.follows = False
        self._found: Path | Recovered | None = None
        self._step: int | None = None
        self._restarted = False
        self._rng = torch.get_rng_state()
        """Of torch, before the epoch's iterator over the dataloader was made, which shuffles by it."""
        self._metrics: dict[str, float] = {}
        self._first_epoch = True
        self._checked = False

    # Where to go on from

    def choose(self, function: str, peer: TrainerPeer, waits: bool) -> str | None:
        """What to give to ``Strategy.load_checkpoint``; ``None``: there is nothing, training begins anew.

        Args:
            function: Lightning's name for the call.
            peer: The trainer's.
            waits: Whether there may be workers that have not been heard of yet.

        Raises:
            MisconfigurationException: The workers hold something, but neither they nor the disk have all stages.
        """
        if function != "fit":
            raise MisconfigurationException(
                f'trainer.{function}(ckpt_path="swarm"): only trainer.fit goes on from what the swarm holds. Leave '
                "ckpt_path out after fit, or give the path of a checkpoint."
            )
        self.follows = True
        snapshot = self._snapshots.newest() if self._snapshots is not None else None
        problem: SwarmError | None = None
        held: Recovered | None = None
        try:
            held = self._of_workers(peer, waits, -1 if snapshot is None else snapshot[0])
        except Unrecoverable as error:
            problem = error
        except CallerError as error:
            raise MisconfigurationException(str(error)) from error
        if held is not None:
            self._step, self._found = held.step, held
            rank_zero_info(f"Going on from step {self._step}, which the workers hold.")
        elif snapshot is not None:
            if problem is not None:
                rank_zero_warn(f"{problem} The snapshot on disk is used.")
            self._step, self._found = snapshot
            rank_zero_info(f"Going on from step {self._step}, which {self._found} holds.")
        elif problem is not None:
            raise MisconfigurationException(
                f"{problem} There is no snapshot on disk to go on from, either (snapshot_dir). Start the missing "
                'workers again if they can be, or leave out ckpt_path="swarm" to begin anew.'
            )
        else:
            rank_zero_info('ckpt_path="swarm": no worker and no snapshot holds anything of this run; it begins anew.')
            return None
        return SWARM

    @staticmethod
    def _of_workers(peer: TrainerPeer, waits: bool, newer_than: int) -> Recovered | None:
        recovery = peer.recovery(_LOOK_S if waits else 0.0)

        async def recover() -> Recovered | None:
            try:
                step = await recovery.find()
            finally:
                peer.spares_holders = recovery.found
            return await recovery.fetch() if step is not None and step > newer_than and step > 0 else None

        return peer.run(recover())

    def load(self, module: LightningModule, weights_only: bool) -> dict[str, Any]:
        """The checkpoint that Lightning is to go on from.

        Args:
            module: The trainer's; gets the weights if workers hold them.
            weights_only: Whether to refuse a snapshot with more than tensors and plain values.

        Raises:
            MisconfigurationException: It is of another model; says which names differ.
        """
        found = self._found
        if isinstance(found, Recovered):
            checkpoint: dict[str, Any] = unpack(found.record.position)
            self.repeated = [unpack_effects(packed) for packed in found.record.effects]
            held = {name for state in found.states for name in state.parameters}
            _check_names(held, {name for name, _ in module.named_parameters()}, "What the workers hold is")
            Origin(module, None, 0).update(found.states)
            checkpoint["state_dict"] = module.state_dict()
        else:
            assert found is not None
            # Its tensors stay in the file until they are read.
            checkpoint = torch.load(found, map_location="cpu", mmap=True, weights_only=weights_only)
            _check_names(set(checkpoint["state_dict"]), set(module.state_dict()), f"Snapshot {found} is")
        own = checkpoint[_OWN_KEY]
        self.run_seed, self._rng, self._metrics = own["run_seed"], own["rng"], own["metrics"]
        self._restarted = True
        ignore_unresumable_loader()
        return checkpoint

    def first_step(self, otherwise: int) -> int:
        """The step whose weights the trainer's module holds."""
        return otherwise if self._step is None else self._step

    def restored(self, origin: Origin) -> None:
        """Lightning has restored the optimizer's hyperparameters: the rest of its state, and the random numbers."""
        if isinstance(self._found, Recovered):
            for state in self._found.states:
                origin.optimizer_state.update(state.optimizer)
            self._found.states.clear()
        if self._restarted:
            torch.set_rng_state(self._rng)

    @property
    def kept(self) -> Any:
        """The workers that need not fetch what they hold."""
        return self._found.kept if isinstance(self._found, Recovered) else None

    # Where Lightning stands

    def watch(self, trainer: Trainer, session: Session) -> None:
        """From now on, tell the session where Lightning stands at the beginning of each step."""
        self._session, self._trainer = session, trainer
        if not self._restarted:
            self._rng = torch.get_rng_state()
        watch_batches(trainer, self._epoch_begins, self._batch_begins)

    def _epoch_begins(self) -> None:
        # The iterator of the first epoch is there already.
        if not self._first_epoch:
            self._rng = torch.get_rng_state()
        self._first_epoch = False

    def _batch_begins(self, data_fetcher: Any) -> None:
        if self._restarted:
            self._restarted = False
            end_restart(self._trainer, data_fetcher)
            # ReduceLROnPlateau may ask for what was validated before.
            self._trainer.callback_metrics.update({name: torch.tensor(v) for name, v in self._metrics.items()})
        session = self._session
        if self.repeated or not session.between_steps or not (self.follows or session.snapshot_is_due):
            return
        strategy: Any = self._trainer.strategy
        strategy._peer.run(session.begin_step(self._position()))

    def _position(self) -> bytes:
        """Lightning's checkpoint without weights and optimizer states; empty if nobody is to have it."""
        if not self.follows and self._snapshots is None:
            return b""
        with self._describe():
            position = describe_progress(self._trainer)
        del position["state_dict"]
        metrics = {name: float(value) for name, value in self._trainer.callback_metrics.items()}
        position[_OWN_KEY] = {"run_seed": self.run_seed, "rng": self._rng, "metrics": metrics}
        packed = pack(position)
        if self.follows and not self._checked:
            self._checked = True
            self._check(packed)
        return packed

    def _check(self, packed: bytes) -> None:
        """See that a restarted trainer will take this from a worker."""
        try:
            unpack(packed)
        except pickle.UnpicklingError as error:
            self.follows = False
            rank_zero_warn(
                "A restarted trainer will not be able to go on from what the workers hold, and needs a snapshot_dir: a "
                "callback, a scheduler, the datamodule or on_save_checkpoint puts more than tensors and plain values "
                f"into checkpoints, which is not taken from other machines. ({str(error).splitlines()[0]})"
            )

    @contextmanager
    def _describe(self) -> Iterator[None]:
        self.describing = True
        try:
            yield
        finally:
            self.describing = False

    def write(self, step: int, position: bytes) -> None:
        """Put the origin on disk as a checkpoint of this step; on a thread. What goes wrong is a warning."""
        assert self._snapshots is not None
        origin = self._session.origin
        try:
            checkpoint = unpack(position, weights_only=False)
            checkpoint["state_dict"] = self._trainer.lightning_module.state_dict()
            optimizers: list[Optimizer] = self._trainer.strategy.optimizers
            for optimizer, state in zip(optimizers, checkpoint["optimizer_states"]):
                state["state"] = origin.optimizer_state_dict(optimizer)["state"]
            self._snapshots.write(step, checkpoint)
        except OSError as error:
            log.warning(
                "The snapshot of step %d could not be written to %s: %s. Training goes on, and tries again later.",
                step,
                self._snapshots.directory,
                error.strerror or error,
            )


def _check_names(held: set[str], own: set[str], what: str) -> None:
    if held != own:
        raise MisconfigurationException(
            f"{what} of another model: this one has no {sorted(held - own)[:4]}, and there is no "
            f"{sorted(own - held)[:4]} there. Restart the script that wrote it, or give another run_id or snapshot_dir."
        )
