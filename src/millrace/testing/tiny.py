"""Small stores of each kind, always the same bytes: something to point a view, a feed or a test at.

They are computed by integer arithmetic, not by a random generator, so that every machine and version of numpy
makes the same stores; each has several shards and splits.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array
from millrace.store.layout import Column
from millrace.store.manifest import Cuts
from millrace.store.open import open_store
from millrace.store.store import Store
from millrace.store.writer import StoreWriter

FEATURES = ("open", "close", "volume")
SOURCES = ("books/a.txt", "books/b.txt", "web.jsonl")
CLASSES = ("cat", "dog", "otter")


def scrambled(count: int, seed: int, below: int) -> Array:
    """``count`` integers in [0, below) that look random: the same for ever, without a generator."""
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(1 + seed)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return (mixed % np.uint64(below)).astype(np.int64)


def tiny_text(path: str | os.PathLike[str]) -> Store:
    """24 documents of 5 to 44 uint16 tokens (ids below 256) in train, 6 in val; where each came from.

    >>> import tempfile
    >>> store = tiny_text(tempfile.mkdtemp() + "/text")
    >>> store.splits, store.num_records, store.columns["source"][0], store.columns["tokens"].dtype.name
    (('train', 'val'), 30, 'books/a.txt', 'uint16')
    """
    columns = {
        "tokens": Column("uint16"),
        "source": Column("dictionary", per="record"),
        "offset": Column("int64", per="record"),
    }
    lengths = 5 + scrambled(30, 1, 40)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    meta = {"vocabulary": 256}
    with StoreWriter(path, kind="text", columns=columns, splits=("train", "val"), shard_bytes=600, meta=meta) as writer:
        for document in range(30):
            tokens = scrambled(int(lengths[document]), 100 + document, 256).astype(np.uint16)
            source = SOURCES[document // 10]
            record = {"tokens": tokens, "source": source, "offset": int(starts[document])}
            writer.append(record, split="val" if document % 5 == 4 else "train")
    return open_store(path)


def tiny_series(path: str | os.PathLike[str]) -> Store:
    """Four entities of 90, 60, 17 and 41 rows with three features, split by time into train, val and test.

    >>> import tempfile
    >>> store = tiny_series(tempfile.mkdtemp() + "/series")
    >>> store.num_rows, store.columns["name"][:].tolist(), store.meta["features"]
    (208, ['ACME', 'Bäcker', 'sensor 7', '東京'], ['open', 'close', 'volume'])
    >>> [part.tolist() for part in store.split("val").cuts]
    [[54, 36, 10, 24], [72, 48, 13, 32]]
    """
    columns = {
        "values": Column("float32", (len(FEATURES),)),
        "time": Column("int64"),
        "name": Column("string", per="record"),
        "cuts": Column("int64", (2,), per="record"),
    }
    lengths = {"ACME": 90, "Bäcker": 60, "sensor 7": 17, "東京": 41}
    cuts = Cuts(("train", "val", "test"))
    meta = {"features": list(FEATURES)}
    with StoreWriter(path, kind="series", columns=columns, shard_bytes=1500, meta=meta, cuts=cuts) as writer:
        for entity, (name, rows) in enumerate(lengths.items()):
            times, cut = 1_700_000_000 + 60 * np.arange(rows) + entity, np.array([rows * 3 // 5, rows * 4 // 5])
            writer.append({"values": _walk(rows, entity), "time": times, "name": name, "cuts": cut})
    return open_store(path)


def _walk(rows: int, entity: int) -> Array:
    """Smooth enough to learn from: a slow wave per entity plus small steps; exact in float32."""
    phase = (np.arange(rows) * (3 + entity)) % 64
    wave = np.abs(phase - 32) / 32
    steps = scrambled(rows * len(FEATURES), 200 + entity, 33).reshape(rows, len(FEATURES)) - 16
    values: Array = 10 * (entity + 1) + wave[:, None] * np.array([1, 2, 4]) + steps / 64
    return values.astype(np.float32)


def tiny_records(path: str | os.PathLike[str]) -> Store:
    """20 events with hits, image bytes and caption tokens, each on its own axis; some have none of one.

    >>> import tempfile
    >>> store = tiny_records(tempfile.mkdtemp() + "/records")
    >>> store.axes, store.columns["hits"].shape, store.columns["class"][:3].tolist()
    (('rows', 'image', 'caption', 'key'), (67, 6), ['cat', 'dog', 'otter'])
    """
    columns = {
        "hits": Column("float32", (6,)),
        "image": Column("uint8", axis="image"),
        "caption": Column("uint16", axis="caption"),
        "label": Column("int64", per="record"),
        "key": Column("string", per="record"),
        "class": Column("dictionary", per="record"),
    }
    with StoreWriter(path, kind="records", columns=columns, splits=("train", "val"), shard_bytes=1500) as writer:
        for event in range(20):
            writer.append(_event(event), split="val" if event % 4 == 3 else "train")
    return open_store(path)


def _event(event: int) -> dict[str, Any]:
    hits, image, caption = (int(scrambled(1, 300 + 7 * event + k, n)[0]) for k, n in enumerate((7, 60, 9)))
    return {
        "hits": (scrambled(hits * 6, 400 + event, 2001).reshape(hits, 6) - 1000).astype(np.float32) / 8,
        "image": scrambled(image, 500 + event, 256).astype(np.uint8),
        "caption": scrambled(caption, 600 + event, 60_000).astype(np.uint16),
        "label": event % 3 - 1,
        "key": f"event-{event:03d}" + "é" * (event % 3),
        "class": CLASSES[event % 3],
    }


_KINDS = {"text": tiny_text, "series": tiny_series, "records": tiny_records}


def tiny_store(kind: str, path: str | os.PathLike[str]) -> Store:
    """The small store of a kind: ``"text"``, ``"series"`` or ``"records"``."""
    if kind not in _KINDS:
        raise ConfigError(f"kind={kind!r}; expected one of {', '.join(_KINDS)}")
    return _KINDS[kind](path)
