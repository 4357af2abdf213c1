"""A loss or a gradient that is not finite: which step, which samples, and where those came from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import TrainError
from millrace.feed.explain import describe
from millrace.feed.feed import Feed
from millrace.order.orders import Order
from millrace.view.view import View

TOLD = 4  # samples that a message tells the rows of
LISTED = 20  # samples that it lists


def check_steps(losses: list[float], norms: list[float], last_step: int, feed: Feed, run: Path, saved: int) -> None:
    """Raises for the first of these steps, the last of which is ``last_step``, of which something is not finite.

    ``saved`` is the step of the last checkpoint, 0 where there is none.
    """
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        if math.isfinite(loss) and math.isfinite(norm):
            continue
        behind = len(losses) - number  # batches from the end of this list to the start of the bad one
        step, position = last_step - behind + 1, feed.position - behind * feed.batch
        what = f"the loss of step {step} is {loss}"
        if math.isfinite(loss):
            what = f"the gradient of step {step} has norm {norm}, though its loss is {loss}"
        raise not_finite(what, step, position, feed, run, saved)


def not_finite(what: str, step: int, position: int, feed: Feed, run: Path, saved: int) -> TrainError:
    """The error of a step whose batch begins at a position, with its samples and their rows."""
    samples, told = tell_samples(feed.view, feed.order, position, position + feed.batch)
    return TrainError(
        f"{what}; {told}; all of them: millrace explain {run} --step {step}; "
        + (f"the last checkpoint is that of step {saved}" if saved else "there is no checkpoint yet"),
        step=step, samples=samples,
    )  # fmt: skip


def tell_samples(view: View, order: Order, first: int, last: int) -> tuple[list[int], str]:
    """Of positions [first, last): the samples that hold values that are not finite, else all, and where they came from."""
    found = describe(view, order, first, last, 0)
    bad = sorted(_bad_samples(view, found.samples))
    rows = [row for row in found.rows if not bad or row["sample"] in bad]
    told = "; ".join(_tell(row) for row in rows[:TOLD])
    if bad:
        return bad, f"samples {_listed(bad)} hold values that are not finite ({told})"
    samples = found.samples.tolist()
    return (
        samples,
        f"samples {_listed(samples)} hold only finite values: lower optimizer.lr, or look at the model ({told})",
    )


def _listed(samples: list[int]) -> str:
    return f"{samples[:LISTED]}" + (f" and {len(samples) - LISTED} more" if len(samples) > LISTED else "")


def _bad_samples(view: View, samples: Any) -> set[int]:
    """Samples of which a float is NaN or infinite."""
    bad: set[int] = set()
    for value in view[samples].values():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            rows = ~np.isfinite(value.reshape(len(value), -1)).all(axis=1)
            bad |= set(samples[rows].tolist())
    return bad


def _tell(row: dict[str, Any]) -> str:
    first, behind = row.get("rows", (0, 1))
    columns = ", ".join(f"{name}={str(value)[:60]}" for name, value in row.get("columns", {}).items() if name != "hash")
    told = f"sample {row['sample']}: rows {first:,} to {behind - 1:,} of record {row.get('record')}"
    return f"{told} ({columns})" if columns else told
