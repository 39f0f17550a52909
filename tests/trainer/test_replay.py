"""What workers recorded comes out as one process would have logged it."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_swarm.trainer.microbatches import Microbatch
from lightning_swarm.trainer.replay import merged_logs, replay
from lightning_swarm.worker.recorder import Recorder

PARTS = [Microbatch(None, 3, 0.75), Microbatch(None, 1, 0.25)]


def _logs(*values: Any, **options: Any) -> list[list[dict[str, Any]]]:
    return [[{"logs": [("loss", value, options)]}] for value in values]


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 5.0), ("amax", 5.0)]
)
def test_numbers_are_reduced_as_asked(reduce_fx: str, expected: float) -> None:
    ((name, value, options),) = merged_logs(_logs(torch.tensor(1.0), torch.tensor(5.0), reduce_fx=reduce_fx), PARTS)
    assert (name, float(value), options["batch_size"]) == ("loss", expected, 4)


def test_an_explicit_batch_size_is_the_weight() -> None:
    effects = [[{"logs": [("n", 1.0, {"batch_size": 1})]}], [{"logs": [("n", 4.0, {"batch_size": 2})]}]]
    ((_, value, options),) = merged_logs(effects, PARTS)
    assert float(value) == pytest.approx(3.0) and options["batch_size"] == 3


def test_calls_of_one_name_stay_apart() -> None:
    effects = [[{"logs": [("a", 1.0, {}), ("a", 3.0, {})]}], [{"logs": [("a", 5.0, {}), ("a", 7.0, {})]}]]
    assert [float(value) for _, value, _ in merged_logs(effects, PARTS)] == pytest.approx([2.0, 4.0])


class _Scored(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.auroc = MulticlassAUROC(3)
        self.seen: list[int] = []
        self.last = 0

    def step(self, scores: torch.Tensor, labels: torch.Tensor, index: int) -> None:
        self.log("accuracy", self.accuracy(scores, labels))
        self.auroc.update(scores, labels)
        self.log("auroc", self.auroc)
        self.seen.append(index)
        self.last = index


def test_metrics_lists_and_attributes_come_home_as_if_computed_there() -> None:
    scores, labels = torch.rand(12, 3, generator=torch.Generator().manual_seed(1)).softmax(-1), torch.arange(12) % 3
    worker, home, reference = _Scored(), _Scored(), _Scored()
    recorder = Recorder(worker, lambda: True)
    parts = [Microbatch(None, 8, 8 / 12), Microbatch(None, 4, 4 / 12)]
    effects = []
    for index, rows in enumerate((slice(0, 8), slice(8, 12))):
        recorder.begin({})
        worker.step(scores[rows], labels[rows], index)
        recorded = recorder.end()
        effects.append([vars(recorded)])
    logged: dict[str, Any] = {}
    object.__setattr__(home, "log", lambda name, value, **options: logged.update({name: value}))
    object.__setattr__(reference, "log", lambda *args, **options: None)
    replay(home, effects, parts)
    for index, rows in enumerate((slice(0, 8), slice(8, 12))):
        reference.step(scores[rows], labels[rows], index)
    assert torch.allclose(home.accuracy.compute(), reference.accuracy.compute())
    assert torch.allclose(home.auroc.compute(), reference.auroc.compute())
    assert logged["auroc"] is home.auroc
    assert float(logged["accuracy"]) == pytest.approx(float(reference.accuracy.compute()))
    assert (home.seen, home.last) == ([0, 1], 1)
    assert (worker.seen, worker.last, worker.accuracy._update_count) == ([], 0, 0)


def test_what_a_ghostly_prefix_logs_is_not_recorded() -> None:
    worker = _Scored()
    recorder = Recorder(worker, lambda: False)
    recorder.begin({})
    worker.log("x", 1.0)
    assert recorder.end().logs == []
