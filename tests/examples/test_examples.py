"""The examples, as a user starts them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, script: str, *arguments: str) -> str:
    """What the script prints, run in ``folder``."""
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), EXAMPLES / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(topic: str) -> set[str]:
    return {line.strip() for line in topics[topic].splitlines() if len(line.strip()) > 25}


def test_text_held_out_is_quoted_nowhere_in_the_training_text() -> None:
    held_out = load("train_lm.py").HELD_OUT
    training = set().union(*(lines(name) for name in topics if name not in held_out))
    for name in held_out:
        assert len(lines(name) & training) <= 0.03 * len(lines(name)), name


def test_generated_text_has_the_length_asked_for() -> None:
    torch.manual_seed(0)
    model = load("train_lm.py").GPT(steps=2, width=16, layers=1, heads=2)
    assert len(model.generate(b"The ", 150)) == 150


@pytest.mark.slow
def test_language_model_ends_with_a_checkpoint_that_writes_text(tmp_path: Path) -> None:
    output = run(tmp_path, "train_lm.py", "--stages", "2", "--steps", "4")
    found = re.search(r"unigram entropy ([\d.]+) .* validation loss ([\d.]+)", output)
    assert found is not None, output
    assert 2.5 < float(found[1]) < 4 and float(found[2]) < 5.5
    assert len(list(tmp_path.glob("lightning_logs/train_lm/version_*/checkpoints/*.ckpt"))) == 1
    assert len(list(tmp_path.glob("lightning_logs/train_lm/version_*/events.out.tfevents.*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["0", "2"])
def test_digits_are_read_with_over_90_percent_accuracy(stages: str, tmp_path: Path) -> None:
    output = run(tmp_path, "train_digits.py", "--stages", stages, "--epochs", "5")
    found = re.search(r"test_accuracy\D+([\d.]+)", output)
    assert found is not None, output
    assert float(found[1]) > 0.9
