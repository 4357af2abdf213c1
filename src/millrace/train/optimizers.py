"""Optimisers of torch, and the learning rate as a function of the step: no schedule has to be saved."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

from millrace.train.settings import Config
from millrace.train.settings import Optimizer as Options


def build_optimizer(model: nn.Module, options: Options) -> Optimizer:
    """The optimiser. Matrices decay; vectors (biases, norms) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if options.name == "adamw":
        can_fuse = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
        return AdamW(groups, lr=options.lr, betas=options.betas, fused=can_fuse)
    if options.name == "adafactor":
        return Adafactor(groups, lr=options.lr)
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)


def learning_rate(step: int, config: Config) -> float:
    """The learning rate of a step, counted from 1: a linear warm-up, then the schedule down to ``min_lr``."""
    options = config.optimizer
    if step <= options.warmup:
        return options.lr * (step / options.warmup)
    end = options.decay_steps or config.train.max_steps
    done = min(1.0, (step - options.warmup) / max(1, end - options.warmup))
    if options.schedule == "constant":
        return options.lr
    left = 1.0 - done if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return options.min_lr + (options.lr - options.min_lr) * left


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
