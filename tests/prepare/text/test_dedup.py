"""Repeats: the first occurrence in source order stays, whatever the parts, the workers and the memory."""

import os

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import millrace as mr
from millrace.prepare.text.dedup import repeats as dedup
from millrace.prepare.text.dedup.near import BANDS, bands, signatures
from millrace.testing import tree_digest

OPTIONS = {"tokenizer": "bytes", "val": 0}
HUGE = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
KEYS = st.tuples(*[st.one_of(st.sampled_from(HUGE), st.integers(0, 3), st.integers(0, 2**64 - 1))] * 2)


@hypothesis.given(
    known=st.lists(KEYS, max_size=6),
    keys=st.lists(KEYS, max_size=60),
    piece=st.integers(1, 20),
    entries=st.integers(1, 80),
    twin=st.booleans(),
)
def test_repeats_are_those_of_a_dict(memory_folder, known, keys, piece, entries, twin):
    pieces = [(np.array(known, np.uint64).reshape(-1, 2), np.full(len(known), -1))]
    for start in range(0, len(keys), piece):
        some = np.array(keys[start : start + piece], np.uint64).reshape(-1, 2)
        pieces.append((some, np.arange(start, start + len(some))))
    seen, expected = set(known), []
    for key in keys:
        expected.append(key in seen)
        seen.add(key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "PARTITION_ENTRIES", entries)
        patch.setattr(dedup, "MASK_UNITS", piece)
        patch.setattr(dedup, "GROUP_ENTRIES", 1 + piece // 2)
        if twin:
            patch.setattr(dedup, "repeated_numbers", dedup.repeated_numbers_numpy)
        folder = memory_folder / "partitions"
        found = dedup.find_repeats(pieces, len(known) + len(keys), len(keys), folder)
    assert found.tolist() == expected
    assert not folder.exists()


@pytest.fixture
def source(tmp_path):
    """Documents of which most occur several times, in one file and in several; all parts hold repeats of others."""
    numbers = [(k * k) % 97 for k in range(400)]
    for name, some in (("z.txt", numbers[:250]), ("a.txt", numbers[250:]), ("m.txt", numbers[::-1])):
        (tmp_path / name).write_text("\n\n".join(f"document number {k} with some words" for k in some))
    return [str(tmp_path / name) for name in ("z.txt", "a.txt", "m.txt")]


@pytest.mark.parametrize(("max_seen", "entries"), [(1 << 20, 1 << 20), (3, 50)])
def test_the_first_occurrence_in_source_order_stays(source, tmp_path, tools, monkeypatch, max_seen, entries):
    monkeypatch.setattr(dedup, "MAX_HASHES", max_seen)
    monkeypatch.setattr(dedup, "PARTITION_ENTRIES", entries)
    report = mr.prepare_text(source, tmp_path / "out", part_bytes=700, workers=1, **OPTIONS)
    found = tools.records(mr.open_store(tmp_path / "out"))
    expected = tools.oracle(*source)
    assert [r[:2] for r in found] == [(d.source, d.offset) for d in expected]
    everything = tools.oracle(*source, dedup=False)
    gone = {"duplicate": len(everything) - len(expected)}
    gone["duplicate bytes"] = sum(len(d.text) for d in everything) - sum(len(d.text) for d in expected)
    assert report.dropped == gone
    assert report.characters == sum(len(d.text) for d in expected)


@pytest.mark.parametrize("kind", ["exact", "near"])
def test_parts_and_workers_do_not_matter(source, tmp_path, kind):
    for name, workers, part_bytes in (("one", 1, 1 << 20), ("two", 2, 700), ("three", 3, 3000)):
        mr.prepare_text(source, tmp_path / name, dedup=kind, part_bytes=part_bytes, workers=workers, **OPTIONS)
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two") == tree_digest(tmp_path / "three")


def words(seed, count=400):
    return [f"w{number}" for number in np.random.default_rng(seed).integers(0, 5000, count)]


def test_documents_of_which_a_few_words_changed_are_near_duplicates(tmp_path, tools):
    texts, planted = [], []
    for k in range(30):
        original = words(k)
        texts.append(" ".join(original))
        if k % 3 == 0:
            changed = list(original)
            changed[k + 5] = "another"
            changed[-1 - k] = "word"
            planted.append(len(texts))
            texts.append(" ".join(changed))
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", dedup="near", workers=1, **OPTIONS)
    store = mr.open_store(tmp_path / "out")
    kept = [store.decode(tokens[:-1]) for _, _, tokens in tools.records(store)]
    assert kept == [text for k, text in enumerate(texts) if k not in planted]
    assert report.dropped["near-duplicate"] == len(planted) == 10


def test_documents_with_half_their_words_in_common_stay(tmp_path):
    texts = [" ".join([*words(0, 200), *words(k, 200)]) for k in range(1, 12)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", dedup="near", workers=1, **OPTIONS)
    assert report.documents == {"train": len(texts)}


def test_bands_are_the_same_in_every_process_and_for_short_documents(tools):
    texts = [b"", b"one", b"one two three four five", " ".join(words(1)).encode()]
    found = bands(signatures(texts))
    assert found.shape == (4, BANDS)
    script = f"from millrace.prepare.text.dedup.near import *; print(bands(signatures({texts!r})).tolist())"
    import subprocess
    import sys

    other = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert other.stdout.strip() == str(found.tolist())


@pytest.mark.parametrize("workers", [1, 2])
def test_an_append_drops_what_the_store_has_and_keeps_the_old_snapshot(source, tmp_path, tools, workers, monkeypatch):
    monkeypatch.setattr(dedup, "PARTITION_ENTRIES", 20)
    out = tmp_path / "out"
    old = mr.prepare_text(source[:1], out, part_bytes=700, workers=workers, **OPTIONS)
    before = tools.records(mr.open_store(out))
    (tmp_path / "new.txt").write_text(
        "entirely new\n\ndocument number 0 with some words\n\nnew as well\n\nentirely new"
    )
    added = [source[1], str(tmp_path / "new.txt")]
    report = mr.prepare_text(added, out, append=True, part_bytes=700, workers=workers, **OPTIONS)
    assert report.is_new
    expected = tools.oracle(source[0], *added)
    after = tools.records(mr.open_store(out))
    assert [r[:2] for r in after] == [(d.source, d.offset) for d in expected]
    assert after[: len(before)] == before
    assert tools.records(mr.open_store(out, snapshot=old.fingerprint)) == before
    assert not out.with_name("out.partial").exists()


@pytest.mark.parametrize("kind", ["exact", "none"])
def test_appending_the_same_files_again_adds_nothing(source, tmp_path, kind):
    out = tmp_path / "out"
    mr.prepare_text(source[:1], out, workers=1, dedup=kind, **OPTIONS)
    first = mr.prepare_text(source[1:], out, append=True, workers=1, dedup=kind, **OPTIONS)
    before = tree_digest(out)
    again = mr.prepare_text(source[1:], out, append=True, workers=1, dedup=kind, **OPTIONS)
    assert not again.is_new
    assert again.fingerprint == first.fingerprint
    assert tree_digest(out) == before
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "m.txt", "out", "z.txt"]


def test_an_append_takes_the_tokenizer_of_the_store(source, tmp_path, tools):
    out = tmp_path / "out"
    mr.prepare_text(source[:1], out, tokenizer="train:300", val=0, workers=1)
    (tmp_path / "new.txt").write_text("quite new")
    report = mr.prepare_text(str(tmp_path / "new.txt"), out, append=True, tokenizer="train:300", val=0, workers=1)
    store = mr.open_store(out)
    assert report.tokenizer == "train:300"
    assert tools.records(store)[-1][2] == [*store.encode("quite new").tolist(), store.manifest.tokenizer["end"]]


def test_only_a_store_of_text_can_be_appended_to(source, tmp_path):
    with pytest.raises(mr.StoreNotFound, match="no store to append to"):
        mr.prepare_text(source, tmp_path / "nothing", append=True, **OPTIONS)
    with mr.StoreWriter(tmp_path / "events", columns={"hits": mr.Column("float32")}) as writer:
        writer.append({"hits": np.zeros(3)})
    with pytest.raises(mr.ConfigError, match="not made by prepare text"):
        mr.prepare_text(source, tmp_path / "events", append=True, **OPTIONS)
    assert not (tmp_path / "events.partial").exists()
