"""Bad input ends in one clear error that says what to do; whatever ends a run leaves what one process would leave."""

import re
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import OnExceptionCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_swarm import SwarmStrategy
from lightning_swarm.swarm.errors import RemoteError
from lightning_swarm.testing import ThreadSwarmStrategy
from lightning_swarm.trainer.errors import as_raised
from tests.harness import difference, options
from tests.models import CASES, Regressor, Rows

CASE = CASES["mlp"]
SOMEBODY = "12D3KooWEiXZcTZLnBNGsDwoStTQUmQ3cbnU3h3TDSMpfvwX8dGF"


def make() -> pl.LightningModule:
    return CASE.make("adamw")


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However a call failed: no peer, no worker and no file of it is left."""
    directory = Path(tempfile.mkdtemp(prefix="errors-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    before = set(threading.enumerate())
    yield
    new = [thread.name for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    assert [name for name in new if "swarm" in name] == []
    directory.rmdir()


def error_of_fit(
    module: pl.LightningModule,
    strategy: SwarmStrategy,
    data: DataLoader[Any] | None = None,
    expected: type[BaseException] = MisconfigurationException,
    **more: Any,
) -> str:
    """The message of what ``fit`` raises; the module must be as before."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = pl.Trainer(**options(strategy=strategy, **more))
    with pytest.raises(expected) as caught:
        trainer.fit(module, data or CASE.loader(2))
    assert difference(before, dict(module.state_dict())) == 0.0
    return str(caught.value)


# The model and where it is cut


def test_more_stages_than_the_model_can_have() -> None:
    message = error_of_fit(make(), ThreadSwarmStrategy(make, 9))
    assert re.fullmatch(
        r"stages=9, but training_step can be cut into at most \d stages. Stages can begin at: (.*)\.", message
    )
    assert message.endswith(": net.1, net.2, net.3, net.4, net.5, net.6.")


def test_an_unknown_split_point_names_the_nearest() -> None:
    message = error_of_fit(make(), ThreadSwarmStrategy(make, ["net.22"]))
    assert message.startswith('No stage can begin at "net.22": the model has no submodule of that name.')
    assert "net.2" in message.split("name.")[1]


class Skips(Regressor):
    """The way down is needed on the way up, past the calls in between."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.down, self.middle, self.up = (nn.Linear(12, 12) for _ in range(3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        down = self.down(batch[0])
        up = self.middle(down.relu()) + down
        return self.up(up).square().mean()


def test_a_cut_that_does_not_work_names_the_value_its_place_and_the_cuts_that_do() -> None:
    line = Skips.training_step.__code__.co_firstlineno + 1
    assert error_of_fit(Skips(), ThreadSwarmStrategy(Skips, ["middle"])) == (
        f'Stage 1 cannot begin at "middle": the value "down" made at test_errors.py:{line} does not pass through '
        "its call. Stages can begin at: up."
    )


# Batches


class Lonely(Regressor):
    """Its batches are numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch.view(1, 1)).square().mean()


def test_a_batch_without_a_batch_dimension() -> None:
    data = DataLoader(Rows(lambda index: torch.tensor(float(index)), 2), batch_size=None)
    message = error_of_fit(Lonely(), ThreadSwarmStrategy(Lonely, 2), data)
    assert message == (
        "The batch (a Tensor) has no tensor with a batch dimension, so it cannot be cut into microbatches. Let the "
        "first dimension of its tensors count the samples, or pass SwarmStrategy(microbatches=1) to send every batch "
        "as one piece."
    )
    strategy = ThreadSwarmStrategy(Lonely, 2, microbatches=1)
    try:
        pl.Trainer(**options(strategy=strategy)).fit(Lonely(), data)
    finally:
        strategy.shutdown()


def test_more_microbatches_than_samples_are_clamped_with_one_warning() -> None:
    strategy = ThreadSwarmStrategy(make, 2, microbatches=12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pl.Trainer(**options(strategy=strategy)).fit(make(), CASE.loader(3), CASE.loader(1))
        finally:
            strategy.shutdown()
    found = [str(warning.message) for warning in caught if "microbatches" in str(warning.message)]
    assert found == ["SwarmStrategy(microbatches=12) is more than a batch of 8 has samples; it is cut into 8."]


# Addresses


@pytest.mark.parametrize("role", ["trainer", "worker"])
def test_a_malformed_address_is_named(role: Any) -> None:
    message = error_of_fit(make(), SwarmStrategy(2, role=role, initial_peers=["/ip4/127.0.0.1/tcp/x"]))
    assert "initial_peers: '/ip4/127.0.0.1/tcp/x' is not the address of a peer. It must look like " in message


@pytest.mark.parametrize("role", ["trainer", "worker"])
def test_an_address_where_nobody_answers_is_named_in_under_15_seconds(role: Any) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        address = f"/ip4/127.0.0.1/tcp/{deaf.getsockname()[1]}/p2p/{SOMEBODY}"
        start = time.monotonic()
        message = error_of_fit(make(), SwarmStrategy(2, role=role, initial_peers=[address]))
        assert time.monotonic() - start < 15
    assert message.startswith("initial_peers: none can be reached. ") and f"\n  {address}: " in message


def test_an_address_that_refuses_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{SOMEBODY}"
        message = error_of_fit(make(), SwarmStrategy(2, initial_peers=[address]))
    assert message.startswith("initial_peers: none can be reached. ") and f"\n  {address}: " in message


def test_a_worker_without_an_address_is_told_where_to_find_one() -> None:
    message = error_of_fit(make(), SwarmStrategy(2, role="worker"))
    assert "A worker needs the address of a live peer" in message and "LIGHTNING_SWARM_INITIAL_PEERS" in message


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        message = error_of_fit(make(), SwarmStrategy(2, host_maddrs=[address]))
    assert message == f"host_maddrs: {address} is in use by another process. Name another port, or 0 for any free one."


def test_workers_cannot_be_started_where_there_is_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [""])
    message = error_of_fit(make(), SwarmStrategy(2))
    assert "was not started from a script" in message and "workers=0" in message


def test_a_stage_that_nobody_serves_is_named() -> None:
    error = error_of_fit(make(), SwarmStrategy(2, workers=0, startup_timeout=2.5), expected=Exception)
    assert re.match(r"No worker serves stage 0, 1 after \d+ s \(startup_timeout\)\. Workers seen: none\.", error)


# The user's own errors


class NoSuchColumn(Exception):
    """Wants more than a message, and makes that itself."""

    def __init__(self, table: str, column: str) -> None:
        super().__init__(table, column)
        self.table, self.column = table, column

    def __str__(self) -> str:
        return f"no column {self.column} in {self.table}"


class Explodes(Regressor):
    """Fails in its third training step."""

    def __init__(self, where: str = "", error: Exception | None = None) -> None:
        super().__init__(make().net, "adamw")  # type: ignore[arg-type]
        self.where = where
        self.error = error or ValueError("the third batch is bad")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.where == "first stage":
            raise self.error
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.where == "last stage":
            raise self.error
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if batch_idx == 1 and self.where == "validation":
            raise self.error


class Watch(pl.Callback):
    """Notes how a fit ends, and may end it itself."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3 and self.where == "callback":
            raise ValueError("the third batch is bad")
        if trainer.global_step == 3 and self.where == "Ctrl-C":
            raise KeyboardInterrupt

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self.seen.append((type(exception), str(exception), trainer.state.status, trainer.global_step))

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append("train end")

    def teardown(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append("teardown")


PLACES = ["first stage", "last stage", "validation", "callback", "Ctrl-C"]


@pytest.mark.parametrize("where", PLACES)
def test_an_exception_ends_fit_as_in_one_process(where: str, tmp_path: Path) -> None:
    ends = []
    for name in ("plain", "swarm"):
        pl.seed_everything(7, verbose=False)
        strategy: Any = "auto"
        if name == "swarm":
            strategy = ThreadSwarmStrategy(lambda: Explodes(where), 3, microbatches=4)
        watch, saving = Watch(where), OnExceptionCheckpoint(tmp_path / name)
        trainer = pl.Trainer(
            **options(strategy=strategy, devices=1, callbacks=[watch, saving], enable_checkpointing=True)
        )
        module = Explodes(where)
        with pytest.raises(SystemExit if where == "Ctrl-C" else ValueError) as caught:
            trainer.fit(module, CASE.loader(4), CASE.loader(2))
        checkpoint = torch.load(tmp_path / name / "on_exception.ckpt", weights_only=True)
        ends.append((str(caught.value), watch.seen, trainer.state, dict(module.state_dict()), checkpoint))
    plain, swarm = ends
    assert swarm[:3] == plain[:3]
    assert difference(swarm[3], plain[3]) <= 1e-6
    assert difference(swarm[4], plain[4]) <= 1e-6
    assert difference(plain[3], dict(Explodes().state_dict())) > 1e-3
    if where.endswith("stage"):
        (note,) = caught.value.__notes__
        assert "Traceback (most recent call last)" in note and "in training_step\n    raise self.error" in note
        assert where == "first stage" or "It was raised on the worker of stage 2, " in note


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a value"),
        ValueError(),
        KeyError("a key"),
        KeyError(("two", "parts")),
        OSError(2, "No such file or directory", "name"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        NoSuchColumn("table", "column"),
    ],
    ids=repr,
)
def test_every_exception_keeps_type_and_message(error: Exception) -> None:
    kind = type(error)
    remote = RemoteError(f"{kind.__module__}.{kind.__qualname__}", str(error), "Traceback ...", "Qm123")
    raised = as_raised(remote, 3)
    assert isinstance(raised, kind) and type(raised).__qualname__ == kind.__qualname__
    assert str(raised) == str(error)
    assert raised.__notes__ == ["It was raised on the worker of stage 3, Qm123:\n\nTraceback ..."]


@pytest.mark.parametrize("name", ["elsewhere.Error", "builtins.nonsense", "builtins.print", "Error", ""])
def test_an_exception_that_this_script_does_not_know_is_named(name: str) -> None:
    raised = as_raised(RemoteError(name, "message", "Traceback ...", "Qm123"))
    assert type(raised) is RuntimeError and str(raised) == f"{name}: message"


# What cannot work


def test_manual_optimization_is_refused() -> None:
    module = make()
    module.automatic_optimization = False
    message = error_of_fit(module, ThreadSwarmStrategy(make, 2))
    assert message.startswith("SwarmStrategy needs automatic optimization: ")
    assert message.endswith("Return the loss from training_step instead.")


class WithLBFGS(Regressor):
    """An optimizer that calls the closure again and again."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 4)))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_lbfgs_is_refused() -> None:
    message = error_of_fit(WithLBFGS(), ThreadSwarmStrategy(WithLBFGS, 2))
    assert message.startswith("SwarmStrategy cannot work with LBFGS") and "AdamW" in message


def test_callbacks_that_change_weights_on_the_trainer_are_refused() -> None:
    callbacks = [StochasticWeightAveraging(swa_lrs=0.1)]
    message = error_of_fit(make(), ThreadSwarmStrategy(make, 2), callbacks=callbacks)
    assert message.startswith("SwarmStrategy cannot work with StochasticWeightAveraging: ")
    assert message.endswith("Remove the callback.")


def test_a_scaled_loss_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="use precision='bf16-mixed'"):
        pl.Trainer(**options(strategy=SwarmStrategy(2), plugins=[MixedPrecision("16-mixed", "cuda")]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, "SwarmStrategy(stages=0) has no stage; give at least 1."),
        ({"stages": -1}, "SwarmStrategy(stages=-1) has no stage; give at least 1."),
        ({"stages": "blocks.3"}, "SwarmStrategy(stages='blocks.3') must be how many stages there are, or a list"),
        ({"stages": [1, 2]}, "SwarmStrategy(stages=[1, 2]) must be how many stages there are, or a list"),
        ({"stages": 2.5}, "SwarmStrategy(stages=2.5) must be how many stages there are, or a list"),
        ({"stages": 3, "workers": 2}, "SwarmStrategy(workers=2) cannot serve 3 stages"),
        ({"stages": ["a", "b"], "workers": 2}, "SwarmStrategy(workers=2) cannot serve 3 stages"),
        ({"workers": -1}, "SwarmStrategy(workers=-1) must be at least 0."),
        ({"microbatches": 0}, "SwarmStrategy(microbatches=0) must be at least 1."),
        ({"in_flight": 0}, "SwarmStrategy(in_flight=0) must be at least 1."),
        ({"codec": "int4"}, "SwarmStrategy(codec='int4') must be none, fp16, bf16 or int8."),
        ({"reduce_codec": None}, "SwarmStrategy(reduce_codec=None) must be none, fp16, bf16 or int8."),
        ({"outbox_bytes": -1}, "SwarmStrategy(outbox_bytes=-1) must be a number of bytes, at least 0, or None."),
        (
            {"startup_timeout": 1},
            "SwarmStrategy(startup_timeout=1) does not fit: the shortest deadline of a call < startup_timeout must "
            "hold, but 2 s < 1 s does not; else a stage",
        ),
        (
            {"trainer_timeout": 4},
            "SwarmStrategy(trainer_timeout=4) does not fit: the pause between two of a worker's heartbeats < "
            "trainer_timeout must hold, but 5 s < 4 s does not; else a worker",
        ),
        ({"startup_timeout": -1}, "SwarmStrategy(startup_timeout=-1) must be a number of seconds above 0."),
        ({"trainer_timeout": "1m"}, "SwarmStrategy(trainer_timeout='1m') must be a number of seconds above 0."),
        ({"role": "leader"}, "SwarmStrategy(role='leader') must be 'auto', 'trainer' or 'worker'."),
        ({"initial_peers": "/ip4/x"}, "SwarmStrategy(initial_peers='/ip4/x') must be a list of addresses."),
        ({"host_maddrs": "/ip4/x"}, "SwarmStrategy(host_maddrs='/ip4/x') must be a list of addresses."),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        SwarmStrategy(**arguments)
    assert str(caught.value).startswith(message)


def test_a_role_in_the_environment_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SWARM_ROLE", "leader")
    with pytest.raises(MisconfigurationException, match="LIGHTNING_SWARM_ROLE='leader' must be 'trainer' or 'worker'"):
        SwarmStrategy()
