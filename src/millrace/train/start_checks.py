"""Checks before the first step: why a run cannot begin, and what a person should know before it does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace import native
from millrace.errors import ConfigError
from millrace.feed.feed import Feed
from millrace.store.store import Store
from millrace.train.settings import OWN_MODELS, Config, Data
from millrace.view.blocks import Blocks
from millrace.view.view import View
from millrace.view.windows import Windows


def why_empty(view: View, store: Store, data: Data) -> str:
    """The message for a view without samples: which keys ask for more rows than there are."""
    split = f"the split {data.split!r} of {store.path}"
    if isinstance(view, Windows):
        keys = f"data.lookback = {data.lookback:,}, data.horizon = {data.horizon:,}, data.lead = {data.lead:,}"
        return (
            f"{keys} need a series of {view.span:,} rows, and the longest in {split} has {view.longest:,}; lower data.lookback "
            "or data.horizon"
        )
    if isinstance(view, Blocks):
        tokens = f"{data.length + 1:,} tokens, and {split} has {store.num_rows:,}"
        return f"data.length = {data.length:,} needs {tokens}; lower data.length"
    return f"{split} has no samples; train on another split, or prepare more data"


def check_batch_memory(feed: Feed, world_size: int) -> None:
    """Refuses a batch whose rows memory cannot hold. Later the system would kill the process without a word.

    Only rows of a fixed size are counted, not what the model computes, so the estimate is never too high.
    """
    sample: Any = feed.view[np.zeros(1, np.int64)]
    sample_bytes = sum(getattr(value, "nbytes", 0) for value in sample.values())
    batches = feed.depth + 1  # those made ahead, and the one in use
    ranks_here = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    needed, memory = sample_bytes * feed.batch * batches * ranks_here // world_size, native.memory_bytes()
    if needed > memory:
        raise ConfigError(
            f"train.batch = {feed.batch:,} needs {needed / 2**30:.1f} GiB of memory ({sample_bytes:,} bytes a sample, "
            f"{batches} batches at a time), and there are {memory / 2**30:.1f} GiB; set train.batch to "
            f"{max(1, min(len(feed.view), feed.batch * memory // needed // 2)):,} or less"
        )


def start_warnings(step: int, config: Config, samples: int) -> list[str]:
    """Warnings for a run that stands at ``step``, over a view of ``samples`` samples."""
    last, batch, warnings = config.train.max_steps, config.train.batch, []
    if step > last:
        warnings.append(
            f"warning: the run stands at step {step:,}, and train.max_steps = {last:,} asks for fewer: nothing is done, and "
            f"its model has {step:,} steps; start another with --run for a model of {last:,}"
        )
    elif step == last:
        warnings.append(f"already at step {step:,} of {last:,}: nothing left to do; raise train.max_steps to go on")
    if batch > samples:
        warnings.append(
            f"warning: train.batch = {batch:,} is larger than the {samples:,} samples: every step sees each of them about "
            f"{batch / samples:.0f} times; set train.batch to {samples:,} or less"
        )
    return warnings


def check_columns(batch: Mapping[str, Any], config: Config) -> None:
    """Refuses a batch without what the models here read: only a transform can have left that out."""
    missing = [name for name in ("x", "y") if name not in batch]
    if missing and config.model.kind in OWN_MODELS:
        raise ConfigError(
            f"data.transform = {config.data.transform!r} returned {', '.join(batch) or 'no column'}, and {config.model.kind} "
            f"reads {missing[0]} too; return {{**batch, ...}} with what you change"
        )
