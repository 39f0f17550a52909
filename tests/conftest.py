"""One thread, and Lightning speaks only when something is wrong."""

import logging

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Before any test: the tests share few cores with the peers that they start."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
