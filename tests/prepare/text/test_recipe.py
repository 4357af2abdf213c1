"""An append makes documents as the store was made: by its manifest, whatever became of provenance.json."""

import json
import os

import msgspec
import pytest

import millrace as mr
from millrace.store import manifest as manifests

OPTIONS = {"tokenizer": "bytes", "val": 0, "workers": 1}


@pytest.fixture
def files(tmp_path):
    for name, text in (("a", "one  one\n\ntwo"), ("b", "one  one\n\none  one\n\nthree\n\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def texts(out):
    store = mr.open_store(out)
    return store.decode(store.columns["tokens"][:]).split("<|endoftext|>")[:-1]


def as_earlier_versions(out):
    """The store as a version made it that kept all this in provenance.json alone."""
    path = out / "store.json"
    manifest = manifests.decode(path.read_bytes(), str(path))
    meta = {"report": manifest.meta["report"]}
    for place in (path, out / "snapshots" / f"{manifest.fingerprint}.json"):
        place.chmod(0o644)
        place.write_bytes(manifests.encode(msgspec.structs.replace(manifest, meta=meta)))


CONTRADICTIONS = [
    ({}, {"dedup": "none"}, "dedup='exact'", "dedup='none'"),
    ({}, {"dedup": "near"}, "dedup='exact'", "dedup='near'"),
    ({"dedup": "none"}, {"dedup": "exact"}, "dedup='none'", "dedup='exact'"),
    ({}, {"min_chars": 5}, "min_chars=1", "min_chars=5"),
    ({"min_chars": 2}, {"min_chars": 1}, "min_chars=2", "min_chars=1"),
    ({}, {"filter": "json:loads"}, "filter=None", "filter='json:loads'"),
    ({}, {"dedup_unit": "line"}, "dedup_unit='document'", "dedup_unit='line'"),
    ({"normalize": False}, {"normalize": True}, "normalize=False", "normalize=True"),
    ({"document": "line"}, {"document": "file"}, "document='line'", "document='file'"),
    ({}, {"tokenizer": "char"}, "tokenizer='bytes'", "tokenizer='char'"),
]


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("provenance", [False, True])
@pytest.mark.parametrize(("made", "given", "was", "now"), CONTRADICTIONS)
def test_an_option_that_would_make_other_documents_is_refused(
    files, tmp_path, made, given, was, now, provenance, is_old
):
    out = tmp_path / "out"
    mr.prepare_text(files[0], out, **{**OPTIONS, **made})
    if is_old:
        as_earlier_versions(out)
    if not provenance:
        (out / "provenance.json").unlink()
    with pytest.raises(mr.ConfigError) as refused:
        mr.prepare_text(files[1], out, append=True, workers=1, **given)
    if is_old and not provenance:
        assert "does not say how its documents were made" in str(refused.value)
        assert "copy it back to append, or prepare another store" in str(refused.value)
    else:
        assert f"was made with {was}; an append cannot have {now}: leave it out" in str(refused.value)
    assert mr.open_store(out).num_records == 2
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("provenance", [False, True])
def test_what_is_left_out_is_the_stores_own(files, tmp_path, provenance):
    out = tmp_path / "out"
    mr.prepare_text(files[0], out, normalize=False, dedup="none", min_chars=4, **OPTIONS)
    if not provenance:
        (out / "provenance.json").unlink()
    mr.prepare_text(files[1], out, append=True, workers=1)
    assert texts(out) == ["one  one", "one  one", "one  one", "three"]
    mr.prepare_text(files[1], out, append=True, dedup="none", min_chars=4, normalize=False, **OPTIONS)
    with pytest.raises(mr.ConfigError, match="normalize=False"):  # the append kept what the store said
        mr.prepare_text(files[1], out, append=True, normalize=True)


def test_documents_that_an_append_began_to_cut_stay_cut_without_provenance(tmp_path):
    out = tmp_path / "out"
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 250)
    mr.prepare_text(str(tmp_path / "a.txt"), out, max_document=300, **OPTIONS)
    cut = {"long_documents": "split", "max_document": 300}
    mr.prepare_text(str(tmp_path / "b.txt"), out, append=True, workers=1, **cut)
    (out / "provenance.json").unlink()
    with pytest.raises(mr.ConfigError, match="long_documents='split'; an append cannot have long_documents='stop'"):
        mr.prepare_text(str(tmp_path / "c.txt"), out, append=True, workers=1, long_documents="stop")


def test_a_filter_that_was_changed_is_noted(files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keeps_it.py").write_text("def keep(text):\n    return True\n")
    mr.prepare_text(files[0], out, filter="keeps_it:keep", **OPTIONS)
    (tmp_path / "keeps_it.py").write_text("def keep(text):\n    return len(text) < 100\n")
    report = mr.prepare_text(files[1], out, append=True, workers=1)
    assert any('filter="keeps_it:keep" has changed since the store was made' in note for note in report.notes)


def test_a_tokenizer_is_known_by_what_it_holds_not_by_its_path(files, tmp_path, monkeypatch):
    mr.prepare_text(files, tmp_path / "learnt", **{**OPTIONS, "tokenizer": "train:300"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_bytes((tmp_path / "learnt" / "tokenizer.json").read_bytes())
    mr.prepare_text(files[0], tmp_path / "out", **{**OPTIONS, "tokenizer": "mine.json"})
    mr.prepare_text(files[1], tmp_path / "out", append=True, workers=1, tokenizer=str(tmp_path / "mine.json"))


@pytest.mark.parametrize(
    "damage",
    [
        b"{", b"[]\n", b"null\n", b'"x"\n', b"\xff\xfe\n", b'{"plan": 3}\n', b'{"plan": {"options": []}}\n',
        b'{"plan": {"sources": {"a": 1}}}\n', b'{"fingerprint": 7}\n', b'{"report": 5}\n', b'{"root": 5}\n',
        b'{"quarantine_bytes": "many"}\n', b"[" * 100_000,
    ],
)  # fmt: skip
def test_damaged_provenance_is_one_line_with_the_remedy(files, tmp_path, damage):
    out = tmp_path / "out"
    mr.prepare_text(files[0], out, **OPTIONS)
    (out / "provenance.json").chmod(0o644)
    (out / "provenance.json").write_bytes(damage)
    with pytest.raises(mr.StoreCorrupt, match=r"provenance\.json, line 1, is damaged: .*; copy it again"):
        mr.prepare_text(files[1], out, append=True, workers=1)
    with pytest.raises(mr.StoreCorrupt, match=r"provenance\.json, line 1, is damaged"):
        mr.prepare_text(files[0], out, **OPTIONS)
    (out / "provenance.json").unlink()
    mr.prepare_text(files[1], out, append=True, workers=1)


def test_what_was_set_aside_stays_without_provenance(tmp_path):
    out = tmp_path / "out"
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + f"\nbad {name}\n")
    mr.prepare_text(str(tmp_path / "a.jsonl"), out, on_error="skip", **OPTIONS)
    (out / "provenance.json").unlink()
    mr.prepare_text(str(tmp_path / "b.jsonl"), out, append=True, workers=1, on_error="skip")
    assert len((out / "quarantine.jsonl").read_text().splitlines()) == 2


def sources(out):
    return list(dict.fromkeys(mr.open_store(out).columns["source"][:].tolist()))


def test_how_paths_are_typed_does_not_change_a_store(tmp_path, monkeypatch):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("in/a.txt", "in/deep/b.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    monkeypatch.chdir(tmp_path)
    ways = ["in", "./in", "in/", "in/../in", str(tmp_path / "in"), "in/**"]
    made = {mr.prepare_text(way, tmp_path / f"out{k}", **OPTIONS).fingerprint for k, way in enumerate(ways)}
    monkeypatch.chdir(tmp_path / "in")
    made.add(mr.prepare_text(["a.txt", "deep/b.txt"], tmp_path / "out", **OPTIONS).fingerprint)
    assert len(made) == 1
    assert sources(tmp_path / "out") == ["a.txt", "deep/b.txt"]
    assert json.loads((tmp_path / "out" / "provenance.json").read_bytes())["root"] == str(tmp_path / "in")


def test_an_append_counts_from_the_folder_of_its_store(tmp_path, monkeypatch):
    for folder in ("day1", "day2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"text of {folder}")
    monkeypatch.chdir(tmp_path)
    made = set()
    for k, way in enumerate(("day2", str(tmp_path / "day2"), "day2/a.txt")):
        mr.prepare_text("day1", f"out{k}", **OPTIONS)
        made.add(mr.prepare_text(way, f"out{k}", append=True, workers=1).fingerprint)
        assert sources(f"out{k}") == ["a.txt", "../day2/a.txt"]
    assert len(made) == 1


def test_an_append_to_a_store_of_an_earlier_version_calls_files_as_they_were_given(files, tmp_path, monkeypatch):
    mr.prepare_text(files[0], tmp_path / "out", **OPTIONS)
    as_earlier_versions(tmp_path / "out")
    mr.prepare_text(files[1], tmp_path / "out", append=True, workers=1)
    assert sources(tmp_path / "out") == ["a.txt", files[1]]


def test_a_name_that_may_be_another_file_is_refused(tmp_path):
    for folder in ("day1", "day2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"text of {folder}")
    mr.prepare_text(str(tmp_path / "day1"), tmp_path / "out", **OPTIONS)
    os.unlink(tmp_path / "out" / "provenance.json")
    with pytest.raises(mr.ConfigError, match=r"already has a source 'a\.txt', and without provenance\.json"):
        mr.prepare_text(str(tmp_path / "day2"), tmp_path / "out", append=True, workers=1)


def test_two_sources_of_one_name_are_refused(tmp_path, monkeypatch):
    import io
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from standard input")))
    (tmp_path / "-").write_text("from a file of that name")
    with pytest.raises(mr.ConfigError, match="two sources would be called '-'"):
        mr.prepare_text(["-", "./-"], tmp_path / "out", **OPTIONS)
