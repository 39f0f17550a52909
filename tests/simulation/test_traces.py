"""Traces are read, superposed, and refused with the line that is wrong."""

from pathlib import Path

import pytest

from lightning_swarm.simulation.network import Network, read_network
from lightning_swarm.simulation.traces import ChurnTrace, TraceError, read_trace


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t_seconds,n_nodes\n0.0,3\n10.5,5\n20,4\n", ChurnTrace("trace", 3, ((10.5, 2), (20.0, -1)), 20.0)),
        ("5,2\n5,3\n9,3\n", ChurnTrace("trace", 0, ((5.0, 2), (5.0, 1)), 9.0)),
        (
            "time_ms,op,node\n0,add,a\n1000,add,b\n\n2000, remove ,a\n3000,add,a\n",
            ChurnTrace("trace", 1, ((1.0, 1), (2.0, -1), (3.0, 1)), 3.0),
        ),
        ("1000,add,a\n", ChurnTrace("trace", 0, ((1.0, 1),), 1.0)),
    ],
)
def test_both_formats_are_read_with_and_without_a_header(tmp_path: Path, text: str, expected: ChurnTrace) -> None:
    assert read_trace(write(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "the trace has no rows"),
        ("t_seconds,n_nodes\n", 1, "the trace has no rows"),
        ("0,1\n1,x\n", 2, "'x' is not a number of machines"),
        ("0,1\n1,2\n2,-3\n", 3, "there cannot be -3 machines"),
        ("0,1\n5,2\n4,3\n", 3, "time goes back from 5 to 4"),
        ("0,1\nnan,3\n", 2, "nan is not a time"),
        ("0,1\n-1,3\n", 2, "-1 is not a time"),
        ("t_seconds,n_nodes\n\n0,1\nlater,3\n", 4, "'later' is not a time"),
        ("0,1\n1,2,3\n", 2, "expected 2 columns, got 3"),
        ("1,2,3,4\n", 1, "expected t_seconds,n_nodes or time_ms,op,node, got '1,2,3,4'"),
        ("0,add,a\n5,drop,a\n", 2, "'drop' is neither add nor remove"),
        ("0,add,a\n5,add,a\n", 2, "a is added twice"),
        ("0,add,a\n5,remove,b\n", 2, "b is removed but was never added"),
        ("0,add,a\n", 1, "the trace ends at 0 s"),
    ],
)
def test_bad_rows_are_named_by_their_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}, line {line}: {problem}"


def test_superposed_copies_keep_the_machines_and_the_length() -> None:
    trace = ChurnTrace("t", 2, ((10.0, 3), (40.0, -4), (70.0, 2)), 100.0)
    for seed in range(5):
        large = trace.superposed(4, seed)
        assert large.name == "t x4"
        assert large.end_s == 100.0
        assert large.mean_machines() == pytest.approx(4 * trace.mean_machines())
        level = large.initial
        for time, change in large.changes:
            level += change
            assert 0.0 < time < 100.0
            assert level >= 0
    assert trace.superposed(4, 0) == trace.superposed(4, 0) != trace.superposed(4, 1)


def test_network_is_read_and_is_symmetric(tmp_path: Path) -> None:
    path = write(tmp_path, "region_a,region_b,latency_ms,bandwidth_Mbit_per_s\nA,B,50,80\nA,C,10,8\n")
    network = read_network(path)
    assert network.regions == ("A", "B", "C")
    assert network.link("B", "A") == network.link("A", "B") == (0.05, 1e7)
    assert network.seconds("A", "B", 1e6) == pytest.approx(0.15)
    assert network.link("A", "A") == (0.0005, 1.25e9)
    assert Network().seconds("x", "y", 1e9) == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("region_a,region_b\nA,B\n", "line 1: no column bandwidth_Mbit_per_s, latency_ms"),
        (
            "region_a,region_b,latency_ms,bandwidth_Mbit_per_s\nA,B,1,1\nA,B,slow,1\n",
            "line 3: latency or bandwidth is not a number",
        ),
        ("region_a,region_b,latency_ms,bandwidth_Mbit_per_s\nA,B,1,0\n", "line 2: impossible link: 1.0 ms, 0.0 Mbit/s"),
    ],
)
def test_bad_networks_are_named_by_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_network(write(tmp_path, text))
