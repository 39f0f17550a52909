"""Peers that have no business in a run: whatever they send to whichever call changes nothing, and with a secret nobody
answers or believes them.
"""

import asyncio
import gc
import random
import resource
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, Literal, Union

import lightning.pytorch as pl
import msgpack
import pytest
import torch
from hivemind.dht.routing import DHTID
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_swarm import SwarmStrategy, launcher
from lightning_swarm._compat_hivemind import DHTNode, Multiaddr, PeerID, connect, get_dht_time
from lightning_swarm.swarm.calls import (
    CommitRequest,
    FinishRequest,
    JoinRequest,
    LogRequest,
    MoveRequest,
    NextRequest,
    PreparedRequest,
    ProbeRequest,
    ReadyRequest,
    ReduceRequest,
    StateRequest,
    Task,
    TrainerRecord,
    WorkerRecord,
)
from lightning_swarm.swarm.errors import CallerError, PeerUnreachable, RemoteError, SwarmError
from lightning_swarm.swarm.finding import announced_trainer
from lightning_swarm.swarm.messages import Message
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import FetchRequest
from tests.harness import AllAtWork, Outcome, difference, fit_swarm
from tests.models import CASES, GPT

STEPS, AT = 5, 3
MESSAGES = 10_000
OVER_THE_NETWORK = 50
AT_ONCE = 200
MESSAGE_OF: dict[str, type[Message]] = {
    "join": JoinRequest,
    "ready": ReadyRequest,
    "prepared": PreparedRequest,
    "state": StateRequest,
    "log": LogRequest,
    "next": NextRequest,
    "process": Task,
    "fetch": FetchRequest,
    "probe": ProbeRequest,
    "reduce": ReduceRequest,
    "commit": CommitRequest,
    "move": MoveRequest,
    "finish": FinishRequest,
}
"""Of the calls that carry something."""
OF_TRAINER = ("process", "reduce", "commit", "move")
NUMBERS = (0, 1, 2, 3, 4, -1, 99, 2**40, -(2**63), 2**64 - 1)
WORDS = ("", "session", "after", "machine", "key", "tensor", "dict", "stage0", "3:0/a1", "3:0/g1", "log/2", "é" * 90)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def make() -> pl.LightningModule:
    return GPT(layers=2, width=16, dropout=0.1, noise=0.1, tied=True, optimizer="adamw")


class Between(pl.Callback):
    """Does something between two steps, when all workers are at work."""

    def __init__(self, do: Callable[[Any], None]) -> None:
        self.do = do

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == AT:
            self.do(trainer.strategy)


def fit(*callbacks: pl.Callback, **swarm: Any) -> Outcome:
    options = {"microbatches": 4, "reproducible": True, **swarm}
    return fit_swarm(make, CASES["gpt"].loader(STEPS), 2, swarm=options, callbacks=[AllAtWork(), *callbacks])


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    return fit()


def _nothing_changed(run: Outcome, undisturbed: Outcome) -> None:
    assert difference(run.weights, undisturbed.weights) == 0.0
    assert difference(run.optimizer, undisturbed.optimizer) == 0.0
    report = run.trainer.strategy.report()  # type: ignore[attr-defined]
    assert report["bans"] == [] and report["counters"]["joins"] == 2 and "leaves" not in report["counters"]


# Random messages


def anything(rng: random.Random, depth: int = 3) -> Any:
    """What msgpack carries, as it arrives."""
    kind = rng.randrange(8 if depth else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(WORDS)
    if kind == 4:
        return rng.choice((None, True, False, float("nan"), float("inf"), -0.5))
    if kind == 5:
        return rng.randbytes(rng.randrange(20))
    if kind == 6:
        return tuple(anything(rng, depth - 1) for _ in range(rng.randrange(4)))
    return tree(rng, depth - 1)


def tree(rng: random.Random, depth: int = 3) -> dict[Any, Any]:
    """What comes as a header."""
    return {rng.choice(WORDS + NUMBERS): anything(rng, depth) for _ in range(rng.randrange(4))}


def of_type(hint: Any, rng: random.Random) -> Any:
    """A value that a message's field of this type can have."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return of_type(rng.choice(arguments), rng)
    if origin is Literal:
        return rng.choice(arguments)
    if origin is tuple:
        return tuple(of_type(arguments[0], rng) for _ in range(rng.randrange(3)))
    if origin is dict:
        return {of_type(arguments[0], rng): of_type(arguments[1], rng) for _ in range(rng.randrange(3))}
    if isinstance(hint, type) and issubclass(hint, Message):
        return of_class(hint, rng)
    plain = {int: rng.choice(NUMBERS), str: rng.choice(WORDS), float: 0.01 * rng.random(), bool: True, bytes: b"x"}
    return None if hint is type(None) else plain[hint] if hint in plain else anything(rng)


def of_class(message: type[Message], rng: random.Random) -> dict[str, Any]:
    """A valid one, whatever it means."""
    hints = typing.get_type_hints(message)
    return {field.name: of_type(hints[field.name], rng) for field in fields(message)}


def almost(message: type[Message], rng: random.Random) -> dict[str, Any]:
    """A valid one but for one field."""
    header = of_class(message, rng)
    name = rng.choice(list(header))
    change = rng.randrange(4)
    if change == 0:
        del header[name]
    elif change == 1:
        header["unknown"] = anything(rng)
    else:
        header[name] = anything(rng)
    return header


def tensors(rng: random.Random) -> list[Tensor]:
    """Some that came with a message."""
    shapes = [[rng.randrange(4) for _ in range(rng.randrange(3))] for _ in range(rng.choice((0, 0, 1, 2)))]
    return [torch.full(shape, rng.choice((0, 1, 7))).to(rng.choice(DTYPES)) for shape in shapes]


def header_for(call: str, rng: random.Random) -> dict[Any, Any]:
    return almost(MESSAGE_OF[call], rng) if call in MESSAGE_OF and rng.random() < 0.5 else tree(rng)


def check(call: str, header: Any, outcome: Any) -> None:
    """It is an answer, or an error that a peer may get."""
    allowed = not isinstance(outcome, BaseException) or isinstance(outcome, (SwarmError, asyncio.CancelledError))
    if not allowed or isinstance(outcome, RemoteError):
        raise AssertionError(f"{call} of {header}") from outcome


class Flood:
    """Random messages to every call that a peer answers."""

    def __init__(self, node: Node, trainer: str) -> None:
        self.node, self.trainer = node, trainer
        self.handlers: Mapping[str, Any] = node._answerer.handlers
        self.rng = random.Random(0)
        self.sent = 0

    async def pour(self, count: int) -> None:
        """So many straight to each handler; those that wait for something are let go of soon."""
        for call, handler in self.handlers.items():
            for _ in range(0, count, AT_ONCE):
                headers = [header_for(call, self.rng) for _ in range(AT_ONCE)]
                tasks = [asyncio.ensure_future(handler(self.caller(call, h), h, tensors(self.rng))) for h in headers]
                _, waiting = await asyncio.wait(tasks, timeout=0.005)
                for task in waiting:
                    task.cancel()
                for header, outcome in zip(headers, await asyncio.gather(*tasks, return_exceptions=True)):
                    check(call, header, outcome)

    def caller(self, call: str, header: dict[Any, Any]) -> str:
        """Each time another stranger, or the trainer with what is of another session."""
        self.sent += 1
        if call in OF_TRAINER and type(header.get("session")) is int and self.rng.random() < 0.5:
            header["session"] = 99
            return self.trainer
        return f"stranger {self.sent}"

    async def send(self, stranger: Node) -> None:
        """Over the network."""
        for call in self.handlers:
            headers = [header_for(call, self.rng) for _ in range(OVER_THE_NETWORK)]
            calls = [
                stranger.call(self.node.peer_id, call, header, tensors(self.rng), deadline_s=0.5) for header in headers
            ]
            for header, outcome in zip(headers, await asyncio.gather(*calls, return_exceptions=True)):
                check(call, header, outcome)


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("who", ["trainer", "worker"])
def test_ten_thousand_random_messages_to_every_call_change_nothing(who: str, undisturbed: Outcome) -> None:
    grown: list[int] = []

    def disturb(strategy: Any) -> None:
        trainer = strategy._peer.node
        node = trainer if who == "trainer" else strategy._local.strategies[0]._peer.node
        flood = Flood(node, trainer.peer_id)
        assert flood.handlers.keys() >= {"state", "trainer", *(("join", "log") if who == "trainer" else OF_TRAINER)}
        trainer.run(strategy._session.gather())  # So that it has a state to give.
        node.run(flood.pour(MESSAGES // 2))
        before = resident_bytes()
        node.run(flood.pour(MESSAGES // 2))
        grown.append(resident_bytes() - before)
        if who == "worker":
            assert not strategy._local.strategies[0]._peer.service.outbox._waiters
        with Node(run_id=strategy._run_id, initial_peers=trainer.maddrs) as stranger:
            stranger.run(flood.send(stranger))
        assert flood.sent == MESSAGES * len(flood.handlers)

    _nothing_changed(fit(Between(disturb)), undisturbed)
    assert grown[0] < 5e6, "nothing is kept of them"


def test_however_many_claim_to_be_the_new_trainer_a_living_one_is_kept(undisturbed: Outcome) -> None:
    def claim(strategy: Any) -> None:
        peer = strategy._local.strategies[0]._peer
        hold = peer.node._answerer.handlers["hold"]

        async def claim_all() -> list[Any]:
            # More than the streams that a trainer keeps open to one peer.
            return await asyncio.gather(*(hold(f"stranger {k}", {}, []) for k in range(400)), return_exceptions=True)

        outcomes = peer.node.run(claim_all())
        assert [o for o in outcomes if not isinstance(o, CallerError)] == []
        assert peer.trainer == strategy._peer.node.peer_id

    _nothing_changed(fit(Between(claim)), undisturbed)


# Without the secret


class Knock:
    """A stranger at every peer of a run, and what came of it."""

    def __init__(self, strategy: Any, secret: bytes | None) -> None:
        self.trainer: Node = strategy._peer.node
        self.nodes = [self.trainer, *(worker._peer.node for worker in strategy._local.strategies.values())]
        self.run_id = strategy._run_id
        with pytest.raises(MisconfigurationException, match="does not let this peer in"):
            Node(run_id=self.run_id, secret=secret, initial_peers=self.trainer.maddrs)
        self.stranger = Node(run_id=self.run_id, secret=secret)
        with self.stranger:
            self.refused = self.stranger.run(self.call_everything())
            self.stored = self.stranger.run(self.announce())

    async def call_everything(self) -> Counter[str]:
        """How many peers have not answered, by method."""
        refused: Counter[str] = Counter()
        for node in self.nodes:
            address, _, peer = node.maddrs[0].partition("/p2p/")
            await connect(self.dht.p2p, PeerID.from_base58(peer), [Multiaddr(address)])
            for method in node._answerer.handlers:
                with pytest.raises(PeerUnreachable, match="has another secret"):
                    await self.stranger.call(peer, method, self.header(method), deadline_s=10)
                refused[method] += 1
        return refused

    def header(self, method: str) -> dict[str, Any]:
        """What a peer with the secret would get an answer to."""
        return {"state": StateRequest(0, 1, 0).to_dict(), "fetch": FetchRequest("log/0").to_dict()}.get(method, {})

    async def announce(self) -> list[Any]:
        """What the peers say to records of the stranger's as a worker and as the run's newest trainer."""
        records = {
            "worker": WorkerRecord(0, 0, 0, "cpu", 1e6, 0, (), {}),
            "trainer": TrainerRecord(started_s=1e12),
        }
        answers = []
        for kind, record in records.items():
            key, value = DHTID.generate(source=f"{self.run_id}/{kind}"), msgpack.packb(record.to_dict())
            for node in self.nodes:
                peer = PeerID.from_base58(node.peer_id)
                answers.append(
                    await self.dht.protocol.call_store(
                        peer, [key], [value], get_dht_time() + 60, subkeys=[self.stranger.peer_id]
                    )
                )
        return answers

    @property
    def dht(self) -> DHTNode:
        return self.stranger.directory._dht


def test_a_run_with_a_secret_answers_and_believes_nobody_without_it(undisturbed: Outcome) -> None:
    knocks: list[Knock] = []

    def knock(strategy: Any) -> None:
        trainer = strategy._peer.node
        for secret in (None, b"another"):
            knocks.append(Knock(strategy, secret))
            assert knocks[-1].refused["state"] == knocks[-1].refused["trainer"] == 3
            assert knocks[-1].refused["fetch"] == 3 and knocks[-1].refused["join"] == 1
            assert not any(knocks[-1].stored)
        workers = {worker._peer.node.peer_id for worker in strategy._local.strategies.values()}
        for node in knocks[0].nodes:
            assert node.run(node.directory.read("worker", WorkerRecord)).keys() == workers
            assert node.run(announced_trainer(node)) == trainer.peer_id
        with Node(run_id=strategy._run_id, secret=b"swordfish", initial_peers=trainer.maddrs) as friend:
            answer, _ = friend.run(friend.call(trainer.peer_id, "ping", {}, deadline_s=10))
            assert answer == {"member": False, "session": 0}
            assert friend.run(friend.directory.read("worker", WorkerRecord)).keys() == workers

    run = fit(Between(knock), secret="swordfish", worker_options={"secret": "swordfish"})
    _nothing_changed(run, undisturbed)
    assert len(knocks) == 2


def test_a_secret_in_the_environment_is_as_good_and_local_workers_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def secrets(**arguments: str) -> tuple[bytes | None, set[str | None]]:
        strategy = SwarmStrategy(role="trainer", stages=3, **arguments)  # type: ignore[arg-type]
        node: Any = SimpleNamespace(maddrs=["x"])
        return strategy._secret, {environment.get(launcher.SECRET) for environment in strategy._environments(node)}

    monkeypatch.delenv("LIGHTNING_SWARM_SECRET", raising=False)
    assert secrets() == (None, {None})
    assert secrets(secret="swordfish") == (b"swordfish", {"swordfish"})
    monkeypatch.setenv("LIGHTNING_SWARM_SECRET", "swordfish")
    assert secrets() == (b"swordfish", {"swordfish"})
    assert secrets(secret="of the argument") == (b"of the argument", {"of the argument"})
