"""One thread, and Lightning speaks only when something is wrong."""

import logging
from collections.abc import Iterator

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only


@pytest.fixture(autouse=True)
def this_process_is_a_trainer() -> Iterator[None]:
    """After a test, too, that made a worker's strategy here: Lightning lets the process with rank 0 alone speak."""
    yield
    rank_zero_only.rank = 0  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    """Before any test: the tests share few cores with the peers that they start."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
