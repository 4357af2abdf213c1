"""From a batch back to its sources: which samples, records, shards and rows it held. Arithmetic, at any size."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.order.orders import Order
from millrace.ragged import Int64s
from millrace.view.compose import Concat, Subset
from millrace.view.view import View


class Explanation(dict[str, Any]):
    """What one batch held: ``positions``, ``samples``, ``epochs`` as arrays, and one dict per sample in ``rows``.

    Each row names the store, shard, rows of the store, rows within the shard, the record, and every record
    column of it (among them the source and its row or byte, where preparation kept them).
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"an explanation has no {name!r}; it has {', '.join(self)}") from None


def describe(view: View, order: Order, start: int, stop: int, batch: int) -> Explanation:
    """Positions [start, stop) of an order over a view."""
    positions = np.arange(start, stop, dtype=np.int64)
    samples = order.samples(positions)
    rows = describe_samples(view, samples)
    for position, row in zip(positions.tolist(), rows, strict=True):
        row["position"], row["epoch"] = position, position // order.n
    return Explanation(
        batch=batch,
        positions=positions,
        samples=samples,
        epochs=positions // order.n,
        shards=[row["shard"] for row in rows],
        rows=rows,
    )


def describe_samples(view: View, samples: Int64s) -> list[dict[str, Any]]:
    """Where each sample comes from, in the order given."""
    if isinstance(view, Subset):
        return _renamed(describe_samples(view.view, view.ids[samples]), samples)
    if isinstance(view, Concat):
        parts, inside = view.parts(samples)
        found: list[dict[str, Any]] = [{}] * len(samples)
        for k in np.unique(parts).tolist():
            places = np.flatnonzero(parts == k)
            for place, row in zip(places.tolist(), describe_samples(view.views[k], inside[places]), strict=True):
                found[place] = {**row, "part": k}
        return _renamed(found, samples)
    return _describe_leaf(view, samples)


def _renamed(rows: list[dict[str, Any]], samples: Int64s) -> list[dict[str, Any]]:
    for row, sample in zip(rows, samples.tolist(), strict=True):
        row["sample"] = sample
    return rows


def _describe_leaf(view: View, samples: Int64s) -> list[dict[str, Any]]:
    store: Any = view.store
    spans = view.spans(samples)
    firsts = np.arange(len(spans)) if spans.offsets is None else spans.offsets[:-1]
    starts = spans.starts[firsts]
    stops = starts + spans.lengths
    records = view.records(samples)
    shards, first_rows = store.locate_records(records)
    inside = starts - first_rows
    names = {shard: store.shard_name(shard) for shard in np.unique(shards).tolist()}
    columns = _record_values(store, records)
    return [
        {
            "sample": int(samples[k]),
            "store": store.path,
            "split": store.split_name,
            "shard": names[int(shards[k])],
            "rows": (int(starts[k]), int(stops[k])),
            "shard_rows": (int(inside[k]), int(inside[k] + stops[k] - starts[k])),
            "record": int(records[k]),
            "columns": {name: values[k] for name, values in columns.items()},
        }
        for k in range(len(samples))
    ]


def _record_values(store: Any, records: Int64s) -> dict[str, list[Any]]:
    """The small record columns of these records: names, sources, labels."""
    found = {}
    for name, column in store.layout.columns.items():
        if column.axis is None and (column.dtype == "string" or np.prod(column.shape, dtype=int) <= 16):
            found[name] = np.asarray(store.columns[name][records]).tolist()
    return found
