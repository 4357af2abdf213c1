"""--dedup-unit line: of equal lines the first in source order stays, whatever the parts, workers and interruptions."""

import json
import os
import shutil

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import millrace as mr
from millrace.prepare.text.dedup import repeats as dedup
from millrace.testing import Fault, count_steps, run_forked, tree_digest

OPTIONS = {"tokenizer": "bytes", "val": 0, "dedup_unit": "line", "workers": 1}
LINES = ["alpha", "beta", "gamma delta", "ümlaut", "", "  ", "zeta", "é", "\u00a0", "}", "a" * 70]


def without_repeats(documents, *, seen=None, normalize=True):
    """Oracle: (name, offset, text) -> those with something left, less the lines seen before."""
    seen, found = set() if seen is None else seen, []
    for name, offset, text in documents:
        kept, gone, units = [], 0, 0
        for line in text.split("\n"):
            key = line.removesuffix("\r")
            if key.strip() and key in seen:
                gone += 1
            else:
                kept.append(line)
                units += bool(key.strip())
            if key.strip():
                seen.add(key)
        left = "\n".join(kept)
        if normalize and gone:
            while "\n\n\n" in left:
                left = left.replace("\n\n\n", "\n\n")
            left = left.strip("\n")
        if units or not gone:
            found.append((name, offset, left))
    return found


def stored(store, tools):
    return [(name, offset, bytes(tokens[:-1]).decode()) for name, offset, tokens in tools.records(store)]


def plain(path, normalize=True):
    """Documents of a .jsonl as they are before their lines are compared."""
    from millrace.prepare.text.clean.characters import clean

    offset = 0
    for line in path.read_bytes().splitlines(keepends=True):
        text = json.loads(line)["text"]
        text = clean(text) if normalize else text
        if text:
            yield path.name, offset, text
        offset += len(line)


@pytest.fixture(scope="module")
def sources(memory_folder):
    folder = memory_folder / "lines"
    folder.mkdir()
    random = np.random.default_rng(5)
    for name in ("b", "a", "c"):
        lines = [
            json.dumps({"text": "\n".join(f"line {n}" if n % 9 else "" for n in random.integers(0, 300, 12))})
            for _ in range(60)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [folder / f"{name}.jsonl" for name in ("b", "a", "c")]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("entries", [1 << 20, 300])
def test_lines_that_occurred_before_are_gone(sources, tmp_path, tools, monkeypatch, normalize, entries):
    monkeypatch.setattr(dedup, "PARTITION_ENTRIES", entries)
    monkeypatch.setattr(dedup, "MASK_UNITS", 100)
    report = mr.prepare_text(list(map(str, sources)), tmp_path / "out", part_bytes=900, normalize=normalize, **OPTIONS)
    before = [entry for path in sources for entry in plain(path, normalize)]
    expected = without_repeats(before, normalize=normalize)
    store = mr.open_store(tmp_path / "out")
    assert stored(store, tools) == expected
    kept = [line for _, _, text in expected for line in text.split("\n") if line.strip()]
    assert len(kept) == len(set(kept))
    lines = sum(bool(line.strip()) for _, _, text in before for line in text.split("\n"))
    gone = {
        "bytes of duplicate lines": sum(len(t) for _, _, t in before) - sum(len(t) for _, _, t in expected),
        "duplicate lines": lines - len(kept),
        "nothing but duplicate lines": len(before) - len(expected),
    }
    assert report.dropped == {key: count for key, count in gone.items() if count}
    assert store.manifest.meta["report"]["dropped"] == report.dropped
    assert store.axis_offsets("lines")[-1] == len(kept)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    documents=st.lists(st.lists(st.sampled_from(LINES), min_size=1, max_size=8), min_size=1, max_size=12),
    appended=st.lists(st.lists(st.sampled_from(LINES), min_size=1, max_size=8), max_size=4),
    ends=st.sampled_from(["\n", "\r\n"]),
    normalize=st.booleans(),
    part_bytes=st.integers(20, 300),
)
def test_any_lines_against_the_oracle(memory_folder, tools, documents, appended, ends, normalize, part_bytes):
    folder = memory_folder / "any-lines"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    out, seen, expected = folder / "out", set(), []
    for name, some in (("first.jsonl", documents), ("second.jsonl", appended)):
        path = folder / name
        path.write_text("".join(json.dumps({"text": ends.join(lines)}) + "\n" for lines in some))
        before = list(plain(path, normalize))
        if name == "first.jsonl" and not before:
            return
        if some:
            mr.prepare_text(
                str(path), out, append=name != "first.jsonl", normalize=normalize, part_bytes=part_bytes, **OPTIONS
            )
            expected += without_repeats(before, seen=seen, normalize=normalize)
    assert stored(mr.open_store(out), tools) == expected


def test_parts_and_workers_do_not_matter(sources, tmp_path):
    for name, workers, part_bytes in (("one", 1, 1 << 20), ("two", 2, 700), ("three", 3, 3000)):
        options = {**OPTIONS, "workers": workers, "part_bytes": part_bytes}
        mr.prepare_text(list(map(str, sources)), tmp_path / name, **options)
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two") == tree_digest(tmp_path / "three")
    assert sorted(os.listdir(tmp_path)) == ["one", "three", "two"]


def test_slices_of_one_large_file_and_places_of_documents(tmp_path, tools):
    source = tmp_path / "a.txt"
    blocks = [f"block {k}\nshared {k % 7}\nmiddle {k}" for k in range(300)]
    source.write_text("\n\n".join(blocks))
    mr.prepare_text(str(source), tmp_path / "out", part_bytes=500, **OPTIONS)
    data = source.read_text()
    found = stored(mr.open_store(tmp_path / "out"), tools)
    assert [text for _, _, text in found] == [
        block if k < 7 else f"block {k}\nmiddle {k}" for k, block in enumerate(blocks)
    ]
    assert all(data[offset:].startswith(text.split("\n")[0] + "\n") for _, offset, text in found)


def test_a_line_is_compared_with_those_of_dropped_documents_never(tmp_path, tools):
    """What a filter or --min-chars drops is no first occurrence."""
    (tmp_path / "only_long.py").write_text("def keep(text):\n    return 'drop' not in text\n")
    source = tmp_path / "a.jsonl"
    texts = ["drop\nprecious", "x", "precious\nother", "x\nyy"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        mr.prepare_text(str(source), tmp_path / "out", filter="only_long:keep", min_chars=3, **OPTIONS)
    assert [text for *_, text in stored(mr.open_store(tmp_path / "out"), tools)] == ["precious\nother", "x\nyy"]


def test_a_filter_that_answers_otherwise_the_second_time_is_found_out(tmp_path, monkeypatch):
    (tmp_path / "fickle.py").write_text("n = 0\n\ndef keep(text):\n    global n\n    n += 1\n    return n != 5\n")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(mr.SourceError, match="filter= must give the same answer"):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", filter="fickle:keep", **OPTIONS)


@pytest.mark.parametrize("appending", [False, True])
def test_kill_9_at_every_step(tmp_path, appending):
    first, second, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out"
    for path, numbers in ((first, range(8)), (second, range(4, 12))):
        path.write_text("\n\n".join(f"line {k % 5}\nown {k}\n\nline {k}" for k in numbers))
    options = {**OPTIONS, "part_bytes": 60, "shard_tokens": 60, "val": 0.4}

    def prepare():
        mr.prepare_text(str(second if appending else first), out, append=appending, **options)

    def start():
        for path in (out, out.with_name("out.partial")):
            shutil.rmtree(path, ignore_errors=True)
        if appending:
            mr.prepare_text(str(first), out, **options)

    start()
    with count_steps() as steps:
        prepare()
    whole = tree_digest(out)
    every = range(1, len(steps) + 1) if os.environ.get("MILLRACE_SOAK") else range(1, len(steps) + 1, 12)
    for at in every:
        start()
        assert run_forked(prepare, fault=Fault(at, "kill")) == -9
        prepare()
        assert tree_digest(out) == whole, f"after a kill at step {at}, {steps[at - 1]}"
        assert not out.with_name("out.partial").exists()


def test_an_append_compares_as_the_store_was_made(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three\n\ntwo")
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "lines", **OPTIONS)
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "documents", **{**OPTIONS, "dedup_unit": "document"})
    with pytest.raises(
        mr.ConfigError, match="made with dedup_unit='line'; an append cannot have dedup_unit='document'"
    ):
        mr.prepare_text(
            str(tmp_path / "b.txt"), tmp_path / "lines", append=True, **{**OPTIONS, "dedup_unit": "document"}
        )
    with pytest.raises(
        mr.ConfigError, match="made with dedup_unit='document'; an append cannot have dedup_unit='line'"
    ):
        mr.prepare_text(str(tmp_path / "b.txt"), tmp_path / "documents", append=True, **OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["documents", "lines"]


@pytest.mark.parametrize("kind", ["near", "none"])
def test_lines_are_compared_exactly(tmp_path, kind):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(mr.ConfigError, match=f'dedup_unit="line" with dedup="{kind}"'):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", dedup=kind, **OPTIONS)


def test_the_command_says_how_many_lines_and_bytes_went(tmp_path, tools):
    (tmp_path / "a.txt").write_text("same\n\nsame\n\nother\nsame")
    done = tools.shell(
        "prepare", "text", tmp_path / "a.txt", "--out", tmp_path / "out", "--val", "0", "--tokenizer", "bytes",
        "--dedup-unit", "line",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "dropped, duplicate lines: 2" in done.stdout
    assert "dropped, bytes of duplicate lines: 9" in done.stdout
