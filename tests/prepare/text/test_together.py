"""Documents that are taken many at a time: the same store as one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.prepare.text.read import framing as documents
from millrace.prepare.text.read import reader as reading
from millrace.prepare.text.shards import shards
from millrace.testing import tree_digest

PIECES = [
    "word",
    "a  b",
    "\t",
    " \n",
    "\n",
    "\n\n",
    "\r\n\r\n",
    "é",
    "e\u0301",
    "\x00",
    "\ufeff",
    "\u2028",
    "same\n\nsame\n\n",
]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=40).map("".join)


@pytest.mark.parametrize(
    "options", [{}, {"normalize": False}, {"normalize": False, "dedup": "none"}, {"document": "line"}]
)
@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_documents_taken_together_make_the_store_of_documents_one_by_one(tmp_path, monkeypatch, options, block):
    monkeypatch.setattr(documents, "BLOCK", block)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 5 * block)
    path = tmp_path / "a.txt"

    def store(name):
        out = tmp_path / name
        report = mr.prepare_text(str(path), out, tokenizer="bytes", val=0, workers=1, part_bytes=200, **options)
        return tree_digest(out), report.dropped, report.characters, report.bytes_read

    @given(st.lists(texts, min_size=1, max_size=4))
    @settings(max_examples=12)
    def holds(some):
        path.write_bytes(("first\n\n" + "\n".join(some)).encode())
        found = store("together")
        with monkeypatch.context() as patch:
            patch.setattr(reading.DocumentReader, "_clean", lambda *_: None)
            assert store("one by one") == found
        for name in ("together", "one by one"):
            mr.store.platform.remove(tmp_path / name)

    holds()


@pytest.mark.parametrize("normalize", [True, False])
def test_one_bad_document_among_many_is_told_with_its_place(tmp_path, normalize):
    path = tmp_path / "a.txt"
    data = b"\n\n".join(b"document %d" % k for k in range(500)).replace(b"document 321", b"document \xff21")
    path.write_bytes(data)
    options = {"tokenizer": "bytes", "val": 0, "workers": 1, "normalize": normalize}
    with pytest.raises(mr.SourceError, match="invalid utf-8") as caught:
        mr.prepare_text(str(path), tmp_path / "out", **options)
    assert caught.value.offset == data.index(b"\xff")
    report = mr.prepare_text(str(path), tmp_path / "out", on_error="skip", **options)
    assert report.documents == {"train": 499}
    assert report.dropped == {"unreadable: invalid utf-8": 1}


def test_shards_are_the_same_copied_in_any_steps(tmp_path, monkeypatch, corpus):
    def digest(name):
        mr.prepare_text(
            str(corpus / "a.txt"), tmp_path / name, tokenizer="bytes", val=0.2, shard_tokens=9_000, workers=1
        )
        return tree_digest(tmp_path / name)

    whole = digest("whole")
    for step in (1, 100, 3_000):
        monkeypatch.setattr(shards, "STEP", step)
        assert digest(f"steps of {step}") == whole
