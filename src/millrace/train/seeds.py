"""Randomness that follows the step: every generator is seeded again at every step, and kernels that always do the same.

What dropout draws is then a function of (seed, step, rank), and nothing of any generator has to be saved to resume it.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from millrace.order.hashing import mix64


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch on every device, numpy and random for one step of one rank; step 0 is the start of the weights."""
    key = mix64(mix64(mix64(seed ^ 0x747261696E) ^ step) ^ rank)
    number = key & (1 << 63) - 1
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # torch.manual_seed formats where it was called from, for devices that are not there: 0.1 ms at every step.
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            generator.manual_seed(number)
    else:
        torch.manual_seed(number)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def make_deterministic() -> None:
    """From here on torch takes no kernel whose result depends on which thread was first; it refuses what has no other."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
    torch.use_deterministic_algorithms(True)
