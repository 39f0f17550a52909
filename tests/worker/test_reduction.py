"""A reduction gives all members the same sum, or nobody anything, and says whose fault that is."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.swarm import outbox as outboxes
from lightning_swarm.swarm.calls import Group, GroupMember
from lightning_swarm.swarm.errors import CallerError, NodeClosed, PeerUnreachable, pack_error, unpack_error
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.outbox import Outbox
from lightning_swarm.worker import entries, reduction
from lightning_swarm.worker.entries import ReductionFailed, chunks
from lightning_swarm.worker.reduction import Fetch, all_reduce
from lightning_swarm.worker.statistics import averaged_buffers, squared_norm, weighted_buffers


class Loopback:
    """Members in one process: outboxes without a network, with faults.

    Args:
        group: The members.
        fault: Called with ``(caller, peer, key, tensors)`` at every fetch; may return others, raise, or be a coroutine.
    """

    def __init__(self, group: Group, fault: Callable[..., object] | None = None) -> None:
        self.group = group
        self.fault = fault
        self.outboxes = {member.peer: Outbox() for member in group.members}
        self.sent: Counter[str] = Counter()

    def fetch(self, me: str) -> Fetch:
        async def fetch(peer: str, key: str, deadline_s: float) -> Sequence[Tensor]:
            tensors = list((await self.outboxes[peer].get(key, deadline_s)).tensors)
            if self.fault is not None:
                changed = self.fault(me, peer, key, tensors)
                tensors = await changed if asyncio.iscoroutine(changed) else changed
            self.sent[peer] += sum(tensor.nbytes for tensor in tensors)
            return [tensor.clone() for tensor in tensors]

        return fetch

    async def reduce_all(self, vectors: Sequence[Tensor], **options: object) -> list[Tensor | BaseException]:
        options = {"step": 0, "attempt": 0, "deadline_s": 20.0, **options}
        reductions = [
            all_reduce(vector, self.group, me=m.peer, fetch=self.fetch(m.peer), outbox=self.outboxes[m.peer], **options)
            for m, vector in zip(self.group.members, vectors, strict=True)
        ]
        return await asyncio.gather(*reductions, return_exceptions=True)


def group_of(n: int, weights: Sequence[float] | None = None, silent: Sequence[int] = ()) -> Group:
    weights = weights or [1.0] * n
    members = tuple(GroupMember(f"peer{i}", weights[i], i not in silent) for i in range(n))
    return Group("stage0", (), members)


def vectors_of(n: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(length, generator=generator).to(dtype) for _ in range(n)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_CHUNK", 1024)


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_all_members_get_the_same_bits(n: int, codec: str) -> None:
    vectors = vectors_of(n, 20_011)
    expected = torch.stack(vectors).double().sum(0)
    results = asyncio.run(Loopback(group_of(n)).reduce_all(vectors, codec=codec))
    tolerance = {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 5e-2}[codec]
    for result in results:
        assert torch.equal(result, results[0])
    assert (results[0] - expected).norm() < tolerance * expected.norm()


def test_sum_is_added_in_the_order_of_the_group() -> None:
    vectors = vectors_of(4, 5000)
    results = asyncio.run(Loopback(group_of(4, [3, 1, 0, 2])).reduce_all(vectors))
    expected = ((vectors[0] + vectors[1]) + vectors[2]) + vectors[3]
    assert all(torch.equal(result, expected) for result in results)


def test_float64_vectors_are_added_in_float64_and_rounded_once() -> None:
    vectors = vectors_of(3, 5000, torch.float64)
    loopback = Loopback(group_of(3))
    results = asyncio.run(loopback.reduce_all(vectors, dtype=torch.float32))
    expected = (vectors[0] + vectors[1] + vectors[2]).float()
    assert all(result.dtype == torch.float32 and torch.equal(result, expected) for result in results)


def test_half_precision_vectors_are_added_in_float32() -> None:
    vectors = vectors_of(5, 3000, torch.bfloat16)
    results = asyncio.run(Loopback(group_of(5)).reduce_all(vectors))
    total = vectors[0].float()
    for vector in vectors[1:]:
        total += vector
    assert all(torch.equal(result, total.to(torch.bfloat16)) for result in results)


def test_who_does_not_contribute_sends_no_slice_and_gets_the_sum() -> None:
    vectors = vectors_of(3, 6000)
    vectors[1] = torch.zeros(1).expand(6000)
    loopback = Loopback(group_of(3, silent=[1]))
    results = asyncio.run(loopback.reduce_all(vectors))
    assert all(torch.equal(result, vectors[0] + vectors[2]) for result in results)
    own = sum(chunk.stop - chunk.start for chunk in chunks(loopback.group, 6000)["peer1"])
    assert loopback.sent["peer1"] == own * 4 * 2


def test_nobody_contributes_gives_zeros() -> None:
    results = asyncio.run(Loopback(group_of(2, silent=[0, 1])).reduce_all(vectors_of(2, 3000)))
    assert all(torch.equal(result, torch.zeros(3000)) for result in results)


def test_single_member_that_does_not_contribute_gets_zeros() -> None:
    results = asyncio.run(Loopback(group_of(1, silent=[0])).reduce_all(vectors_of(1, 3000)))
    assert torch.equal(results[0], torch.zeros(3000))


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_empty_and_tiny_vectors(codec: str) -> None:
    for length in (0, 1, 3):
        vectors = vectors_of(4, length)
        results = asyncio.run(Loopback(group_of(4)).reduce_all(vectors, codec=codec))
        assert all(result.shape == (length,) and torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_survive_every_codec(codec: str, value: float) -> None:
    vectors = vectors_of(2, 5000)
    vectors[1][17] = value
    results = asyncio.run(Loopback(group_of(2)).reduce_all(vectors, codec=codec))
    assert all(not math.isfinite(squared_norm(result)) for result in results)


@pytest.mark.parametrize("scale", [1e-38, 1e-9, 1e9, 1e37])
def test_fp16_keeps_gradients_of_any_size(scale: float) -> None:
    vectors = [vector * scale for vector in vectors_of(2, 5000)]
    results = asyncio.run(Loopback(group_of(2)).reduce_all(vectors, codec="fp16"))
    expected = (vectors[0].double() + vectors[1]) / scale
    assert all((result / scale - expected).norm() < 2e-3 * expected.norm() for result in results)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_member_sends_as_little_as_possible(n: int) -> None:
    length = 100_003
    loopback = Loopback(group_of(n))
    asyncio.run(loopback.reduce_all(vectors_of(n, length)))
    ideal = 2 * (n - 1) / n * length * 4
    assert all(abs(sent / ideal - 1) < 0.03 for sent in loopback.sent.values())
    assert len(loopback.sent) == n


def test_parts_are_proportional_to_weights_and_cover_the_vector() -> None:
    for weights in ([1, 2, 5], [0, 1, 0], [0, 0, 0], [1e-9, 1, 1e9], [0.1, 0.1, 0.1]):
        for length in (0, 1, 700, 1_000_003):
            parts = chunks(group_of(3, weights), length)
            flat = [chunk for pieces in parts.values() for chunk in pieces]
            assert [0, *(chunk.stop for chunk in flat)] == [*(chunk.start for chunk in flat), length]
            assert all(0 < chunk.stop - chunk.start <= 1024 for chunk in flat)
    parts = chunks(group_of(3, [1, 2, 5]), 800_000)
    assert [sum(c.stop - c.start for c in p) for p in parts.values()] == pytest.approx([1e5, 2e5, 5e5], abs=256)


def test_arguments_that_make_no_sense_are_the_callers_fault() -> None:
    with pytest.raises(CallerError, match="must be finite and not negative"):
        chunks(group_of(2, [1, -1]), 10)
    vector = torch.zeros(10)
    for changed, message in (
        ({"me": "stranger"}, "must have stranger among its members"),
        ({"vector": torch.zeros(2, 5)}, "Cannot sum"),
        ({"vector": torch.zeros(10, dtype=torch.long)}, "Cannot sum"),
        ({"vector": torch.zeros(10, dtype=torch.float64), "codec": "int8"}, "needs the codec 'none'"),
    ):
        loopback = Loopback(group_of(2))
        arguments = {"vector": vector, "me": "peer0", "codec": "none", **changed}
        with pytest.raises(CallerError, match=message):
            asyncio.run(
                all_reduce(
                    arguments.pop("vector"),
                    loopback.group,
                    step=0,
                    attempt=0,
                    fetch=loopback.fetch("peer0"),
                    outbox=loopback.outboxes["peer0"],
                    deadline_s=1.0,
                    **arguments,
                )
            )
        assert not len(loopback.outboxes["peer0"])


@pytest.mark.parametrize("phase", ["slices", "sums"])
def test_dead_member_is_named_by_everybody_at_once(phase: str) -> None:
    def fault(me: str, peer: str, key: str, tensors: list[Tensor]) -> list[Tensor]:
        if peer == "peer2" and me == "peer0" and ("peer0" in key) == (phase == "slices"):
            raise PeerUnreachable("stream reset", peer)
        return tensors

    results = asyncio.run(Loopback(group_of(4), fault).reduce_all(vectors_of(4, 20_000)))
    failed = results[0]
    assert isinstance(failed, ReductionFailed)
    assert (failed.peer, failed.phase, failed.cause, failed.reported_by) == ("peer2", phase, "PeerUnreachable", None)
    for result in results[1:]:
        if isinstance(result, ReductionFailed):
            assert (result.peer, result.cause) == ("peer2", "PeerUnreachable")
            assert result.reported_by in ("peer0", "peer1", "peer3", None)
    if phase == "slices":
        assert all(isinstance(result, ReductionFailed) for result in results)


@pytest.mark.parametrize("phase", ["slices", "sums"])
def test_a_member_whose_own_node_has_ended_blames_itself(phase: str) -> None:
    def fault(me: str, peer: str, key: str, tensors: list[Tensor]) -> list[Tensor]:
        if me == "peer0" and ("peer0" in key) == (phase == "slices"):
            raise NodeClosed("This node's libp2p daemon is gone.")
        return tensors

    results = asyncio.run(Loopback(group_of(3), fault).reduce_all(vectors_of(3, 20_000)))
    failed = [result for result in results if isinstance(result, ReductionFailed)]
    assert failed and {(failure.peer, failure.cause) for failure in failed} == {("peer0", "NodeClosed")}


def test_member_that_never_answers_is_blamed_not_the_one_that_waits_for_it() -> None:
    async def run() -> list[object]:
        loopback = Loopback(group_of(3))
        vectors = vectors_of(3, 20_000)
        reductions = [
            all_reduce(
                vectors[i],
                loopback.group,
                step=0,
                attempt=0,
                me=f"peer{i}",
                fetch=loopback.fetch(f"peer{i}"),
                outbox=loopback.outboxes[f"peer{i}"],
                deadline_s=0.4,
            )
            for i in (0, 1)
        ]
        return await asyncio.gather(*reductions, return_exceptions=True)

    for result in asyncio.run(run()):
        assert isinstance(result, ReductionFailed)
        assert (result.peer, result.phase, result.cause) == ("peer2", "slices", "DeadlineExceeded")


def _cut(tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[-1][:-1]]


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize(
    "corrupt",
    [
        _cut,
        lambda tensors: [],
        lambda tensors: [torch.zeros(4, dtype=torch.int32)],
        lambda tensors: [*tensors, torch.zeros(3, dtype=torch.bfloat16)],
        lambda tensors: [torch.tensor([0xC1], dtype=torch.uint8)],
        lambda tensors: [torch.tensor([0x80], dtype=torch.uint8)],
        lambda tensors: [tensors[0].double()],
    ],
)
def test_garbage_is_a_protocol_error_of_its_sender(corrupt: Callable[[list[Tensor]], list[Tensor]], codec: str) -> None:
    def fault(me: str, peer: str, key: str, tensors: list[Tensor]) -> list[Tensor]:
        return corrupt(tensors) if (me, peer) == ("peer0", "peer1") else tensors

    results = asyncio.run(Loopback(group_of(3), fault).reduce_all(vectors_of(3, 20_000), codec=codec))
    assert isinstance(results[0], ReductionFailed)
    assert (results[0].peer, results[0].cause) == ("peer1", "ProtocolError")


def test_next_attempt_succeeds_after_a_failed_one() -> None:
    failing = True

    def fault(me: str, peer: str, key: str, tensors: list[Tensor]) -> list[Tensor]:
        if failing and me == "peer1" and key.endswith("peer1/3"):
            raise PeerUnreachable("reset", peer)
        return tensors

    async def run() -> list[object]:
        nonlocal failing
        vectors = vectors_of(3, 20_000)
        loopback = Loopback(group_of(3), fault)
        assert all(isinstance(result, ReductionFailed) for result in await loopback.reduce_all(vectors))
        # What failed members leave behind is a few bytes for those who still ask.
        assert sum(outbox.bytes for outbox in loopback.outboxes.values()) < 20_000
        failing = False
        results = await loopback.reduce_all(vectors, attempt=1)
        assert all(torch.equal(result, vectors[0] + vectors[1] + vectors[2]) for result in results)
        return results

    asyncio.run(run())


def test_cancelled_member_fails_the_others_at_once() -> None:
    async def run() -> list[object]:
        loopback = Loopback(group_of(2))
        vectors = vectors_of(2, 50_000)
        tasks = [
            asyncio.ensure_future(
                all_reduce(
                    vectors[i],
                    loopback.group,
                    step=0,
                    attempt=0,
                    me=f"peer{i}",
                    fetch=loopback.fetch(f"peer{i}"),
                    outbox=loopback.outboxes[f"peer{i}"],
                    deadline_s=60.0,
                )
            )
            for i in range(2)
        ]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, failed = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(failed, ReductionFailed)
    assert (failed.peer, failed.cause) == ("peer0", "CancelledError")


def test_failed_reduction_crosses_to_the_trainer_with_the_blamed_peer() -> None:
    failure = ReductionFailed("peer2", "sums", "DeadlineExceeded", reported_by="peer1")
    arrived = unpack_error(pack_error(failure, caller="trainer"), "peer0")
    assert (arrived.peer, arrived.cause) == ("peer2", "DeadlineExceeded")
    assert "peer2 did not deliver its sums (DeadlineExceeded, as peer1 reports)" in str(arrived)


def test_event_loop_never_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def watched(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            threads.add(threading.current_thread().name)
            return function(*args)

        return call

    for name in ("pack", "unpack"):
        monkeypatch.setattr(reduction, name, watched(getattr(reduction, name)))
    executor = ThreadPoolExecutor(1, thread_name_prefix="elsewhere")
    asyncio.run(Loopback(group_of(3)).reduce_all(vectors_of(3, 5000), codec="int8", executor=executor))
    assert threads == {"elsewhere_0"}


def test_reduction_over_real_nodes() -> None:
    with Node(run_id="reduction") as first:
        others = [Node(run_id="reduction", initial_peers=first.maddrs) for _ in range(2)]
        nodes = [first, *others]
        try:
            group = Group("stage1", (), tuple(GroupMember(node.peer_id, 1.0, True) for node in nodes))
            vectors = vectors_of(3, 40_000)
            futures = []
            for node, vector in zip(nodes, vectors, strict=True):
                outbox = Outbox()
                node.serve({"fetch": outbox.answer_fetch})

                async def fetch(peer: str, key: str, deadline_s: float, node: Node = node) -> Sequence[Tensor]:
                    return (await outboxes.fetch(node, peer, key, deadline_s=deadline_s)).tensors

                coroutine = all_reduce(
                    vector,
                    group,
                    step=3,
                    attempt=0,
                    me=node.peer_id,
                    fetch=fetch,
                    outbox=outbox,
                    codec="int8",
                    deadline_s=30.0,
                )
                futures.append(node.spawn(coroutine, "reduction"))
            results = [future.result(30.0) for future in futures]
        finally:
            for node in others:
                node.close()
    expected = sum(vectors)
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0] - expected).norm() < 0.05 * expected.norm()


def test_squared_norm_is_exact_and_does_not_depend_on_threads() -> None:
    gradients = [torch.randn(100_003), torch.randn(7, 11), torch.randn(()), torch.zeros(0), torch.randn(50_000).half()]
    expected = math.fsum(float(x) ** 2 for gradient in gradients for x in gradient.flatten().tolist())
    threads = torch.get_num_threads()
    results = set()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.add(squared_norm(*gradients))
    finally:
        torch.set_num_threads(threads)
    assert len(results) == 1
    assert results.pop() == pytest.approx(expected, rel=1e-13)
    assert squared_norm() == 0.0
    assert squared_norm(torch.full((3,), 3e38)) == pytest.approx(2.7e77)
    assert math.isnan(squared_norm(torch.tensor([1.0, math.nan, math.inf])))


def test_running_buffers_are_averaged_by_samples() -> None:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(3) for _ in range(3)]
    before = {name: buffer.clone() for name, buffer in norms[0].named_buffers()}
    samples = [4, 12, 0]
    for norm, count in zip(norms, samples, strict=True):
        for batch in torch.randn(count, 3).split(4) if count else ():
            norm(batch)
    now = [dict(norm.named_buffers()) for norm in norms]
    vectors = [weighted_buffers(before, buffers, count) for buffers, count in zip(now, samples, strict=True)]
    results = asyncio.run(Loopback(group_of(3, silent=[2])).reduce_all(vectors))
    averaged = [averaged_buffers(before, result) for result in results]
    for name in before:
        assert all(torch.equal(buffers[name], averaged[0][name]) for buffers in averaged)
        assert averaged[0][name].dtype == before[name].dtype
    expected = (now[0]["running_var"].double() * 4 + now[1]["running_var"].double() * 12) / 16
    torch.testing.assert_close(averaged[0]["running_var"], expected.float())
    assert averaged[0]["num_batches_tracked"] == 4


def test_buffers_that_do_not_change_stay_bit_equal() -> None:
    before = {
        "mask": torch.full((2, 2), -math.inf),
        "table": torch.randn(5),
        "flags": torch.tensor([True, False]),
        "phase": torch.polar(torch.ones(3), torch.randn(3)),
    }
    now = {**before, "flags": torch.tensor([True, True])}
    total = weighted_buffers(before, before, 3) + weighted_buffers(before, now, 5) + weighted_buffers(before, now, 7)
    averaged = averaged_buffers(before, total)
    for name in ("mask", "table", "phase"):
        assert torch.equal(averaged[name], before[name])
    assert averaged["flags"].tolist() == [True, True]
    nobody = averaged_buffers(before, weighted_buffers(before, now, 0))
    assert all(torch.equal(nobody[name], before[name]) for name in before)
