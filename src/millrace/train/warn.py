"""What a person should know before a run takes its first step: it cannot begin, or it may not be what was wanted."""

from __future__ import annotations

from millrace.store.store import Store
from millrace.train.settings import Config, Data
from millrace.view.blocks import Blocks
from millrace.view.view import View
from millrace.view.windows import Windows


def why_empty(view: View, store: Store, data: Data) -> str:
    """Which keys ask for more rows than there are, and how many there are."""
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


def said_before(step: int, config: Config, samples: int) -> list[str]:
    """Lines for a run that stands at a step, over a view of so many samples."""
    last, batch, said = config.train.max_steps, config.train.batch, []
    if step > last:
        said.append(
            f"warning: the run stands at step {step:,}, and train.max_steps = {last:,} asks for fewer: nothing is done, and "
            f"its model has {step:,} steps; start another with --run for a model of {last:,}"
        )
    elif step == last:
        said.append(f"already at step {step:,} of {last:,}: nothing left to do; raise train.max_steps to go on")
    if batch > samples:
        said.append(
            f"warning: train.batch = {batch:,} is larger than the {samples:,} samples: every step sees each of them about "
            f"{batch / samples:.0f} times; set "
            f"train.batch to {samples:,} or less"
        )
    return said
