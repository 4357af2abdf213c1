"""Columns of documents in parts, and the runs of them that shards are copied from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.native import core
from millrace.prepare.runs import copy_runs_core, copy_runs_numpy, offsets_of
from millrace.prepare.text import text as prepare
from millrace.prepare.text.options import split_options
from millrace.prepare.text.part_files import COLUMNS, part_column

TWINS = [copy_runs_numpy, *([copy_runs_core] if core else [])]
edges = st.lists(st.integers(0, 30), max_size=12).map(lambda found: sorted(found[: len(found) // 2 * 2]))


@given(edges, st.sampled_from(["u1", "<u2", "<u4", "<i8"]), st.sampled_from([(), (2,), (3, 2)]))
def test_runs_are_copied_by_the_core_as_by_numpy(found, dtype, tail):
    values = np.arange(30 * int(np.prod(tail)), dtype=dtype).reshape(30, *tail)
    runs = np.array(found, np.int64).reshape(-1, 2)
    expected = [values[k] for first, last in runs.tolist() for k in range(first, last)]
    for copy_runs in TWINS:
        copied = copy_runs(values, runs)
        assert (copied.dtype, copied.shape) == (values.dtype, (len(expected), *tail))
        assert copied.tolist() == [value.tolist() for value in expected]


@given(edges)
def test_runs_of_bytes_may_become_wider(found):
    values, runs = np.arange(30, dtype=np.uint8) + 220, np.array(found, np.int64).reshape(-1, 2)
    for copy_runs in TWINS:
        copied = copy_runs(values, runs, np.dtype("<u2"))
        assert (copied.dtype, copied.tolist()) == (np.uint16, copy_runs(values, runs).tolist())


@pytest.mark.needs_core
@pytest.mark.parametrize("runs", [[0, 4], [-1, 2], [2, 1], [0, 1], [0, 2, 2, 4], [0, 3, 3], [1 << 62, 1 << 62], [0]])
def test_runs_that_do_not_fit_are_refused(runs):
    with pytest.raises(ValueError, match="do not fit"):
        core.copy_runs(np.arange(3), 8, np.array(runs), np.empty(3, np.int64), 8)


@pytest.mark.needs_core
@pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (0, 0), (-8, -8), (2, 1), (1, 4)])
def test_values_of_sizes_that_do_not_go_together_are_refused(sizes):
    with pytest.raises(ValueError, match="do not fit"):
        core.copy_runs(np.arange(3), sizes[0], np.array([0, 3]), np.empty(3, np.int64), sizes[1])


def test_offsets_begin_at_zero():
    assert offsets_of(np.array([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert offsets_of(np.zeros(0, np.int64)).tolist() == [0]


@pytest.mark.parametrize("options", [{}, {"dedup": "none"}, {"max_document": 20, "long_documents": "split"}])
def test_a_part_keeps_what_the_store_and_the_report_need(tmp_path, monkeypatch, options):
    documents = ["grüße", "a longer document than all of the others", "two\nlines", "grüße"]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    seen = {}

    def settle(self, done):
        folder, reading = self.context.folder, split_options({"tokenizer": "bytes", **options})[0]
        named = {name.removesuffix(".bin") for name in reading.part_files} & set(COLUMNS)
        seen["files"] = {path.stem for path in (folder / "parts" / done[0].key).glob("*.bin")} & set(COLUMNS)
        seen["columns"] = {name: part_column(folder, done[0].key, name) for name in named}
        seen["part"] = done[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare.Text, "settle", settle)
    with pytest.raises(KeyboardInterrupt):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer="bytes", val=0, workers=1, **options)
    part, found = seen["part"], seen["columns"]
    assert seen["files"] == set(found)
    assert ("size" in found, "goes_on" in found) == (options.get("dedup") != "none", "max_document" in options)
    assert {len(values) for values in found.values()} == {part.documents}
    assert int(found["length"].sum()) == part.tokens
    text = (tmp_path / "a.txt").read_bytes()
    for offset, length in zip(found["offset"].tolist(), (found["length"] - 1).tolist(), strict=True):
        assert text[offset : offset + length].decode().strip("\n") in "\n".join(documents)
    if "goes_on" in found:
        assert (found["goes_on"].tolist(), part.pieces) == ([False, False, True, False], 1)
        assert found["hash"][1].tolist() == found["hash"][2].tolist()
    if "size" in found:
        assert int(found["size"][:, 1].sum()) == part.characters
        assert int(found["size"][:, 0].sum()) == int((found["length"] - 1).sum())
