"""Records with a column of every kind on two axes, in memory over several shards or on disk in tiny ones."""

import itertools
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.store.layout import Layout
from millrace.store.memory import array_store
from millrace.store.values import Normaliser

COLUMNS = {
    "plain": mr.Column("float32", (2,)),
    "single": mr.Column("float64"),
    "token": mr.Column("uint16"),
    "half": mr.Column("float16", (3,)),
    "brain": mr.Column("bfloat16", (2, 2)),
    "pixel": mr.Column("uint8", axis="image"),
    "word": mr.Column("dictionary", axis="image", values=("a", "b")),
    "label": mr.Column("int32", per="record"),
    "weight": mr.Column("bfloat16", (2,), per="record"),
    "key": mr.Column("string", per="record"),
}


class Kit:
    columns = COLUMNS

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()

    def records(self, lengths, seed=0):
        """Records with these (rows, image rows); every value is exact in every dtype."""
        rng = np.random.default_rng(seed)
        made = []
        for k, (rows, pixels) in enumerate(lengths):
            record = {"key": f"é{k}", "label": k - 3, "weight": rng.integers(0, 64, 2).astype(np.float32)}
            for name, column in COLUMNS.items():
                if column.axis is not None:
                    count = rows if column.axis == "rows" else pixels
                    values = rng.integers(0, 2 if name == "word" else 64, (count, *column.shape))
                    given_as = {"bfloat16": "float32", "dictionary": "int64"}.get(column.dtype, column.dtype)
                    record[name] = values.astype(given_as)
            made.append({name: record[name] for name in COLUMNS})
        return made

    def memory(self, records, per_shard):
        layout, normaliser, shards = Layout(COLUMNS), Normaliser(Layout(COLUMNS)), []
        for number, first in enumerate(range(0, len(records), per_shard)):
            part = [normaliser.record(record) for record in records[first : first + per_shard]]
            lengths = {axis: np.cumsum([0, *(own[axis] for _, own in part)], dtype=np.int64) for axis in layout.axes}
            arrays = {name: np.concatenate([own[name] for own, _ in part]) for name in COLUMNS}
            files = [arrays[file.column] if file.column else lengths[file.axis] for file in layout.files]
            shards.append((f"memory-{number}", files))
        return array_store(layout, shards, kind="records")

    def disk(self, records):
        path = self._folder / str(next(self._numbers))
        with mr.StoreWriter(path, columns=COLUMNS, shard_bytes=120) as writer:
            for record in records:
                writer.append(record)
        return mr.open_store(path)


@pytest.fixture(scope="session")
def kit(tmp_path_factory) -> Kit:
    return Kit(tmp_path_factory.mktemp("gather"))
