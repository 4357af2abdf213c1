"""A loss that is not finite: which step, which samples, and where those came from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import TrainError
from millrace.feed.explain import describe
from millrace.feed.feed import Feed

MOST = 4  # samples that a message tells of


def check_losses(losses: list[float], last_step: int, feed: Feed, run: Path) -> None:
    """Raises for the first of these losses, of the steps up to ``last_step``, that is not finite."""
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            behind = len(losses) - number  # batches from the end of this list to the start of the bad one
            raise _stopped(loss, last_step - behind + 1, feed.position - behind * feed.batch, feed, run)


def _stopped(loss: float, step: int, position: int, feed: Feed, run: Path) -> TrainError:
    found = describe(feed.view, feed.order, position, position + feed.batch, step - 1)
    bad = _bad_samples(feed, found.samples)
    chosen = [row for row in found.rows if not bad or row["sample"] in bad]
    told = "; ".join(_tell(row) for row in chosen[:MOST])
    if bad:
        what = f"samples {sorted(bad)[:20]} hold values that are not finite"
    else:
        what = f"samples {found.samples[:20].tolist()} and so on hold only finite values: lower optimizer.lr"
    return TrainError(
        f"the loss of step {step} is {loss}; {what} ({told}); all of them: millrace explain {run} --step {step}; "
        "the last checkpoint is from before",
        step=step, samples=sorted(bad) or found.samples.tolist(),
    )  # fmt: skip


def _bad_samples(feed: Feed, samples: Any) -> set[int]:
    """Samples of which a float is NaN or infinite."""
    bad: set[int] = set()
    for value in feed.view[samples].values():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            rows = ~np.isfinite(value.reshape(len(value), -1)).all(axis=1)
            bad |= set(samples[rows].tolist())
    return bad


def _tell(row: dict[str, Any]) -> str:
    first, last = row.get("rows", ("?", "?"))
    columns = ", ".join(f"{name}={str(value)[:60]}" for name, value in row.get("columns", {}).items() if name != "hash")
    return f"sample {row['sample']}: rows {first} to {last} of record {row.get('record')} ({columns})"
