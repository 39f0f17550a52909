"""One peer calls another over loopback, through our streams and through hivemind's own calls, in turn.

Two processes, each with a node of ours and a ``hivemind.P2P`` as hivemind starts it; "ours by libp2p" is a node that
takes no shortcut between peers of one machine. A call asks for a tensor, as a
fetch does: the request is small, the reply has the bytes. hivemind's unary calls end at 2 MB; its streaming calls are
measured with parts of 1 MB. Every figure is the median of ``--rounds`` rounds in which the ways
take turns; CPU time is that of all processes, ``p2pd`` included.

    python benchmarks/transport.py [--rounds 5] [--megabytes 100] [--json FILE]
"""

import argparse
import asyncio
import itertools
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _report import Report, add_json_argument
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto.runtime_pb2 import ExpertRequest
from torch import Tensor

from lightning_swarm.swarm.node import Node

PART_BYTES = 1 << 20
UNARY_LIMIT_BYTES = 2 << 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the large tensor")
    add_json_argument(parser)
    arguments = parser.parse_args()
    large = int(arguments.megabytes * 1e6) // 4 * 4
    sizes = {"empty": (0, 300), "131 kB": (131_072, 100), "1 MB": (1 << 20, 30), f"{large / 1e6:g} MB": (large, 1)}
    report = Report("transport", rounds=arguments.rounds)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=answer, args=(theirs,), daemon=True)
    other.start()
    try:
        Caller(ours).measure(sizes, arguments.rounds, report)
    finally:
        ours.close()
        other.join(10)
    report.finish(arguments.json)


class Caller:
    """The calling process."""

    def __init__(self, pipe: Connection) -> None:
        torch.set_num_threads(1)
        self.pipe = pipe
        self.peer, maddrs, self.hivemind_peer, hivemind_maddrs = pipe.recv()
        self.node = Node(run_id="transport", initial_peers=maddrs)
        self.libp2p_node = Node(run_id="transport", initial_peers=maddrs, shortcuts=False)
        self.p2p: P2P = self.node.run(P2P.create(initial_peers=hivemind_maddrs))

    def measure(self, sizes: dict[str, tuple[int, int]], rounds: int, report: Report) -> None:
        """Fills the report."""
        for name, (size, calls) in sizes.items():
            ways: dict[str, tuple[Node, Callable[[int], Awaitable[Any]]]] = {
                "ours": (self.node, partial(self.ours, self.node)),
                "ours by libp2p": (self.libp2p_node, partial(self.ours, self.libp2p_node)),
                "hivemind streaming": (self.node, self.streaming),
            }
            if size < UNARY_LIMIT_BYTES:
                ways["hivemind unary"] = (self.node, self.unary)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            cpu: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(-1, rounds):
                for way, (node, call) in ways.items():
                    elapsed, used = node.run(self.round(call, size, calls))
                    if number >= 0:
                        seconds[way].append(elapsed)
                        cpu[way].append(used)
            middle = {way: statistics.median(times) for way, times in seconds.items()}
            used_middle = {way: statistics.median(times) for way, times in cpu.items()}
            for way in ways:
                rate = f"{size / middle[way] / 1e6:,.0f} MB/s, " if size else ""
                report.figure(
                    f"{name}, {way}", middle[way] * 1e3, "ms", f"{rate}{used_middle[way] * 1e3:.3g} ms of CPU"
                )
            for us, they in itertools.product(list(ways)[:2], list(ways)[2:]):
                report.ratio(f"{name}: speed, {us} / {they}", middle[they] / middle[us], at_least=1.0)
                report.ratio(f"{name}: CPU time, {us} / {they}", used_middle[us] / used_middle[they], at_most=1.0)
        self.node.run(self.p2p.shutdown())
        self.libp2p_node.close()
        self.node.close()

    async def round(self, call: Callable[[int], Awaitable[Any]], size: int, calls: int) -> tuple[float, float]:
        """Seconds and CPU seconds of one call."""
        loop = asyncio.get_running_loop()
        used = await loop.run_in_executor(None, self.cpu_seconds)
        start = time.perf_counter()
        for _ in range(calls):
            await call(size)
        elapsed = time.perf_counter() - start
        return elapsed / calls, (await loop.run_in_executor(None, self.cpu_seconds) - used) / calls

    def cpu_seconds(self) -> float:
        """Of both processes and their daemons."""
        self.pipe.send(None)
        return cpu_seconds(os.getpid()) + float(self.pipe.recv())

    async def ours(self, node: Node, size: int) -> None:
        _, tensors = await node.call(self.peer, "get", {"size": size}, deadline_s=600)
        assert sum(tensor.nbytes for tensor in tensors) == size

    async def unary(self, size: int) -> None:
        peer = PeerID.from_base58(self.hivemind_peer)
        reply = await self.p2p.call_protobuf_handler(peer, "unary", ExpertRequest(uid=str(size)), ExpertRequest)
        assert len(reply.metadata) == size

    async def streaming(self, size: int) -> None:
        peer = PeerID.from_base58(self.hivemind_peer)
        received = -1
        while received != size:  # under load hivemind's stream sometimes ends before its last part
            replies = await self.p2p.iterate_protobuf_handler(
                peer, "streaming", ExpertRequest(uid=str(size)), ExpertRequest
            )
            parts = [part.metadata async for part in replies]
            received = len(b"".join(parts))


def answer(pipe: Connection) -> None:
    """The answering process."""
    torch.set_num_threads(1)
    data = torch.empty(0, dtype=torch.uint8)

    def get(size: int) -> Tensor:
        nonlocal data
        if data.numel() < size:
            data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        return data[:size]

    async def ours(
        caller: str, header: dict[str, Any], tensors: list[Tensor]
    ) -> tuple[dict[str, Any], Sequence[Tensor]]:
        return {}, [get(header["size"])] if header["size"] else []

    async def unary(request: ExpertRequest, context: P2PContext) -> ExpertRequest:
        return ExpertRequest(metadata=get(int(request.uid)).numpy().tobytes())

    async def streaming(request: ExpertRequest, context: P2PContext) -> AsyncIterator[ExpertRequest]:
        size = int(request.uid)
        for start in range(0, max(size, 1), PART_BYTES):
            yield ExpertRequest(metadata=get(size)[start : start + PART_BYTES].numpy().tobytes())

    async def start_hivemind() -> P2P:
        p2p = await P2P.create()
        await p2p.add_protobuf_handler("unary", unary, ExpertRequest)
        await p2p.add_protobuf_handler("streaming", streaming, ExpertRequest, stream_output=True)
        return p2p

    with Node(run_id="transport") as node:
        node.serve({"get": ours})
        p2p = node.run(start_hivemind())
        addresses = [str(maddr) for maddr in node.run(p2p.get_visible_maddrs())]
        pipe.send((node.peer_id, node.maddrs, p2p.peer_id.to_base58(), addresses))
        try:
            while True:
                pipe.recv()
                pipe.send(cpu_seconds(os.getpid()))
        except EOFError:
            node.run(p2p.shutdown())


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all below it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


if __name__ == "__main__":
    main()
