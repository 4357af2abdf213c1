"""Row groups of long rows are read one at a time, and the outcome is the same."""

from __future__ import annotations

import threading

import pyarrow
import pytest
from pyarrow import parquet

import millrace as mr
from millrace.prepare.text.read import turns
from millrace.prepare.text.read.sources import SourceSlice, find_sources
from millrace.testing import tree_digest


def test_one_is_within_at_a_time(tmp_path):
    order = []

    def other():
        with turns.take_turn(tmp_path / "alone"):
            order.append("other")

    with turns.take_turn(tmp_path / "alone"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        order.append("first")
    thread.join(timeout=60)
    assert order == ["first", "other"]


@pytest.mark.parametrize(("rows", "size", "expected"), [(4, 5000, True), (100, 200, False), (1, 2000, False)])
def test_groups_of_long_rows_are_heavy(tmp_path, monkeypatch, rows, size, expected):
    monkeypatch.setattr(turns, "HEAVY_GROUP", 10_000)
    monkeypatch.setattr(turns, "HEAVY_ROW", 1000)
    parquet.write_table(pyarrow.table({"text": [f"{k}" + "x" * size for k in range(rows)]}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("x" * 20_000)
    (found, text), *_ = find_sources([str(tmp_path / "a.parquet"), str(tmp_path / "b.txt")])
    assert turns.is_heavy(found, SourceSlice(0, 0, 1)) is expected
    assert not turns.is_heavy(text, SourceSlice(1, 0, -1))


def test_a_store_does_not_depend_on_it(tmp_path, monkeypatch):
    texts = [f"{k} " + "long text " * 500 for k in range(40)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=10)
    given = {"val": 0, "tokenizer": "bytes", "workers": 1, "part_bytes": 1000}
    mr.prepare_text(str(tmp_path / "a.parquet"), tmp_path / "usual", **given)
    entered = []
    monkeypatch.setattr(turns, "HEAVY_GROUP", 1)
    monkeypatch.setattr(turns, "HEAVY_ROW", 1)
    real = turns.take_turn
    monkeypatch.setattr(
        "millrace.prepare.text.read.reader.take_turn", lambda path: entered.append(path.name) or real(path)
    )
    mr.prepare_text(str(tmp_path / "a.parquet"), tmp_path / "alone", **given)
    assert entered == ["alone"] * 4
    assert tree_digest(tmp_path / "alone") == tree_digest(tmp_path / "usual")
    assert not (tmp_path / "alone" / "alone").exists()
