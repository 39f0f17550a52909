"""The command prints tables, writes files and says what is wrong with its input."""

import json
import sys
from pathlib import Path

import pytest

from lightning_swarm.simulation.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "spot.csv"
    path.write_text("0,8\n" + "".join(f"{60 * k},{8 - k % 2}\n" for k in range(1, 20)))
    return path


def test_rebalancing_prints_a_table_and_writes_files(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    arguments = ["rebalancing", "--trace", f"{trace}:2", "--seeds", "2", "--rules", "smallest", "ours"]
    assert main([*arguments, "--stages", "2", "--json", str(figures), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "spot x2, 15 machines on average, download 60 s, 2 seeds" in " ".join(printed.split())
    cells = json.loads(figures.read_text())["cells"]
    assert [(cell["stages"], cell["rule"]) for cell in cells] == [(2, "smallest"), (2, "ours")]
    assert f"{cells[1]['percent']:.1f}" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_several_stages_are_drawn_as_bars(trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    arguments = ["rebalancing", "--trace", str(trace), "--seeds", "1", "--rules", "ours", "--stages", "2", "4"]
    assert main([*arguments, "--plot", str(plot)]) == 0
    assert "<svg" in plot.read_text()


def test_routing_prints_a_table_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    assert main(["routing", "--workers", "2", "4", "--stages", "2", "--json", str(figures), "--plot", str(plot)]) == 0
    assert "% of max flow" in capsys.readouterr().out
    assert [cell["workers"] for cell in json.loads(figures.read_text())["cells"]] == [2, 4]
    assert plot.exists()


@pytest.mark.parametrize("package", ["networkx", "matplotlib"])
def test_what_must_be_installed_first_is_said(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["routing", "--workers", "2", "--stages", "2", "--plot", str(tmp_path / "plot.png")]) == 2
    said = capsys.readouterr().err
    assert f"need{'s' if package == 'networkx' else ''} {package}: pip install '.[simulation]' in a clone" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rebalancing", "--trace", "nowhere.csv"], "No such file or directory: 'nowhere.csv'"),
        (["rebalancing", "--trace", "BAD"], "line 2: 'many' is not a number of machines"),
        (["rebalancing", "--trace", "SPOT:0"], "there must be at least one copy"),
        (["rebalancing", "--trace", "SPOT", "--download", "-1"], "download_s and notice_s cannot be negative"),
        (["routing", "--workers", "2", "--stages", "4"], "Every stage needs a worker"),
        (["routing", "--speeds", "0"], "speeds and --forward must be positive"),
    ],
)
def test_unusable_input_is_one_line_and_status_2(
    arguments: list[str], message: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("0,1\n5,many\n")
    assert main([text.replace("SPOT", str(trace)).replace("BAD", str(bad)) for text in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lightning-swarm simulate: ") and error.count("\n") == 1
    assert message in error
