"""From a batch back to its sources: which samples, records, shards and rows it held. Arithmetic, at any size."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from millrace.order.orders import Order
from millrace.ragged import Int64s, Spans, concatenated_ranges
from millrace.view.compose import Concat, Subset
from millrace.view.view import View


class Explanation(dict[str, Any]):
    """What one batch held: ``positions``, ``samples``, ``epochs`` as arrays, and one dict per sample in ``rows``.

    Each row names the store, split and rows, and in ``pieces`` for every record it has rows of: shard, rows within the
    shard and within the record, and the record's columns (among them the source and its row or byte, where
    preparation kept them). ``shard``, ``record`` and ``columns`` of the row itself are those of its first piece.
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
        shards=[row.get("shard") for row in rows],
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
    """Each sample with its pieces: one per record it has rows of, since a block may hold the ends of several documents."""
    store: Any = view.store
    spans = view.spans(samples)
    owners = (
        np.arange(len(spans)) if spans.offsets is None else np.repeat(np.arange(len(spans)), np.diff(spans.offsets))
    )
    records, starts, stops, which = _by_record(store, spans, view.records(samples)[owners])
    shards, first_rows = store.locate_records(records)
    names = {shard: store.shard_name(shard) for shard in np.unique(shards).tolist()}
    columns = _record_values(store, records)
    offsets = store.offsets
    pieces: list[list[dict[str, Any]]] = [[] for _ in range(len(samples))]
    for k in range(len(records)):
        first, last, record = int(starts[k]), int(stops[k]), int(records[k])
        pieces[int(owners[which[k]])].append({
            "record": record,
            "shard": names[int(shards[k])],
            "rows": (first, last),
            "shard_rows": (first - int(first_rows[k]), last - int(first_rows[k])),
            "record_rows": (first - int(offsets[record]), last - int(offsets[record])),
            "columns": {name: values[k] for name, values in columns.items()},
        })  # fmt: skip
    where = {"store": store.path, "split": store.split_name}
    return [
        {"sample": int(sample), **where, **(found[0] if found else {}), **_whole(found), "pieces": found}
        for sample, found in zip(samples.tolist(), pieces, strict=True)
    ]


def _whole(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows from the first piece to the last, where they follow each other."""
    follows = all(one["rows"][1] == next_["rows"][0] for one, next_ in pairwise(pieces))
    return {"rows": (pieces[0]["rows"][0], pieces[-1]["rows"][1])} if pieces and follows else {}


def _by_record(store: Any, spans: Spans, known: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Every span cut at the ends of records: record, start, stop, and which span it is of.

    An empty span is one piece, of the record it is ``known`` to be: its place alone would not tell.
    """
    offsets, is_empty = store.offsets, spans.starts == spans.stops
    firsts = np.where(is_empty, known, np.searchsorted(offsets, spans.starts, side="right") - 1)
    lasts = np.where(is_empty, known, np.searchsorted(offsets, spans.stops, side="left") - 1)
    which = np.repeat(np.arange(len(firsts)), lasts - firsts + 1)
    records = concatenated_ranges(firsts, lasts - firsts + 1)
    starts = np.maximum(offsets[records], spans.starts[which])
    stops = np.minimum(offsets[records + 1], spans.stops[which])
    stays = (stops > starts) | is_empty[which]
    return records[stays], starts[stays], np.maximum(stops, starts)[stays], which[stays]


def _record_values(store: Any, records: Int64s) -> dict[str, list[Any]]:
    """The small record columns of these records: names, sources, labels."""
    found = {}
    for name, column in store.layout.columns.items():
        if column.axis is None and (column.dtype == "string" or np.prod(column.shape, dtype=int) <= 16):
            found[name] = np.asarray(store.columns[name][records]).tolist()
    return found
