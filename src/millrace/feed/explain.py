"""From a batch back to its sources: which samples, records, shards and rows it held."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.line import Line
from millrace.order.orders import MAX_POSITION, Order
from millrace.ragged import Int64s, Spans, concatenated_ranges
from millrace.store.history import source_files
from millrace.store.times import has_times, show_times
from millrace.view.compose import Concat, Subset
from millrace.view.view import View
from millrace.view.windows import Windows


class Explanation(dict[str, Any]):
    """What one batch held: ``positions``, ``samples``, ``epochs`` as arrays, and one dict per sample in ``rows``.

    Each row names the store, split and rows. Its ``pieces`` describe each record it has rows of: shard, rows in the shard
    and in the record, and the record's columns, such as the source and its row or byte. The row itself has the
    ``shard``, ``record`` and ``columns`` of its first piece.

    A sample of a series store also has its ``entity`` and the first and last of its ``times``; a window has rows and
    times for ``input`` and ``target``. Times are ISO dates, or numbers if the source had numbers.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"an explanation has no {name!r}; it has {', '.join(self)}") from None


def explain_batch(line: Line, batch: int, rename: Mapping[str, str]) -> Explanation:
    """What one batch of a line holds, over all ranks."""
    if batch < 0 or (line.num_batches is not None and batch >= line.num_batches):
        raise ConfigError(f"batch {batch} is outside the feed; it has {line.num_batches} batches")
    if line.end(batch) > MAX_POSITION - line.batch:
        raise ConfigError(f"batch {batch} lies beyond position 2^63 - 1, where every line ends")
    found = describe(line.view, line.order, line.positions_of(batch), batch)
    return Explanation(found, rename=dict(rename)) if rename else found


def describe(view: View, order: Order, positions: Int64s, batch: int) -> Explanation:
    """What stands at these positions of an order over a view."""
    samples = order.samples(positions)
    rows = describe_samples(view, samples)
    epochs = order.epochs(positions)
    for position, epoch, row in zip(positions.tolist(), epochs.tolist(), rows, strict=True):
        row["position"], row["epoch"] = position, epoch
    return Explanation(
        batch=batch, positions=positions, samples=samples, epochs=epochs,
        shards=[row.get("shard") for row in rows], rows=rows,
    )  # fmt: skip


def prepared_from(view: View) -> dict[str, list[str]]:
    """The files that series stores were prepared from, by the path of the store. Which row came from which is not known."""
    roots = [store.root for store in view.stores if store.kind == "series" and store.root.manifest is not None]
    return {root.path: source_files(root.path, root.fingerprint) for root in roots}


def describe_samples(view: View, samples: Int64s) -> list[dict[str, Any]]:
    """Where each sample comes from, in the order given."""
    if isinstance(view, Subset):
        return _with_samples(describe_samples(view.view, view.numbers(samples)), samples)
    if isinstance(view, Concat):
        parts, inside = view.parts(samples)
        found: list[dict[str, Any]] = [{}] * len(samples)
        for k in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == k)
            for at, row in zip(rows.tolist(), describe_samples(view.views[k], inside[rows]), strict=True):
                found[at] = {**row, "part": k}
        return _with_samples(found, samples)
    return _describe_leaf(view, samples)


def _with_samples(rows: list[dict[str, Any]], samples: Int64s) -> list[dict[str, Any]]:
    for row, sample in zip(rows, samples.tolist(), strict=True):
        row["sample"] = sample
    return rows


def _describe_leaf(view: View, samples: Int64s) -> list[dict[str, Any]]:
    """Each sample with one piece per record that it has rows of: a block may hold the ends of several documents.

    Records and rows are numbered as in the whole store (or split), also where ``where`` chose some.
    """
    store: Any = view.store.whole
    spans = view.spans(samples)
    owners = np.arange(len(spans))
    owners = owners if spans.offsets is None else np.repeat(owners, np.diff(spans.offsets))
    records, starts, stops, which = _by_record(store, spans, view.stored_records(samples)[owners])
    shards, first_rows = store.locate_records(records)
    names = {shard: store.shard_name(shard) for shard in np.unique(shards).tolist()}
    columns = _record_values(store, records)
    begins, _ = store.axis_index(store.layout.primary).spans(records)
    pieces: list[list[dict[str, Any]]] = [[] for _ in range(len(samples))]
    for k in range(len(records)):
        first, last, record = int(starts[k]), int(stops[k]), int(records[k])
        pieces[int(owners[which[k]])].append({
            "record": record,
            "shard": names[int(shards[k])],
            "rows": (first, last),
            "shard_rows": (first - int(first_rows[k]), last - int(first_rows[k])),
            "record_rows": (first - int(begins[k]), last - int(begins[k])),
            "columns": {name: values[k] for name, values in columns.items()},
        })  # fmt: skip
    where = {"store": store.path, "split": store.split_name}
    is_series = store.kind == "series" and spans.offsets is None
    parts = _parts(view, spans, view.records(samples)) if is_series else [{} for _ in pieces]
    return [
        {"sample": int(sample), **where, **(found[0] if found else {}), **part, **_whole(found), "pieces": found}
        for sample, found, part in zip(samples.tolist(), pieces, parts, strict=True)
    ]


def _parts(view: View, spans: Spans, records: Int64s) -> list[dict[str, Any]]:
    """What a sample of a series store also has: its entity, the rows and times of its input and target."""
    store, starts, stops = view.store, spans.starts, spans.stops
    ranges = {"": (starts, stops)}
    if isinstance(view, Windows):
        ranges = {"input": (starts, starts + view.lookback), "target": (stops - view.horizon, stops)}
    found: list[dict[str, Any]] = [{} for _ in range(len(spans))]
    column = store.layout.columns.get("name")  # without names, an entity is the number of its record
    entities = store.columns["name"][records] if column is not None and column.axis is None else records
    names = [str(name) for name in np.asarray(entities).tolist()]
    for name, (first, stop) in ranges.items():
        times = _first_and_last(store, first, stop)
        for k, row in enumerate(found):
            row["entity"] = names[k]
            part = {"rows": (int(first[k]), int(stop[k])), **({"times": times[k]} if times[k] else {})}
            row.update({name: part} if name else part)
    return found


def _first_and_last(store: Any, starts: Int64s, stops: Int64s) -> list[tuple[Any, Any] | None]:
    """The times of the first and the last row of each range; None for one without rows or times."""
    if not has_times(store) or not store.num_rows:
        return [None] * len(starts)
    firsts = show_times(store, store.times(np.minimum(starts, store.num_rows - 1)))
    lasts = show_times(store, store.times(np.maximum(stops - 1, 0)))
    both = zip(firsts, lasts, (stops > starts).tolist(), strict=True)
    return [(first, last) if has_rows else None for first, last, has_rows in both]


def _whole(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows from the first piece to the last, if they follow each other."""
    follows = all(one["rows"][1] == next_["rows"][0] for one, next_ in pairwise(pieces))
    return {"rows": (pieces[0]["rows"][0], pieces[-1]["rows"][1])} if pieces and follows else {}


def _by_record(store: Any, spans: Spans, known: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Every span, cut at the ends of records: record, start, stop, and the number of the span.

    An empty span is one piece, of its ``known`` record: its rows alone do not show the record.
    """
    index, is_empty = store.axis_index(store.layout.primary), spans.starts == spans.stops
    firsts = np.where(is_empty, known, index.owners(spans.starts))
    lasts = np.where(is_empty, known, index.owners(spans.stops - 1))
    which = np.repeat(np.arange(len(firsts)), lasts - firsts + 1)
    records = concatenated_ranges(firsts, lasts - firsts + 1)
    begins, ends = index.spans(records)
    starts = np.maximum(begins, spans.starts[which])
    stops = np.minimum(ends, spans.stops[which])
    stays = (stops > starts) | is_empty[which]
    return records[stays], starts[stays], np.maximum(stops, starts)[stays], which[stays]


def _record_values(store: Any, records: Int64s) -> dict[str, list[Any]]:
    """The small record columns of these records: names, sources, labels."""
    found = {}
    for name, column in store.layout.columns.items():
        if column.axis is None and (column.dtype == "string" or np.prod(column.shape, dtype=int) <= 16):
            found[name] = np.asarray(store.columns[name][records]).tolist()
    return found
