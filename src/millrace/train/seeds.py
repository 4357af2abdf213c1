"""Randomness that follows the step: every generator is seeded at every step. Also: kernels that always give the same bits.

Dropout is then a function of (seed, step, rank), and no state of a generator has to be saved.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from millrace.order.hashing import mix64


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch on every device, numpy and random for one step of one rank. Step 0 makes the weights."""
    key = mix64(mix64(mix64(seed ^ 0x747261696E) ^ step) ^ rank)
    number = key & (1 << 63) - 1
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # torch.manual_seed formats its call stack for devices that are not there: 0.1 ms at every step.
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            generator.manual_seed(number)
    else:
        torch.manual_seed(number)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def make_deterministic() -> None:
    """Makes torch use only kernels that give the same bits every time, and refuse operations without one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it at the first product
    torch.use_deterministic_algorithms(True)
