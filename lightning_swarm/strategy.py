"""SwarmStrategy: the one class that knows both Lightning and the swarm."""

import atexit
import contextlib
import importlib.metadata
import inspect
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swarm import launcher as launching
from lightning_swarm._compat import (
    MockOptimizer,
    closure_with_hooks,
    first_step,
    mirror_progress,
    replace_run_stage,
    restore_run_stage,
)
from lightning_swarm.policies.banning import BanList
from lightning_swarm.policies.rebalancing import RebalancingPolicy
from lightning_swarm.resuming import SWARM, Resuming
from lightning_swarm.slicing.plan import CutError, Plan, make_plan, make_signature
from lightning_swarm.swarm.bootstrap import refuse_other_runs
from lightning_swarm.swarm.calls import Context, FinishRequest, JoinRequest
from lightning_swarm.swarm.errors import RemoteError, SwarmError
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.tree import decode_tree, encode_tree
from lightning_swarm.trainer.commit import Clipping
from lightning_swarm.trainer.errors import as_raised
from lightning_swarm.trainer.microbatches import Microbatch, batch_size, merge, split
from lightning_swarm.trainer.origin import Origin
from lightning_swarm.trainer.peer import TrainerPeer
from lightning_swarm.trainer.replay import replay
from lightning_swarm.trainer.session import Identity, Session, Settings
from lightning_swarm.trainer.snapshots import Snapshots
from lightning_swarm.waits import check_order
from lightning_swarm.worker.member import Hosted
from lightning_swarm.worker.peer import WorkerPeer
from lightning_swarm.worker.recorder import plain_attributes

log = logging.getLogger(__name__)

# How long to wait for the trained weights when a call fails: for a checkpoint that a callback saves then, for the
# module after an exception, which the script may catch, and after Ctrl-C, when the process ends.
_SAVING_GATHER_S = 60.0
_FAILED_GATHER_S = 10.0
_INTERRUPTED_GATHER_S = 1.0
_FAILED_EXIT_S = 3.0
_PACKAGES = ("lightning_swarm", "torch", "lightning")
_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


class SwarmStrategy(Strategy):
    """Trains a LightningModule as a pipeline of stages that many unreliable machines serve.

    The process that calls ``trainer.fit`` first is the *trainer*: it runs Lightning's loops with your data, callbacks
    and loggers. The *workers* run the same script and serve one stage of the model each. With the defaults all of
    them are processes of this machine.

    Args:
        stages: How many stages, cut where the slowest one is fastest; or the split points themselves, by the names of
            the submodules whose calls begin stages 1, 2, ... (``["blocks.3", "blocks.6"]``).
        workers: How many workers to start on this machine; by default one a stage. 0: all are started elsewhere.
        microbatches: Into how many parts a batch is cut; by default twice as many as stages. More keep the stages
            busier, fewer use the devices better.
        in_flight: The largest number of microbatches under way at once; by default as many as keep all workers busy.
            Lower it when workers run out of memory.
        role: ``"trainer"``, ``"worker"`` or ``"auto"``: what ``LIGHTNING_SWARM_ROLE`` says, else trainer.
        initial_peers: Addresses of any live peers of the run; by default ``LIGHTNING_SWARM_INITIAL_PEERS``, separated
            by commas.
        run_id: Names the run; peers of other runs are refused. By default ``LIGHTNING_SWARM_RUN_ID``, else a random
            one.
        secret: With it (or ``LIGHTNING_SWARM_SECRET``), only peers that have it too can take part.
        host_maddrs: Where to listen; by default ``LIGHTNING_SWARM_HOST_MADDRS``, separated by commas, else any port of
            this machine alone. Give ``["/ip4/0.0.0.0/tcp/31337"]`` to let other machines join. The workers that
            the trainer starts on its own machine listen there, too, each at a free port of its own; the next two are
            the trainer's alone.
        announce_maddrs: Addresses to tell others instead, where the host's own do not work from outside; by default
            ``LIGHTNING_SWARM_ANNOUNCE_MADDRS``.
        identity_path: File of the peer's private key, for an address that survives restarts; by default
            ``LIGHTNING_SWARM_IDENTITY``.
        memory: On a worker, how many bytes its stage may take with gradients and optimizer; by default a GPU's
            memory, and on a CPU as much as it wants. It gets a stage that fits.
        outbox_bytes: How many bytes of activations and gradients a worker keeps for the case that a neighbour dies;
            what is more is made again then, from its own inputs. By default a quarter of what its declared ``memory``
            leaves besides its stage, and everything where none is declared. Lower it when workers run out of memory in
            long steps of many microbatches; a death costs more computing then.
        codec: How activations and gradients travel: ``"none"`` as they are, ``"fp16"``, ``"bf16"`` or ``"int8"``.
        reduce_codec: The same for the parameters' gradients when workers of one stage sum them.
        reproducible: Accumulate and sum gradients in float64 and round once, so that the weights are the same bit for
            bit whoever computed what. Costs memory for one float64 copy of the gradients.
        snapshot_every_n_steps: After how many steps the trainer brings its copy of the model up to date, so that a
            stage that loses its last worker can start again from there. More often costs traffic, less often more
            steps to repeat.
        log_gradients: Whether the trainer also fetches the summed gradients of every step, so that a worker can take
            over a stage that has lost its last one from the trainer's copy and these gradients, without any step being
            done again. Costs a fetch of the parameters' size from each stage in each step, beside the training, and
            the trainer that much memory for every step since its copy: lower ``snapshot_every_n_steps``.
        snapshot_dir: A directory where the trainer also keeps that copy, as a plain Lightning checkpoint; the newest
            two stay. ``trainer.fit(..., ckpt_path="swarm")`` goes on from the newest one, or from what the workers hold
            if that is newer.
        startup_timeout: Seconds for which a stage may be without any worker.
        trainer_timeout: Seconds for which a worker keeps its stage and waits for a trainer that does not answer to be
            started again. Longer than it takes to do that; shorter where a machine that waits costs too much.
        accelerator: As for every strategy.
        checkpoint_io: As for every strategy.
        precision_plugin: As for every strategy.

    Raises:
        MisconfigurationException: For arguments that cannot work.

    Example:
        >>> from lightning_swarm import SwarmStrategy
        >>> SwarmStrategy(stages=4).stages
        4
    """

    strategy_name = "swarm"

    def __init__(
        self,
        stages: int | Sequence[str] = 2,
        workers: int | None = None,
        microbatches: int | None = None,
        in_flight: int | None = None,
        role: Literal["auto", "trainer", "worker"] = "auto",
        initial_peers: Sequence[str] | None = None,
        run_id: str | None = None,
        secret: str | None = None,
        host_maddrs: Sequence[str] | None = None,
        announce_maddrs: Sequence[str] | None = None,
        identity_path: str | None = None,
        memory: int | None = None,
        outbox_bytes: int | None = None,
        codec: Literal["none", "fp16", "bf16", "int8"] = "none",
        reduce_codec: Literal["none", "fp16", "bf16", "int8"] = "none",
        reproducible: bool = False,
        snapshot_every_n_steps: int = 50,
        log_gradients: bool = False,
        snapshot_dir: str | Path | None = None,
        startup_timeout: float = 300.0,
        trainer_timeout: float = 600.0,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._clipping = _ClipRecorder()
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.role = _role(role)
        if not isinstance(stages, int) and not _are_names(stages):
            raise MisconfigurationException(
                f"SwarmStrategy(stages={stages!r}) must be how many stages there are, or a list of the names of the "
                f"submodules "
                "whose calls begin stages 1, 2, ...: stages=['blocks.3', 'blocks.6']."
            )
        self.stages = stages if isinstance(stages, int) else list(stages)
        count = stages if isinstance(stages, int) else len(stages) + 1
        if count < 1:
            raise MisconfigurationException(f"SwarmStrategy(stages={stages!r}) has no stage; give at least 1.")
        if workers is not None and workers < 0:
            raise MisconfigurationException(f"SwarmStrategy(workers={workers}) must be at least 0.")
        if workers is not None and 0 < workers < count:
            raise MisconfigurationException(
                f"SwarmStrategy(workers={workers}) cannot serve {count} stages: each needs a worker of its own. "
                f"Give at least "
                f"workers={count}, or workers=0 when all workers are started elsewhere."
            )
        for name, value in (
            ("microbatches", microbatches),
            ("in_flight", in_flight),
            ("snapshot_every_n_steps", snapshot_every_n_steps),
        ):
            if value is not None and value < 1:
                raise MisconfigurationException(f"SwarmStrategy({name}={value}) must be at least 1.")
        if outbox_bytes is not None and (isinstance(outbox_bytes, bool) or outbox_bytes < 0):
            raise MisconfigurationException(
                f"SwarmStrategy(outbox_bytes={outbox_bytes!r}) must be a number of bytes, at least 0, or None."
            )
        for name, chosen in (("codec", codec), ("reduce_codec", reduce_codec)):
            if chosen not in ("none", "fp16", "bf16", "int8"):
                raise MisconfigurationException(f"SwarmStrategy({name}={chosen!r}) must be none, fp16, bf16 or int8.")
        for name, addresses in (
            ("initial_peers", initial_peers),
            ("host_maddrs", host_maddrs),
            ("announce_maddrs", announce_maddrs),
        ):
            if isinstance(addresses, str):
                raise MisconfigurationException(f"SwarmStrategy({name}={addresses!r}) must be a list of addresses.")
        if self.role == "worker" and _is_local():
            # Rerun from the trainer's script, whose key and port are taken.
            host_maddrs = announce_maddrs = identity_path = None
        check_order(startup_timeout, trainer_timeout)
        self._stage_count = count
        self._workers = count if workers is None else workers
        self._microbatches = microbatches or 2 * count
        self._initial_peers = _addresses(initial_peers, launching.INITIAL_PEERS)
        self._run_id = run_id or os.environ.get(launching.RUN_ID) or secrets.token_hex(4)
        found_secret = secret or os.environ.get(launching.SECRET)
        self._secret = found_secret.encode() if found_secret else None
        self._host_maddrs = _addresses(host_maddrs, launching.HOST_MADDRS) or ["/ip4/127.0.0.1/tcp/0"]
        self._announce_maddrs = _addresses(announce_maddrs, launching.ANNOUNCE_MADDRS) or None
        identity = identity_path or os.environ.get(launching.IDENTITY)
        self._identity_path = Path(identity) if identity else None
        self._in_flight = in_flight
        self._memory_bytes = memory or 0
        if memory is None and self.role == "worker" and self.root_device.type == "cuda":
            self._memory_bytes = torch.cuda.get_device_properties(self.root_device).total_memory
        self._outbox_bytes = outbox_bytes
        self._codec = codec
        self._reduce_codec = reduce_codec
        self._reproducible = reproducible
        self._snapshot_every_n_steps = snapshot_every_n_steps
        self._log_gradients = log_gradients
        self._snapshots = Snapshots(Path(snapshot_dir)) if snapshot_dir is not None else None
        self._startup_timeout_s = startup_timeout
        self._trainer_timeout_s = trainer_timeout
        self._peer: TrainerPeer | WorkerPeer | None = None
        self._local: launching.LocalWorkers | None = None
        self._faults: Any = None  # What lightning_swarm.testing.Faults puts here for its `inject`.
        self._session: Session | None = None
        self._resuming = Resuming(None, 0)
        self._attributes: dict[str, Any] = {}
        self._clamped = False
        self._step_ends = False
        self._failed = False
        self._patience_s: float | None = None
        self._stage_of_worker: dict[int, int] = {}
        self._report: dict[str, Any] = {}
        if self.role == "worker" and threading.current_thread() is threading.main_thread():
            # Loggers and progress bars ask this global of Lightning whether they may write.
            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # What Lightning asks every strategy

    @property
    @override
    def root_device(self) -> torch.device:
        """The device that a worker computes on; the trainer's batches stay on the CPU."""
        if self.role == "trainer":
            return torch.device("cpu")
        device = os.environ.get(launching.DEVICE)
        if device is None:
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        return torch.device(device)

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.role == "trainer"

    @property
    def global_rank(self) -> int:
        """0 on the trainer; more on workers, which write no files."""
        return 0 if self.role == "trainer" else int(os.environ.get(launching.LOCAL_INDEX, "0")) + 1

    @property
    def local_rank(self) -> int:
        """As :attr:`global_rank`."""
        return self.global_rank

    @property
    def node_rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """1: the data is not divided among processes, only the model is."""
        return 1

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if isinstance(precision_plugin, MixedPrecision) and precision_plugin.precision == "16-mixed":
            raise MisconfigurationException(
                "SwarmStrategy does not scale the loss of float16 yet: use precision='bf16-mixed', which needs no "
                "scaling."
            )
        self._precision_plugin = precision_plugin
        if precision_plugin is not None:
            # The gradients are on the workers: note how to clip them instead of doing it.
            precision_plugin.clip_gradients = self._clipping  # type: ignore[method-assign]

    @override
    def _configure_launcher(self) -> None:
        self._launcher = launching.SwarmLauncher(self)

    @override
    def setup_environment(self) -> None:
        if self.role == "worker":
            super().setup_environment()

    @override
    def model_to_device(self) -> None:
        """A worker moves its stage when it knows which; the trainer's copy stays on the CPU."""

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def barrier(self, name: str | None = None) -> None:
        """Nothing to wait for: there is one trainer, and workers follow it."""

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Pipeline over a swarm of unreliable workers"
            )

    @contextlib.contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """On a worker, ``configure_model`` makes parameters without memory: what its stage needs comes from the
        trainer.
        """
        with super().tensor_init_context(empty_init=empty_init):
            if self.role == "trainer":
                yield
            else:
                with parameters_on_meta():
                    yield

    # One Lightning call

    def begin_call(self) -> None:
        """``trainer.fit`` (or ``validate``, ...) was called; starts the peer and local workers the first time."""
        self._failed, self._patience_s = False, None
        if self.role == "trainer":
            if self._snapshots is not None:
                self._snapshots.check()
            run_seed = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed()) % 2**63
            self._resuming = Resuming(self._snapshots, run_seed)
        if self._peer is None:
            self._start()
        assert self._peer is not None
        if isinstance(self._peer, TrainerPeer):
            self._peer.announce_session()
        else:
            self._peer.count += 1

    def choose_checkpoint(self, function: str) -> str | None:
        """What ``ckpt_path="swarm"`` means now; ``None``: begin anew."""
        assert isinstance(self._peer, TrainerPeer)
        # Without an address of its own nobody can have found this trainer, and without one of a peer it finds nobody.
        waits = bool(self._initial_peers) or self._identity_path is not None
        return self._resuming.choose(function, self._peer, waits)

    def _start(self) -> None:
        if self.role == "worker" and not self._initial_peers:
            raise MisconfigurationException(
                "A worker needs the address of a live peer: pass SwarmStrategy(initial_peers=[...]) or set "
                f"{launching.INITIAL_PEERS}, as the trainer's join line says."
            )
        node = Node(
            run_id=self._run_id,
            initial_peers=self._initial_peers,
            host_maddrs=self._host_maddrs,
            announce_maddrs=self._announce_maddrs,
            identity_path=self._identity_path,
            secret=self._secret,
        )
        try:
            node.run(refuse_other_runs(node, self._initial_peers))
        except BaseException:
            node.close()
            raise
        if self.role == "worker":
            if launching.THREADS in os.environ:
                torch.set_num_threads(int(os.environ[launching.THREADS]))
            around = self._faults.around if self._faults is not None else None
            notice = Path(os.environ[launching.NOTICE]) if launching.NOTICE in os.environ else None
            self._peer = WorkerPeer(node, self._initial_peers, self._trainer_timeout_s, around, notice)
            return
        self._peer = TrainerPeer(node)
        rank_zero_info(
            "To let another machine join, start this script there with:\n"
            f"  {launching.ROLE}=worker {launching.RUN_ID}={self._run_id} "
            f"{launching.INITIAL_PEERS}={','.join(node.maddrs)}"
            + (f"\nand {launching.SECRET} set to the run's secret, unless the script gives it." if self._secret else "")
        )
        self._local = self._start_workers(node)

    def _start_workers(self, node: Node) -> launching.LocalWorkers:
        return launching.LocalWorkers(self._environments(node), self._label, lambda: self._session is not None)

    def _environments(self, node: Node) -> list[dict[str, str]]:
        devices = torch.cuda.device_count()
        threads = max(1, (os.cpu_count() or 1) // max(1, self._workers))
        environments = []
        for index in range(self._workers):
            environment = {
                launching.ROLE: "worker",
                launching.INITIAL_PEERS: ",".join(node.maddrs),
                launching.RUN_ID: self._run_id,
                launching.LOCAL_INDEX: str(index),
                launching.DEVICE: f"cuda:{index % devices}" if devices else "cpu",
                launching.THREADS: str(threads),
                # Lightning's global rank is read from this when it is imported.
                "LOCAL_RANK": str(index + 1),
                "OMP_NUM_THREADS": str(threads),
            }
            if self._secret is not None:
                environment[launching.SECRET] = self._secret.decode()
            # What is this peer's own: two peers cannot have one key, or listen at one port.
            environment.update(dict.fromkeys((launching.IDENTITY, launching.ANNOUNCE_MADDRS), ""))
            # But whoever can reach the trainer must reach them, too: workers fetch from each other.
            environment[launching.HOST_MADDRS] = ",".join(dict.fromkeys(map(_any_port, self._host_maddrs)))
            environments.append(environment)
        return environments

    def _label(self, index: int) -> str:
        stage = self._stage_of_worker.get(index)
        return f"worker {index}" if stage is None else f"stage {stage}"

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        self._refuse_what_cannot_work(trainer, self.lightning_module)
        super().setup(trainer)
        if self.role == "worker":
            replace_run_stage(trainer, lambda: self._serve(trainer))
            return
        fitting = trainer.state.fn == TrainerFn.FITTING
        optimizer = self.optimizers[0] if fitting and self.optimizers else None
        step = self._resuming.first_step(first_step(trainer)) if fitting else trainer.global_step
        origin = Origin(self.lightning_module, optimizer, step)
        assert isinstance(self._peer, TrainerPeer) and trainer.state.fn is not None
        identity = Identity(
            session=self._peer.count,
            function=trainer.state.fn.value,
            versions=_versions(),
            parameters=_parameters(self.lightning_module),
        )
        settings = Settings(
            in_flight=self._in_flight,
            snapshot_every_n_steps=self._snapshot_every_n_steps,
            startup_timeout_s=self._startup_timeout_s,
            outbox_bytes=self._outbox_bytes,
            log_gradients=self._log_gradients,
            codec=self._codec,
            reduce_codec=self._reduce_codec,
            reproducible=self._reproducible,
            run_seed=self._resuming.run_seed,
        )
        node = self._peer.node
        local, resuming = self._local, self._resuming

        def joined(local_index: int, stage: int) -> None:
            self._stage_of_worker[local_index] = stage
            if local is not None:
                local.joined(local_index)

        def make() -> Session:
            check = local.check if local is not None else lambda: None
            write = resuming.write if fitting and self._snapshots is not None else None
            return Session(node, identity, origin, settings, check, joined, write, resuming.kept if fitting else None)

        self._session = self._peer.open(make)
        if fitting:
            resuming.watch(trainer, self._session)
        self._attributes = dict(plain_attributes(self.lightning_module))

    def _refuse_what_cannot_work(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not module.automatic_optimization:
            raise MisconfigurationException(
                "SwarmStrategy needs automatic optimization: with manual optimization the step that computes "
                "gradients would "
                "run on other machines than the optimizer calls in its middle. Return the loss from training_step "
                "instead."
            )
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise MisconfigurationException(
                "SwarmStrategy cannot work with a training_step that takes `dataloader_iter`: workers get batches, "
                "they have "
                "no dataloader. Take `batch` instead."
            )
        if is_overridden("backward", module, LightningModule):
            rank_zero_warn(
                "SwarmStrategy runs the backward pass on the workers; the overridden `backward` is not called."
            )
        forbidden = {
            "StochasticWeightAveraging": "averages weights in the trainer process at every epoch",
            "WeightAveraging": "averages weights in the trainer process at every step",
            "EMAWeightAveraging": "averages weights in the trainer process at every step",
            "ModelPruning": "changes weights in the trainer process",
            "BackboneFinetuning": "freezes and unfreezes parameters in the trainer process",
            "BaseFinetuning": "freezes and unfreezes parameters in the trainer process",
        }
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for kind in type(callback).__mro__:
                if kind.__name__ in forbidden:
                    raise MisconfigurationException(
                        f"SwarmStrategy cannot work with {type(callback).__name__}: it {forbidden[kind.__name__]}, "
                        f"but the "
                        "weights are on the workers. Remove the callback."
                    )

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise MisconfigurationException(
                    "SwarmStrategy cannot work with LBFGS, which evaluates the model several times within a step. "
                    "Use an "
                    "optimizer whose step needs the gradients only, such as AdamW."
                )

    @override
    def teardown(self) -> None:
        if self.role == "trainer" and self._session is not None and self._peer is not None:
            self._bring_home()
        elif self.role == "worker" and self.lightning_module is not None and self.lightning_module._trainer is not None:
            restore_run_stage(self.lightning_module.trainer)
        self.precision_plugin.teardown()
        if self.accelerator is not None and self.role == "worker":
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._failed and self.role == "trainer":
            self.end_call(failed=True, results=None)
            self.shutdown()

    def _bring_home(self) -> None:
        try:
            self._gather(self._patience_s)
        except SwarmError as error:
            if not self._failed:
                raise
            log.warning("The weights of the last steps could not be brought home: %s", error)
        if not self._failed:
            self.report()

    def fail(self, error: BaseException) -> None:
        """The Lightning call raises: nothing may take long any more, and Lightning's teardown ends the session."""
        self._failed = True
        if isinstance(error, SIGTERMException) and isinstance(self._peer, TrainerPeer) and self._resuming.follows:
            self._peer.spares_holders = True
        self._patience_s = _INTERRUPTED_GATHER_S if isinstance(error, KeyboardInterrupt) else _FAILED_GATHER_S

    def end_call(self, failed: bool, results: Any) -> None:
        """The Lightning call is over on the trainer; workers learn what they cannot know themselves."""
        self._session = None
        if not isinstance(self._peer, TrainerPeer):
            return
        outcome = None
        if not failed:
            outcome = encode_tree({"results": _numbers(results), **self._learnt()})[0]
        with contextlib.suppress(SwarmError):
            self._peer.shut(failed, outcome)

    def _learnt(self) -> dict[str, Any]:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None:
            return {}
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if isinstance(v, Tensor) and v.numel() == 1}
        best = [getattr(callback, "best_model_path", "") for callback in trainer.checkpoint_callbacks]
        return {"callback_metrics": metrics, "best_model_paths": best}

    def await_next_call(self) -> bool:
        """On a worker: whether the trainer's script has called Lightning again."""
        return isinstance(self._peer, WorkerPeer) and self._peer.await_next()

    def drain(self) -> bool:
        """On a worker: finish or hand back, and leave. Whether there is anything to leave."""
        return isinstance(self._peer, WorkerPeer) and self._peer.drain()

    def shutdown(self) -> None:
        """End the peer and local workers. Idempotent; called at the exit of the process."""
        atexit.unregister(self.shutdown)  # It would keep the module and its optimizer alive until then.
        peer, self._peer = self._peer, None
        local, self._local = self._local, None
        if peer is None:
            return
        if isinstance(peer, TrainerPeer):
            peer.end()
        if local is not None:
            local.end(launching.EXIT_WAIT_S if self._patience_s is None else min(self._patience_s, _FAILED_EXIT_S))
        peer.node.close()

    # A worker's session

    def _serve(self, trainer: Trainer) -> Any:
        assert isinstance(self._peer, WorkerPeer) and self.lightning_module is not None and trainer.state.fn is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        optimizer = self.optimizers[0] if fitting and self.optimizers else None
        module = self.lightning_module

        applied: list[Any] = [None]

        def mirror(context: Context) -> None:
            mirror_progress(trainer, context.epoch, context.global_step, context.running_stage)
            if applied[0] != (context.running_stage, context.modes):
                applied[0] = (context.running_stage, context.modes)
                _apply_modes(module, context)

        hosted = Hosted(
            module=module,
            device=self.root_device,
            optimizer=None if isinstance(optimizer, MockOptimizer) else optimizer,
            mirror=mirror,
            step_context=self._step_context,
            request=JoinRequest(
                session=0,
                function=trainer.state.fn.value,
                device=str(self.root_device),
                memory_bytes=self._memory_bytes,
                versions=_versions(),
                parameters=_parameters(module),
                local_index=int(os.environ.get(launching.LOCAL_INDEX, "-1")),
            ),
        )
        finish = self._peer.serve(hosted)
        return self._take_over(trainer, finish)

    def _take_over(self, trainer: Trainer, finish: FinishRequest) -> Any:
        outcome = decode_tree(finish.outcome, []) if finish.outcome is not None else {}
        for name, value in outcome.get("callback_metrics", {}).items():
            trainer.callback_metrics[name] = torch.tensor(value)
        for callback, path in zip(trainer.checkpoint_callbacks, outcome.get("best_model_paths", ())):
            if hasattr(callback, "best_model_path"):
                callback.best_model_path = path
        results = outcome.get("results")
        return [] if results is None and trainer.state.fn != TrainerFn.FITTING else results

    def _step_context(self, kind: str) -> contextlib.AbstractContextManager[Any]:
        return getattr(self.precision_plugin, _CONTEXTS[kind])()

    # The trainer's steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", *args)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", *args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", *args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", *args)

    def _step(self, kind: str, batch: Any, *step_args: int) -> Any:
        assert self.lightning_module is not None and self._session is not None and isinstance(self._peer, TrainerPeer)
        module, trainer = self.lightning_module, self.lightning_module.trainer
        microbatches = self._split(batch)
        self._ensure_planned(kind, microbatches[0].batch, step_args)
        context = Context(
            epoch=trainer.current_epoch,
            global_step=trainer.global_step,
            running_stage=trainer.state.stage.value if trainer.state.stage is not None else "train",
            modes=_modes(module, kind),
            attributes=self._changed_attributes(module),
        )
        scale = 1.0 / trainer.accumulate_grad_batches
        repeated = self._resuming.repeated if kind == "training_step" else []
        try:
            effects = (
                repeated.pop(0)
                if repeated
                else self._peer.run(self._session.run(kind, microbatches, step_args, context, scale, self._step_ends))
            )
        except RemoteError as error:
            raise as_raised(error, self._stage_of(error.peer)) from error
        replay(module, effects, microbatches)
        return merge([of_stages[-1].get("result") for of_stages in effects], microbatches)

    def _stage_of(self, peer: str | None) -> int | None:
        roster = self._session.roster if self._session is not None else None
        worker = roster.workers.get(peer) if roster is not None and peer is not None else None
        return None if worker is None else worker.stage

    def _split(self, batch: Any) -> list[Microbatch]:
        count = self._microbatches
        if count > 1:
            size = batch_size(batch)
            if size < count:
                if not self._clamped:
                    self._clamped = True
                    rank_zero_warn(
                        f"SwarmStrategy(microbatches={count}) is more than a batch of {size} has samples; it is cut "
                        f"into {size}."
                    )
                count = max(1, size)
        return split(batch, count)

    def _changed_attributes(self, module: LightningModule) -> dict[str, Any]:
        return {
            name: value
            for name, value in plain_attributes(module)
            if not isinstance(value, Tensor) and (name not in self._attributes or self._attributes[name] != value)
        }

    def _ensure_planned(self, kind: str, batch: Any, step_args: tuple[int, ...]) -> None:
        assert self._session is not None and self._peer is not None and self.lightning_module is not None
        session, module = self._session, self.lightning_module
        if session.signature(kind) is not None:
            return
        with self._step_context(kind), torch.set_grad_enabled(kind == "training_step"), torch.inference_mode(False):
            if session.plan is not None:
                try:
                    signature = make_signature(module, batch, session.plan, kind, step_args)
                    plan = session.plan.with_signature(signature)
                    self._peer.node.run(session.learn(plan))
                    return
                except CutError:
                    if kind != "training_step" or not session.untouched:
                        raise
            plan = make_plan(module, batch, self.stages, kind, step_args)
        self._peer.node.run(session.adopt(plan))
        rank_zero_info(f"\n{plan.table()}\n")

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Workers have done it; only the hooks are called."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Reduce and commit, with what the trainer's optimizer and schedulers say now."""
        assert self.lightning_module is not None and self._session is not None and isinstance(self._peer, TrainerPeer)
        self._clipping.clipping = Clipping()
        repeats = bool(self._resuming.repeated)  # Of the step that the workers have committed already.
        self._step_ends = True
        try:
            result = closure_with_hooks(self.precision_plugin, self.lightning_module, optimizer, closure)
        finally:
            self._step_ends = False
        hyperparameters = [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        try:
            if not repeats:
                self._peer.run(self._session.finish_step(hyperparameters, self._clipping.clipping))
        except RemoteError as error:
            raise as_raised(error, self._stage_of(error.peer)) from error
        # LR schedulers warn unless the optimizer has stepped before them; it has, on the workers.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return result

    # State

    def _gather(self, timeout_s: float | None = None) -> None:
        if self._session is None or not isinstance(self._peer, TrainerPeer):
            return
        self._peer.node.run(self._session.gather(recover=not self._failed), timeout_s=timeout_s)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.role == "worker":
            return {}
        if not self._resuming.describing:
            self._gather(_SAVING_GATHER_S if self._failed else None)
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._session is None:
            return super().optimizer_state(optimizer)
        if self._resuming.describing:
            return {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        self._gather(_SAVING_GATHER_S if self._failed else None)
        return self._session.origin.optimizer_state_dict(getattr(optimizer, "_optimizer", optimizer))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._session is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            self._session.origin.load_optimizer_state_dict(optimizer, state)
        self._resuming.restored(self._session.origin)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """A file, or for ``"swarm"`` what the workers or the disk hold of this run."""
        if checkpoint_path != SWARM:
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        assert self.lightning_module is not None
        return self._resuming.load(self.lightning_module, bool(weights_only))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self.role == "trainer":
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    # What users ask

    def plan(self, model: LightningModule, batch: Any, step: str = "training_step") -> Plan:
        """Where the model would be cut, without any network.

        Args:
            model: The LightningModule; it is left as it is.
            batch: A batch as the dataloader gives it.
            step: Which step function to try.

        Returns:
            The plan; ``print`` shows it as a table.

        Raises:
            CutError: The model cannot be cut so; says why, and where it can.
        """
        return make_plan(model, self._split(batch)[0].batch, self.stages, step, (0,))

    def rebalance(self, policy: RebalancingPolicy) -> None:
        """Let a policy move workers between the stages for the rest of this Lightning call; on the trainer only.

        :class:`~lightning_swarm.callbacks.Rebalancing` does this.
        """
        if self._session is not None and isinstance(self._peer, TrainerPeer):
            self._peer.run(self._session.rebalance(policy))

    def banning(self, bans: BanList) -> None:
        """Let a list decide whom to leave alone for the rest of this Lightning call; on the trainer only.

        :class:`~lightning_swarm.callbacks.FaultBanning` does this.
        """
        if self._session is not None and isinstance(self._peer, TrainerPeer):
            self._peer.run(self._session.banning(bans))

    def bans(self) -> list[dict[str, Any]]:
        """Every ban of this Lightning call, as in :meth:`report`; asks nobody."""
        return list(self._session.tally.bans) if self._session is not None else []

    def report(self) -> dict[str, Any]:
        """What the swarm has done in this Lightning call, or did in the last one.

        Returns:
            ``step``, ``elapsed_s``, ``samples``, ``counters`` (joins, leaves, moves, bans, failures by cause, stages
            lost, steps repeated, and microbatches that were retried, duplicate, lost or replayed), ``by_stage`` and
            ``by_worker`` (those of each stage, and of each worker by peer id, gone ones included: joins, leaves, bans
            and what happened to microbatches), ``bans`` (each with peer, stage, cause and length), ``recoveries_s``
            (seconds from each loss of a worker or a stage to the moment when what went with it was done again),
            ``trainer`` (its bytes) and ``workers``, a row each.

            What the trainer knows of a worker: ``stage``, ``peer``, ``local_index`` (-1 for one that was started
            elsewhere), ``device``, ``ready`` (it gets tasks; one that still fetches its state does not), ``moving_to``
            (the stage it fetches beside its work, or ``None``), ``leaving`` (it has said that it will go), ``banned``,
            ``microbatches``, ``share`` (of its stage's microbatches), ``microbatches_per_s`` and ``compute_s`` (as it
            has told with its replies) and ``outstanding`` (tasks given and not answered).

            What the worker adds when it is asked: ``queued`` (tasks that wait for its device), ``forward_s``,
            ``backward_s``, ``waiting_s`` (for other workers' activations and gradients), ``reduction_s``, ``commit_s``,
            ``busy_s`` and ``queue_s`` (seconds computed, and waiting to be), ``downloads`` (states of stages fetched),
            ``bytes_sent``, ``bytes_received``, ``outbox_bytes``, ``outbox_peak_bytes`` (the most there ever were) and
            ``evicted`` (what its outbox had no room for). Where it does not answer, these are missing, and
            ``unreachable`` says why.
        """
        if self._session is not None and isinstance(self._peer, TrainerPeer):
            self._report = self._peer.run(self._session.report())
        return self._report


class _ClipRecorder:
    """Stands for ``Precision.clip_gradients``: notes what it was called with."""

    def __init__(self) -> None:
        self.clipping = Clipping()

    def __call__(
        self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if clip_val is None or clip_val <= 0:
            return
        algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
        self.clipping = Clipping(value=float(clip_val)) if algorithm == "value" else Clipping(norm=float(clip_val))


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built here keep their buffers, but their parameters have shape and dtype only."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _role(role: str) -> str:
    if role not in ("auto", "trainer", "worker"):
        raise MisconfigurationException(f"SwarmStrategy(role={role!r}) must be 'auto', 'trainer' or 'worker'.")
    # The trainer's local workers run the trainer's script, whatever that says.
    found = os.environ.get(launching.ROLE, "trainer") if role == "auto" or _is_local() else role
    if found not in ("trainer", "worker"):
        raise MisconfigurationException(f"{launching.ROLE}={found!r} must be 'trainer' or 'worker'.")
    return found


def _is_local() -> bool:
    """Whether the trainer has started this process, on its own machine."""
    return int(os.environ.get(launching.LOCAL_INDEX) or "-1") >= 0


def _any_port(address: str) -> str:
    return re.sub(r"/(tcp|udp)/\d+", r"/\1/0", address)


def _addresses(given: Sequence[str] | None, variable: str) -> list[str]:
    return list(given) if given is not None else [a for a in os.environ.get(variable, "").split(",") if a]


def _are_names(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package).split("+")[0]
    return found


def _parameters(module: nn.Module) -> dict[str, str]:
    return {
        name: f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
        for name, parameter in module.named_parameters()
    }


def _modes(module: nn.Module, kind: str) -> tuple[str, ...]:
    usual = kind == "training_step"
    return tuple(name for name, child in module.named_modules() if child.training != usual)


def _apply_modes(module: nn.Module, context: Context) -> None:
    usual = context.running_stage == "train"
    unusual = frozenset(context.modes)
    for name, child in module.named_modules():
        wanted = (name in unusual) != usual
        if child.training != wanted:
            child.training = wanted


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _numbers(results: Any) -> Any:
    """Results of ``validate`` and ``test``: lists of dicts of numbers; predictions stay on the trainer."""
    if isinstance(results, list) and all(isinstance(row, dict) for row in results):
        return [{k: _plain(v) for k, v in row.items() if isinstance(_plain(v), (int, float))} for row in results]
    return None
