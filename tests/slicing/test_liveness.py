"""What a trace says, on traces written by hand."""

from __future__ import annotations

import torch

from lightning_swarm.slicing.facts import Facts
from lightning_swarm.slicing.liveness import read
from lightning_swarm.slicing.points import LeafSpec
from lightning_swarm.slicing.trace import Call, Kept, Op, Trace, Value


class Script:
    """Writes a trace by names: ``script.op("mul", "x", "weight", makes="y")``."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.names: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def value(self, name: str, kind: str, key: str | int | None = None, view_of: str | None = None) -> None:
        number = len(self.trace.values)
        storage = number if view_of is None else self.trace.values[self.names[view_of]].storage
        self.trace.values.append(Value(kind, storage, (2, 3), torch.float32, key))
        self.names[name] = number

    def op(self, name: str, *reads: str, makes: str = "", writes: str = "", view: bool = False, **flags: bool) -> None:
        if makes:
            self.value(makes, "made", view_of=reads[0] if view else None)
        self.trace.events.append(
            Op(
                name,
                tuple(self.names[read] for read in reads),
                writes=(self.names[writes],) if writes else (),
                makes=(self.names[makes],) if makes else (),
                flops=0.0 if view else 10.0,
                **flags,
            )
        )

    def call(self, module: str, *leaves: str) -> Call:
        number = self.counts.get(module, 0)
        self.counts[module] = number + 1
        spec = LeafSpec((2, 3), torch.float32, True, 24)
        call = Call(module, number, tuple(self.names[leaf] for leaf in leaves), (spec,) * len(leaves))
        self.trace.events.append(call)
        return call

    def close(self, call: Call) -> None:
        call.closed_at = len(self.trace.events)

    def returns(self, *names: str) -> None:
        self.trace.events.append(Kept(tuple(self.names[name] for name in names), returned=True))


def start() -> Script:
    script = Script()
    script.value("weight", "parameter", "weight")
    script.value("head", "parameter", "head")
    script.value("x", "leaf", 0)
    script.value("mask", "leaf", 1)
    script.value("buffer", "buffer", "buffer")
    return script


def works(facts: Facts) -> dict[str, bool]:
    return {str(candidate.point): not candidate.obstacles for candidate in facts.candidates}


def test_what_comes_from_parameters_must_be_among_the_arguments() -> None:
    script = start()
    script.op("mul", "x", "weight", makes="h")
    script.call("with_it", "h")
    script.call("without_it", "x")
    script.op("mul", "h", "head", makes="y")
    script.returns("y")
    facts = read(script.trace)
    assert works(facts) == {"with_it": True, "without_it": False}
    assert facts.parameter_uses == [(0, "weight"), (3, "head")]
    assert facts.candidates[0].flops_before == 10.0


def test_what_depends_on_the_batch_alone_need_not_cross() -> None:
    script = start()
    script.op("neg", "mask", makes="bias")
    script.op("mul", "x", "weight", makes="h")
    script.call("layer", "h", "bias")
    script.op("add", "h", "bias", makes="y")
    script.returns("y")
    facts = read(script.trace)
    assert facts.candidates[0].positions == (0,)
    assert facts.source_uses == [(1, frozenset({("leaf", 0)})), (3, frozenset({("leaf", 1)}))]


def test_a_leaf_that_is_only_prepared_is_not_needed_there() -> None:
    script = start()
    script.op("shift", "mask", makes="labels")
    script.op("mul", "x", "weight", makes="h")
    script.call("layer", "h")
    script.op("loss", "h", "labels", makes="y")
    facts = read(script.trace)
    needed_before_the_cut = [sources for index, sources in facts.source_uses if index < 2]
    assert needed_before_the_cut == [frozenset({("leaf", 0)})]


def test_noise_crosses_only_if_it_was_drawn_behind_the_first_ghost() -> None:
    script = start()
    script.op("rand", makes="early", random=True)
    script.op("mul", "x", "weight", makes="h")
    script.op("rand", makes="late", random=True)
    script.call("with_late", "h", "late", "early")
    script.call("without_late", "h", "early")
    script.op("add", "h", "late", makes="a")
    script.op("add", "a", "early", makes="y")
    facts = read(script.trace)
    assert works(facts) == {"with_late": True, "without_late": False}
    assert facts.candidates[0].positions == (0, 1)


def test_a_tensor_that_activations_are_written_into_crosses_from_then_on() -> None:
    script = start()
    script.op("zeros", makes="canvas")
    script.call("before", "x")
    script.op("mul", "x", "weight", makes="h")
    script.op("select", "canvas", makes="row", view=True)
    script.op("copy_", "row", "h", writes="row")
    script.call("with_it", "canvas")
    script.call("without_it", "x")
    script.op("sum", "canvas", makes="y")
    assert works(read(script.trace)) == {"before": True, "with_it": True, "without_it": False}


def test_two_views_of_one_tensor_do_not_cross_if_one_is_changed_later() -> None:
    script = start()
    script.op("mul", "x", "weight", makes="h")
    script.op("select", "h", makes="row", view=True)
    script.call("layer", "h", "row")
    script.op("add_", "row", "x", writes="row")
    script.op("sum", "h", makes="y")
    facts = read(script.trace)
    assert "a view of it" in facts.candidates[0].obstacles[0].text


def test_values_used_behind_the_call_are_held() -> None:
    script = start()
    script.op("mul", "x", "weight", makes="h")
    inner = script.call("branch", "h")
    script.op("mul", "h", "head", makes="b")
    script.close(inner)
    script.op("add", "h", "b", makes="y")
    script.returns("y")
    assert read(script.trace).candidates[0].held == (True,)


def test_one_tensor_twice_crosses_once() -> None:
    script = start()
    script.op("mul", "x", "weight", makes="h")
    script.call("layer", "h", "mask", "h")
    script.op("sum", "h", makes="y")
    candidate = read(script.trace).candidates[0]
    assert (candidate.positions, candidate.twins, candidate.bytes) == ((0,), ((2, 0),), 24)


def test_data_that_python_saw_are_needed_behind_too() -> None:
    script = start()
    script.op("item", "mask", looks=True)
    script.op("mul", "x", "weight", makes="h")
    facts = read(script.trace)
    assert facts.source_looks == [(0, frozenset({("leaf", 1)}))]


def test_a_number_read_from_an_activation_leaks_unless_its_call_is_over() -> None:
    script = start()
    script.op("mul", "x", "weight", makes="h")
    inner = script.call("router", "h")
    script.op("item", "h", looks=True)
    script.trace.events[-1].frame = inner  # type: ignore[union-attr]
    script.close(inner)
    script.call("after_router", "h")
    script.op("item", "h", looks=True)
    script.call("after_step", "h")
    script.op("sum", "h", makes="y")
    assert works(read(script.trace)) == {"router": True, "after_router": True, "after_step": False}
    inner.leaks_numbers = True
    assert not works(read(script.trace))["after_router"]


def test_shapes_alone_make_no_dependence() -> None:
    script = start()
    script.op("mul", "x", "weight", makes="h")
    script.op("zeros_like", "h", makes="zeros", blank=True)
    script.call("layer", "h")
    script.op("add", "h", "zeros", makes="y")
    facts = read(script.trace)
    assert works(facts) == {"layer": True}
    assert facts.candidates[0].positions == (0,)


def test_a_buffer_that_changes_on_both_sides_forbids_the_cut_between() -> None:
    script = start()
    script.op("mul", "x", "weight", makes="h")
    script.op("lerp_", "buffer", "h", writes="buffer")
    script.call("layer", "h")
    script.op("lerp_", "buffer", "h", writes="buffer")
    script.op("sum", "h", makes="y")
    facts = read(script.trace)
    assert works(facts) == {"layer": False}
    assert facts.buffer_writes == [(1, "buffer"), (3, "buffer")]
