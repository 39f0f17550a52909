"""Replayable randomness: the same microbatch of the same step draws the same numbers on whatever worker runs it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def replay_seed(run_seed: int, step: int, microbatch: int, stage: int = 0) -> int:
    """The seed with which a stage begins its own range; that of stage 0 is also where the step begins on every stage.

    Example::

        >>> replay_seed(7, step=3, microbatch=1) == replay_seed(7, step=3, microbatch=1)
        True
        >>> replay_seed(7, step=3, microbatch=1) == replay_seed(7, step=3, microbatch=2)
        False

    """
    words = ",".join(str(number) for number in (run_seed, step, microbatch, stage))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1


def stage_seed(seed: int, stage: int) -> int:
    """The seed of a stage's own range, from the seed with which the step begins; for stage 0 it is the same."""
    return (seed + stage * 0x9E3779B97F4A7C15) % 2**63


def seed_everything(seed: int) -> None:
    """Seeds torch on all devices that are in use, Python's and NumPy's generators."""
    # torch.manual_seed also queues a call, with a stack trace, for every kind of device that is not initialised yet:
    # milliseconds and a growing list, for every microbatch.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Whatever is drawn inside, the generators go on afterwards as if nothing had been."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
