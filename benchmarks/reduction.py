"""All-reduce over loopback: the sum of a large vector among 2, 4 and 8 peers, each a process of its own.

The same processes run hivemind's ``AllReduceRunner`` over the same vector and group, in turn with ours, so that both
see the same machine. A round takes as long as its slowest peer; printed are medians.

    python benchmarks/reduction.py [--megabytes 100] [--peers 2 4 8] [--codec none] [--rounds 3] [--json FILE]
"""

import argparse
import asyncio
import hashlib
import multiprocessing as mp
import statistics
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import uvloop
from _report import Report, add_json_argument
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.p2p import P2P, PeerID
from torch import Tensor

from lightning_swarm.swarm import outbox
from lightning_swarm.swarm.calls import Group, GroupMember
from lightning_swarm.swarm.node import Node
from lightning_swarm.worker.reduction import all_reduce

T = TypeVar("T")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the vector, float32")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--codec", default="none", help="of our reduction: none, fp16, bf16 or int8")
    parser.add_argument("--rounds", type=int, default=3)
    add_json_argument(parser)
    arguments = parser.parse_args()
    report = Report("reduction", megabytes=arguments.megabytes, codec=arguments.codec, rounds=arguments.rounds)
    for n in arguments.peers:
        row = measure(n, arguments.megabytes, arguments.codec, arguments.rounds)
        report.figure(f"{n} peers: ours", row.seconds, "s")
        report.figure(f"{n} peers: hivemind", row.hivemind_seconds, "s")
        report.figure(
            f"{n} peers: sent by a peer", row.megabytes_sent, "MB", f"2 (n - 1) / n are {row.ideal_megabytes:g}"
        )
        report.ratio(f"{n} peers: hivemind's time / ours", row.hivemind_seconds / row.seconds, at_least=1.0)
        least = None if arguments.codec != "none" else 0.97
        ratio = row.megabytes_sent / row.ideal_megabytes
        report.ratio(f"{n} peers: sent / 2 (n - 1) / n", ratio, at_least=least, at_most=1.03)
    report.finish(arguments.json)


@dataclass(frozen=True)
class Row:
    """What was measured with one number of peers."""

    seconds: float
    hivemind_seconds: float
    megabytes_sent: float
    ideal_megabytes: float


def measure(n: int, megabytes: float, codec: str, rounds: int) -> Row:
    """Start the peers, let them reduce in turn with both, end them."""
    context = mp.get_context("spawn")
    length = int(megabytes * 1e6 / 4)
    pipes, processes = [], []
    try:
        addresses: list[Any] = []
        for rank in range(n):
            ours, theirs = context.Pipe()
            processes.append(
                context.Process(target=peer, args=(theirs, rank, length, codec, addresses[:1]), daemon=True)
            )
            processes[-1].start()
            pipes.append(ours)
            if rank == 0:
                addresses.append(ours.recv())
        addresses += [pipe.recv() for pipe in pipes[1:]]
        for pipe in pipes:
            pipe.send(addresses)
        results: dict[str, list[list[dict[str, Any]]]] = {"ours": [], "hivemind": []}
        # The first round of each opens connections and is not counted.
        for number in range(rounds + 1):
            for kind, answers in results.items():
                for phase in ("prepare", "run"):
                    for pipe in pipes:
                        pipe.send((kind, phase, number))
                    replies = [pipe.recv() for pipe in pipes]
                answers.append(replies)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    for answers in results["ours"]:
        assert len({answer["digest"] for answer in answers}) == 1, "the peers have different sums"
    seconds, hivemind_seconds = (
        statistics.median(max(answer["seconds"] for answer in answers) for answers in results[kind][1:])
        for kind in ("ours", "hivemind")
    )
    sent = max(answer["sent"] for answers in results["ours"][1:] for answer in answers) / 1e6
    return Row(seconds, hivemind_seconds, sent, 2 * (n - 1) / n * length * 4 / 1e6)


def peer(pipe: Connection, rank: int, length: int, codec: str, first: Sequence[Any]) -> None:
    """The process of one peer: answers every request of the parent with its figures."""
    torch.set_num_threads(1)
    vector = torch.randn(length, generator=torch.Generator().manual_seed(rank))
    ours = Ours(codec, first[0]["maddrs"] if first else [])
    hivemind = Hivemind(first[0]["hivemind_maddrs"] if first else [])
    pipe.send(
        {
            "peer": ours.node.peer_id,
            "maddrs": ours.node.maddrs,
            "hivemind_peer": hivemind.peer,
            "hivemind_maddrs": hivemind.maddrs,
        }
    )
    addresses = pipe.recv()
    while (request := pipe.recv()) is not None:
        kind, phase, number = request
        runner, key = (ours, "peer") if kind == "ours" else (hivemind, "hivemind_peer")
        if phase == "prepare":
            pipe.send(runner.prepare(vector, [address[key] for address in addresses], number))
        else:
            pipe.send(runner.run())
    ours.node.close()
    hivemind.close()


class Ours:
    """This package's reduction over a `Node`."""

    def __init__(self, codec: str, initial_peers: Sequence[str]) -> None:
        self._codec = codec
        self._outbox = outbox.Outbox()
        self.node = Node(run_id="benchmark", initial_peers=initial_peers)
        self.node.serve({"fetch": self._outbox.answer_fetch})

    async def _fetch(self, peer_id: str, key: str, deadline_s: float) -> Sequence[Tensor]:
        return (await outbox.fetch(self.node, peer_id, key, deadline_s=deadline_s)).tensors

    def prepare(self, vector: Tensor, peers: Sequence[str], number: int) -> None:
        """Before the clock runs; everybody has what the last round left here for others."""
        self._outbox.drop(lambda key: True)
        self._vector, self._number = vector, number
        self._group = Group("stage0", (), tuple(GroupMember(peer_id, 1.0, True) for peer_id in peers))

    def run(self) -> dict[str, Any]:
        """One reduction."""
        sent, started = self._sent(), time.perf_counter()
        result = self.node.run(
            all_reduce(
                self._vector,
                self._group,
                step=self._number,
                attempt=0,
                me=self.node.peer_id,
                fetch=self._fetch,
                outbox=self._outbox,
                codec=self._codec,
                deadline_s=120.0,
            )
        )
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "sent": self._sent() - sent, "digest": hashlib.sha1(result.numpy()).hexdigest()}

    def _sent(self) -> int:
        return sum(self.node.traffic[0].values())


class Hivemind:
    """hivemind's ``AllReduceRunner`` on an event loop of its own."""

    def __init__(self, initial_peers: Sequence[str]) -> None:
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._p2p = self._run(P2P.create(initial_peers=initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"]))
        self.peer = self._p2p.peer_id.to_base58()
        self.maddrs = [str(maddr) for maddr in self._run(self._p2p.get_visible_maddrs())]

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def prepare(self, vector: Tensor, peers: Sequence[str], number: int) -> None:
        """Before the clock runs: a runner fails when another one calls it before it is there."""
        name = f"round{number}"

        async def make() -> AllReduceRunner:
            runner = AllReduceRunner(
                p2p=self._p2p,
                servicer_type=AllReduceRunner,
                prefix=name,
                group_id=name.encode(),
                tensors=[vector],
                ordered_peer_ids=[PeerID.from_base58(peer) for peer in peers],
                peer_fractions=tuple(1 / len(peers) for _ in peers),
            )
            await runner.add_p2p_handlers(self._p2p, namespace=name)
            return runner

        self._vector, self._runner = vector, self._run(make())

    def run(self) -> dict[str, Any]:
        """One reduction, to the sum of each tensor, as ours."""

        async def collect() -> list[Tensor]:
            return [self._vector + delta async for delta in self._runner]

        started = time.perf_counter()
        self._run(collect())
        return {"seconds": time.perf_counter() - started}

    def close(self) -> None:
        """Ends its daemon."""
        self._run(self._p2p.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)


if __name__ == "__main__":
    main()
