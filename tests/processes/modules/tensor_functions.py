"""Transforms that need torch, in a module of their own: to import it takes a second."""

import torch


def tensors(batch, rng):
    n = batch.num_samples
    return {
        "x": batch.x + 1, "step": torch.arange(n * 2).reshape(n, 2)[:, 1], "brain": torch.ones(n, 2, dtype=torch.bfloat16) / 3,
        "flag": torch.ones(n, dtype=torch.bool), "text": [str(k) for k in range(n)],
    }  # fmt: skip
