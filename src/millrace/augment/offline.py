"""augment_store: augmented copies of the records of a store, as a new store.

Copy c of a split of n records is its pass c: record i stands at position c * n + i of a sequential feed, and gets the
random numbers of that position. The feed gives the records in order, so the bytes are the same for any workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.augment.step import Compose, Transform, column_of
from millrace.errors import ConfigError
from millrace.feed.feed import Feed
from millrace.feed.make.decode import Decode
from millrace.order.orders import Sequential
from millrace.ragged import Ragged
from millrace.store.open import open_store
from millrace.store.store import Store
from millrace.store.writer import StoreWriter
from millrace.view.records import Records

BATCH = 64  # records that a worker changes at a time


@dataclass(frozen=True)
class OnPixels:
    """Steps for images on a column of uint8 pixels (batch, height, width, 3), for ``batch=`` of ``augment_store``."""

    steps: tuple[Transform, ...]
    column: str = "image"

    def __call__(self, batch: Mapping[str, Any], rng: Any) -> dict[str, Any]:
        given = batch.get(self.column)
        is_row = isinstance(given, Ragged) and len(given.values) == len(given)  # each record is one row of pixels
        if isinstance(given, Ragged) and given.values.ndim == 1:
            raise ConfigError(
                f"{self.column!r} holds {given.values.dtype} of different length, such as the bytes of encoded images; expected "
                "pixels: prepare the store with --decode N, or augment as it is fed, with decode=mr.images.decode(...)"
            )
        pixels = given.values if is_row else column_of(batch, self.column, axes=4)  # type: ignore[union-attr]
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
            raise ConfigError(
                f"{self.column!r} is {pixels.dtype}{list(pixels.shape[1:])}; expected uint8 (height, width, 3)"
            )
        image = pixels.transpose(0, 3, 1, 2) * np.float32(1 / 255)
        image = Compose(self.steps)({**batch, self.column: image}, rng)[self.column]
        changed = np.rint(image * 255).astype(np.uint8).transpose(0, 2, 3, 1)
        return {**batch, self.column: Ragged.trusted(changed, given.offsets) if is_row else changed}  # type: ignore[union-attr]


def augment_store(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    copies: int,
    record: Decode | None = None,
    batch: Transform | None = None,
    split: str = "train",
    keep: bool = False,
    seed: int = 0,
    workers: int | None = None,
    processes: bool = False,
    progress: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Writes ``copies`` augmented copies of each record of a split; other splits are copied as they are.

    ``record(record, rng)`` changes one record, ``batch(batch, rng)`` is a transform as of a feed. The columns stay those
    of the store. ``keep`` writes the records themselves before their copies. ``progress()`` is called for each record.
    Returns the counts of records.
    """
    store = open_store(path)
    if store.kind != "records" or store.cuts is not None:
        raise ConfigError(f"{path} is a {store.kind} store; copies are made of records: augment in Feed(transform=...)")
    if copies < 1:
        raise ConfigError(f"copies={copies}; expected 1 or more")
    if (record is None) == (batch is None):
        raise ConfigError("give record=, a function of (record, rng), or batch=, a transform of (batch, rng)")
    names = store.splits or (split,)
    if split not in names:
        raise ConfigError(f"split={split!r}; the store has {', '.join(names)}")
    function = record if record is not None else batch
    shown = getattr(function, "__qualname__", repr(function))
    provenance = {"command": "augment", "source": store.fingerprint, "transform": shown, "copies": copies, "seed": seed}
    counts = dict.fromkeys(names, 0)
    with StoreWriter(out, columns=store.layout.columns, splits=names, meta=store.meta, provenance=provenance) as writer:
        for name in names:
            part = store.split(name)
            passes = []
            if name != split or keep:
                passes.append(_feed(part, epochs=1, workers=workers))
            if name == split:
                options = {"decode": record, "transform": batch, "processes": processes, "seed": seed}
                passes.append(_feed(part, epochs=copies, workers=workers, **options))
            for feed in filter(None, passes):
                for one in _records(part, feed):
                    writer.append(one, split=name)
                    counts[name] += 1
                    if progress is not None:
                        progress()
    return {"records": counts, "fingerprint": writer.fingerprint}


def _feed(part: Store, **options: Any) -> Feed | None:
    """The records of a split in order; None if it has none."""
    if not part.num_records:
        return None
    size = min(BATCH, part.num_records)
    options |= {"rank": 0, "world": 1}  # a copy is whole, also where ranks train
    return Feed(Records(part), batch=size, order=Sequential(part.num_records), device="numpy", **options)


def _records(part: Store, feed: Feed) -> Iterator[dict[str, Any]]:
    """The records of a feed one by one, as a writer takes them."""
    columns = part.layout.columns
    with feed:
        for batch in feed:
            if set(batch) != set(columns):
                raise ConfigError(
                    f"the result has {', '.join(batch)}; expected the columns of the store: {', '.join(columns)}"
                )
            for row in range(int(batch.valid.sum())):  # type: ignore[union-attr]
                record = {name: batch[name][row] for name in columns}
                for name, column in columns.items():
                    if column.values is not None:  # a dictionary: feeds deliver its codes
                        record[name] = _texts(column.values, record[name])
                yield record


def _texts(values: tuple[str, ...], codes: Any) -> Any:
    return values[codes] if codes.ndim == 0 else [values[code] for code in codes]
