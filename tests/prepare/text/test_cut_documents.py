"""Documents that are cut into pieces stay one document: in one split, and compared as a whole."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.prepare import spill
from millrace.prepare.text.clean.cut_documents import CutDocument, spread
from millrace.prepare.text.dedup.near import bands, signatures
from millrace.testing import tree_digest

MOST = 100
SPLIT = {"max_document": MOST, "long_documents": "split", "tokenizer": "bytes", "workers": 1, "normalize": False}


def numbered(*numbers, length=1000):
    """Documents without a blank line; long ones are cut."""
    return ["".join(f"{number} word {k},\n" for k in range(length // 12))[:length].strip() for number in numbers]


def stored(path):
    """By split, the text of every record and where it stood."""
    found = {}
    for split in mr.open_store(path).splits:
        store = mr.open_store(path).split(split)
        bounds, tokens = store.offsets[:].tolist(), np.asarray(store.columns["tokens"][:])
        places = store.columns["offset"][:].tolist()
        found[split] = [
            (places[k], bytes(tokens[bounds[k] : bounds[k + 1] - 1].tolist()).decode()) for k in range(len(places))
        ]
    return found


def places_of(data, documents):
    """[start, stop) of every document in a file."""
    found, at = [], 0
    for document in documents:
        at = data.index(document, at)
        found.append((at, at + len(document)))
        at += len(document)
    return found


@pytest.mark.parametrize("how", [{}, {"val_tail": True}, {"dedup": "none"}, {"dedup": "near"}])
@pytest.mark.parametrize("document", ["blank-line", "file"])
def test_no_document_is_in_two_splits(tmp_path, how, document):
    documents = [text for k in range(20) for text in (*numbered(k), f"short {k}")]
    if document == "file":
        paths = [tmp_path / f"{k:02d}.md" for k in range(len(documents))]
        for path, text in zip(paths, documents, strict=True):
            path.write_text(text)
    else:
        paths = [tmp_path / "a.txt"]
        paths[0].write_text("\n\n".join(documents))
    mr.prepare_text([str(path) for path in paths], tmp_path / "out", val=0.3, test=0.2, **SPLIT, **how)
    store = mr.open_store(tmp_path / "out")
    seen = {}
    for split in ("train", "val", "test"):
        part = store.split(split)
        names, offsets = part.columns["source"][:].tolist(), part.columns["offset"][:].tolist()
        for name, offset in zip(names, offsets, strict=True):
            whole = 0
            if document == "blank-line":
                whole = next(
                    start for start, stop in places_of(paths[0].read_text(), documents) if start <= offset < stop
                )
            seen.setdefault((name, whole), set()).add(split)
    assert len(seen) == len(documents)
    assert {len(splits) for splits in seen.values()} == {1}
    assert {split for splits in seen.values() for split in splits} == {"train", "val", "test"}
    assert store.num_records > 5 * len(documents)


@pytest.mark.parametrize("dedup", ["exact", "near"])
def test_equal_pieces_of_a_document_all_stay(tmp_path, dedup):
    (tmp_path / "a.txt").write_text("x" * 1000 + "\n\nshort")
    report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", val=0, dedup=dedup, **SPLIT)
    assert (report.documents, report.cut, report.pieces) == ({"train": 2}, 1, 10)
    assert mr.open_store(tmp_path / "out").num_records == 11
    assert report.dropped == {}


@pytest.mark.parametrize("how", [{}, {"dedup": "near"}, {"part_bytes": 500}, {"workers": 2, "part_bytes": 300}])
def test_a_repeated_long_document_goes_as_a_whole_and_one_that_begins_alike_stays(tmp_path, how):
    first, second = numbered(1, 2)
    longer = first + "".join(f" and then {k * k} more" for k in range(200))
    documents = [first, "short", second, first, longer, "short"]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", val=0, **{**SPLIT, **how})
    places = places_of((tmp_path / "a.txt").read_text(), documents)
    kept = [k for offset, _ in stored(tmp_path / "out")["train"]
            for k, (start, stop) in enumerate(places) if start <= offset < stop]  # fmt: skip
    assert list(dict.fromkeys(kept)) == [0, 1, 2, 4]
    assert [kept.count(k) for k in (0, 2, 4)] == [-(-len(documents[k]) // MOST) for k in (0, 2, 4)]
    assert (report.documents, report.cut) == ({"train": 4}, 3)
    assert report.pieces == len(kept) - 1
    assert report.dropped["duplicate"] == 2
    assert report.dropped["duplicate bytes"] == len(first) + len("short")


def test_a_long_document_of_the_store_goes_from_an_append_as_a_whole(tmp_path):
    first, second, third = numbered(1, 2, 3)
    (tmp_path / "a.txt").write_text("\n\n".join((first, second)))
    (tmp_path / "b.txt").write_text("\n\n".join((third, second)))
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", val=0, **SPLIT)
    report = mr.prepare_text(str(tmp_path / "b.txt"), tmp_path / "out", val=0, append=True, **SPLIT)
    assert (report.documents, report.cut, report.pieces) == ({"train": 1}, 1, -(-len(third) // MOST))
    assert report.dropped["duplicate"] == 1
    told = mr.open_store(tmp_path / "out").meta["report"]
    assert (told["documents"], told["cut"]) == ({"train": 3}, 3)


def test_the_split_of_pieces_is_that_of_the_whole_document(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(numbered(*range(30))))
    for name, most in (("cut", MOST), ("whole", 5000), ("other", 333)):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / name, val=0.5, **{**SPLIT, "max_document": most})
    whole = stored(tmp_path / "whole")
    for split in ("train", "val"):
        beginnings = {text[:20] for _, text in whole[split]}
        for name in ("cut", "other"):
            assert {text[:20] for _, text in stored(tmp_path / name)[split]} >= beginnings
            joined = "".join(text for _, text in stored(tmp_path / name)[split])
            assert joined == "".join(text for _, text in whole[split])


def test_the_store_is_the_same_for_any_workers_and_steps(tmp_path, monkeypatch):
    texts = [text for k in range(12) for text in (*numbered(k % 7), f"short {k}")]
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts) + name)
    paths = [str(tmp_path / f"{name}.txt") for name in "abc"]
    options = {**SPLIT, "normalize": True, "dedup": "near", "val": 0.3, "part_bytes": 2000}
    mr.prepare_text(paths, tmp_path / "one", **options)
    mr.prepare_text(paths, tmp_path / "two", **{**options, "workers": 2})
    monkeypatch.setattr(spill, "REVISED", 3)
    for step in (1, 7):
        for module in ("assignment", "shards"):
            monkeypatch.setattr(f"millrace.prepare.text.shards.{module}.STEP", step)
        mr.prepare_text(paths, tmp_path / f"small{step}", **options)
    (tmp_path / "small7").rename(tmp_path / "small")
    reports = [mr.open_store(tmp_path / name).meta["report"] for name in ("one", "small", "small1")]
    assert reports[0] == reports[1] == reports[2]
    assert reports[0]["cut"] > 5
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two")
    assert json.loads((tmp_path / "one" / "store.json").read_bytes())["totals"] == json.loads(
        (tmp_path / "small" / "store.json").read_bytes()
    )["totals"]  # fmt: skip
    assert stored(tmp_path / "one") == stored(tmp_path / "small")


def test_the_command_counts_documents_as_wholes_and_tells_how_many_were_cut(tmp_path, tools):
    (tmp_path / "a.txt").write_text("\n\n".join([*numbered(1, 2), "short"]))
    given = ("--max-document", MOST, "--long-documents", "split", "--tokenizer", "bytes", "--val", 0, "--no-normalize")
    said = tools.shell("prepare", "text", tmp_path / "a.txt", "--out", tmp_path / "out", *given).stdout
    assert "\ntrain  3 " in said
    assert "\ncut: 2 documents into 20 pieces\n" in said
    (tmp_path / "b.txt").write_text("nothing to cut")
    said = tools.shell("prepare", "text", tmp_path / "b.txt", "--out", tmp_path / "out", "--append").stdout
    assert said.startswith("added:")
    assert "cut:" not in said


@pytest.mark.parametrize("most", [1, 2, 3])
def test_pieces_shorter_than_a_character_are_refused(tmp_path, most):
    (tmp_path / "a.txt").write_text("\U0001f600é\U0001f600")
    options = {**SPLIT, "val": 0, "dedup": "none"}
    with pytest.raises(
        mr.ConfigError, match=f"max_document={most} with .*; a character may have 4 bytes: give 4 or more"
    ):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **{**options, "max_document": most})
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **{**options, "max_document": 4})
    assert [text for _, text in stored(tmp_path / "out")["train"]] == ["\U0001f600", "é", "\U0001f600"]


def test_a_piece_that_is_dropped_takes_no_others_with_it(tmp_path):
    (tmp_path / "a.md").write_bytes(b"a" * 100 + b" " * 100 + b"b" * 100 + b"c" * 50 + b"\xff")
    options = {**SPLIT, "normalize": True, "on_error": "skip"}
    report = mr.prepare_text(str(tmp_path / "a.md"), tmp_path / "out", val=0, **options)
    assert [text for _, text in stored(tmp_path / "out")["train"]] == ["a" * 100, "b" * 100]
    assert report.dropped["empty"] == 1
    assert sum(report.dropped.values()) == 2


def test_the_signature_of_a_whole_is_the_least_of_its_pieces():
    whole, *pieces = [" ".join(map(str, range(*ends))).encode() for ends in ((0, 100), (0, 50), (46, 100))]
    assert np.array_equal(signatures(pieces).min(axis=0), signatures([whole])[0])
    assert bands(signatures([whole])).shape == (1, 14)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30), st.booleans(), st.data())
@settings(deadline=None)
def test_pieces_follow_their_first_in_steps_of_any_size(records, before, data):
    gone, goes_on = np.array(records, bool).reshape(-1, 2).T
    expected, last = [], before
    for is_gone, is_behind in records:
        last = last if is_behind else is_gone
        expected.append(last)
    cut = data.draw(st.integers(0, len(records)))
    first = spread(gone[:cut], goes_on[:cut], before).tolist()
    second = spread(gone[cut:], goes_on[cut:], first[-1] if first else before).tolist()
    assert first + second == expected


def test_the_records_of_a_cut_document_get_its_hash_its_bands_and_their_marks(tmp_path):
    """Record 0 is another document, records 1 to 3 are the pieces."""
    pieces = [" ".join(map(str, range(start, start + 50))).encode() for start in (0, 46, 92)]
    columns = {"hash": np.full((4, 2), 7, "<u8"), "goes_on": np.zeros(4, bool), "bands": np.full((4, 14), 7, "<u8")}
    spills = {name: spill.Spill(tmp_path / name) for name in columns}
    for name, values in columns.items():
        spills[name].write(values)
    cut = CutDocument((0, 5), 1)
    assert cut.add(pieces[:2]) + cut.add(pieces[2:]) == bytes(16 * 3)
    table = signatures(pieces)
    cut.add_signatures(table[:2])
    cut.add_signatures(table[2:])
    assert cut.finish(4, *spills.values()) == 2, "pieces after the first"
    for one in spills.values():
        one.finish()
    found = {name: np.fromfile(tmp_path / name, values.dtype).reshape(values.shape) for name, values in columns.items()}
    assert found["goes_on"].tolist() == [False, False, True, True]
    assert found["hash"][0].tolist() == [7, 7]
    assert found["hash"][1:].tobytes() == xxhash.xxh3_128_digest(b"".join(pieces)) * 3
    assert found["bands"][0].tolist() == [7] * 14
    assert np.array_equal(found["bands"][1:], np.repeat(bands(table.min(axis=0)[None]), 3, axis=0))
