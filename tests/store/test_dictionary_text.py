"""Dictionary values are kept as they were given: numpy's own text type would change some of them."""

from __future__ import annotations

import numpy as np
import pytest

import millrace as mr


def write(path, *records: dict[str, object]) -> mr.Store:
    columns = {"x": mr.Column("int64"), "word": mr.Column("dictionary"), "class": mr.Column("dictionary", per="record")}
    with mr.StoreWriter(path, columns=columns) as writer:
        for record in records:
            writer.append(record)
    return mr.open_store(path)


def test_nul_at_the_end_of_a_value_is_kept(tmp_path):
    store = write(
        tmp_path / "out",
        {"x": [1, 2], "word": ["a\0", "a"], "class": "b\0\0"},
        {"x": [3], "word": np.array(["a\0"], object), "class": "b"},
    )
    assert store.columns["word"][:].tolist() == ["a\0", "a", "a\0"]
    assert store.columns["class"][:].tolist() == ["b\0\0", "b"]


def test_number_among_the_values_is_refused(tmp_path):
    with pytest.raises(mr.ConfigError, match="'word' is a dictionary of strings; got 1"):
        write(tmp_path / "out", {"x": [1, 2], "word": ["a", 1], "class": "b"})
