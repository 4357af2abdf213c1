"""Mixture: several views in exact proportions, as one view with an order of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.order.mixture import MixtureOrder
from millrace.ragged import Array
from millrace.selections.values import sample_values
from millrace.view.compose import Concat, Subset, check_views, is_even, rows_delivered
from millrace.view.view import View

CHUNK = 1 << 20  # samples whose rows are counted at a time


class Mixture(Concat):
    """Views with their weights: ``Mixture([(a, 0.7), (b, 0.3)])``. A feed of it never ends.

    At every prefix the number of samples of each source is less than one off its weight. ``by="token"`` takes the weights
    as shares of rows instead of samples. ``schedule`` holds later weights: ``[(position, weights), ...]``. A run that is
    resumed with other weights goes on with them: no source repeats samples of its pass. Sources of different tokenizers
    are refused, as by ``Concat``; a run that began with such restores with ``allow_mixed_tokenizers=True``.

    >>> from millrace import Blocks, Feed, from_arrays
    >>> a, b = (Blocks(from_arrays({"tokens": np.arange(n, dtype=np.uint16)}), length=10) for n in (1000, 500))
    >>> feed = Feed(Mixture([(a, 3), (b, 1)]), batch=8, seed=7, device="numpy")
    >>> int((next(iter(feed)).samples >= len(a)).sum())
    2
    """

    def __init__(
        self,
        sources: Sequence[tuple[View, float]],
        *,
        by: str = "sample",
        schedule: Sequence[tuple[int, Any]] = (),
        allow_mixed_tokenizers: bool = False,
    ) -> None:
        sources = list(sources)
        if not sources or not all(isinstance(source, (tuple, list)) and len(source) == 2 for source in sources):
            raise ConfigError("a Mixture takes [(view, weight), ...] with at least one view")
        if by not in ("sample", "token", "row"):
            raise ConfigError(f"by={by!r}; expected 'sample' or 'token'")
        views, weights = [view for view, _ in sources], [weight for _, weight in sources]
        if nested := [number for number, view in enumerate(views) if isinstance(view, Mixture)]:
            raise ConfigError(
                f"source {nested[0]} of the mixture is a Mixture, and its weights would be lost; give its sources, each "
                "with its weight times this one, or mr.Concat of them"
            )
        check_views(views)
        if empty := [number for number, view in enumerate(views) if not len(view)]:
            raise ConfigError(f"source {empty[0]} of the mixture has no samples; leave it out")
        super().__init__(views, allow_mixed_tokenizers=allow_mixed_tokenizers)
        lengths = np.ones(len(views)) if by == "sample" else np.array([mean_rows(view) for view in views])
        self.schedule = [(at, _numbers(own, len(views)) / lengths) for at, own in ((0, weights), *_pairs(schedule))]
        self.default_order(0)  # refuses wrong weights now

    def default_order(self, seed: int) -> MixtureOrder:
        """Whose turn it is at each position."""
        return MixtureOrder([len(view) for view in self.views], self.schedule, seed=seed)

    def plan(self) -> list[tuple[Any, ...]] | None:
        return Concat(self.views, allow_mixed_tokenizers=True).plan()


def _pairs(schedule: Any) -> list[tuple[Any, Any]]:
    try:
        return [(at, weights) for at, weights in schedule]
    except (TypeError, ValueError):
        raise ConfigError(f"schedule={schedule!r}; expected [(position, weights), ...]") from None


def _numbers(weights: Any, count: int) -> Array:
    try:
        found = np.asarray(weights, float)
    except (TypeError, ValueError):
        raise ConfigError(f"weights {weights!r}; expected numbers from 0 on") from None
    if found.shape != (count,):
        raise ConfigError(f"weights {weights!r} for {count} sources; give one for each")
    return found


def balanced(view: View, column: str, weights: Sequence[float] | None = None) -> Mixture:
    """A mixture of the classes of a view: every value of a record column comes equally often, or by ``weights``.

    Classes are in the order of their values.
    """
    labels = sample_values(view, column)
    classes, which = np.unique(labels, return_inverse=True)
    if weights is not None and len(weights) != len(classes):
        raise ConfigError(f"{len(weights)} weights for the {len(classes)} classes of {column!r}; give one for each")
    parts = [Subset(view, np.flatnonzero(which == number)) for number in range(len(classes))]
    return Mixture(list(zip(parts, [1.0] * len(parts) if weights is None else weights, strict=True)))


def mean_rows(view: View) -> float:
    """Rows of a sample, on average over the view."""
    if is_even(view):
        return float(view.spans([0]).lengths[0])
    rows = sum(
        int(rows_delivered(view, np.arange(first, min(first + CHUNK, len(view)))).sum())
        for first in range(0, len(view), CHUNK)
    )
    if not rows:
        raise ConfigError(f"{view!r} has no rows, so it has no weight by token; use by='sample'")
    return rows / len(view)
