"""What lies on the disk between two attempts, or in a store, and was damaged: read again, or one line that says what to do."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest

import millrace as mr
from millrace.prepare.table.read import part, sources
from millrace.prepare.table.settle import fit
from millrace.prepare.table.write import shards
from millrace.testing import Fault, count_steps, run_forked, tree_digest

SIZES = {"PART_BYTES": (sources, 900), "GROUP_ROWS": (fit, 60), "MIN_SHARD": (shards, 1), "SHARDS": (shards, 4)}
OPTIONS = {"time": "t", "entity": "name", "categorical": "kind", "workers": 1, "nulls": "mask", "val_last": 0.2}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for name, (module, value) in SIZES.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(5)
    (tmp_path / "in").mkdir()
    for k in range(3):
        frame = pd.DataFrame({"name": [f"e{j % 5}" for j in range(60)], "kind": rng.choice(["a", "b"], 60)})
        frame["t"] = pd.Timestamp("2022-01-01") + pd.to_timedelta(100 * k + np.arange(60), "h")
        frame["x"] = np.where(rng.random(60) < 0.2, np.nan, rng.normal(0, 1, 60))
        frame.to_parquet(tmp_path / "in" / f"{k}.parquet", row_group_size=20)
    return str(tmp_path / "in")


@pytest.fixture
def interrupted(source, tmp_path):
    """A run that was killed when all but the last shard were written; and what it would have made."""
    whole = tmp_path / "whole"
    with count_steps("rename") as steps:
        mr.prepare_table(source, whole, **OPTIONS)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    prepare = lambda: mr.prepare_table(source, out, **OPTIONS)  # noqa: E731
    assert run_forked(prepare, fault=Fault(len(steps) - 6, "kill", operation="rename")) == -9
    assert list(partial.glob("shards/*[0-9]"))
    return out, partial, tree_digest(whole)


def damage(path, rng):
    data = path.read_bytes()
    kind = rng.choice(["flip", "cut", "more", "empty", "gone", "folder", "noise"])
    if kind == "flip" and data:
        at = int(rng.integers(len(data)))
        path.write_bytes(data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :])
    elif kind == "cut" and data:
        path.write_bytes(data[: int(rng.integers(len(data)))])
    elif kind in ("gone", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    elif kind == "noise":
        path.write_bytes(rng.bytes(len(data)))
    else:
        path.write_bytes(data + b"\0{" if kind == "more" else b"")
    return kind


def test_whatever_is_damaged_the_store_is_right_or_one_line_says_what_to_do(source, interrupted, tmp_path, seed):
    out, partial, whole = interrupted
    kept = shutil.copytree(partial, tmp_path / "kept")
    names = [
        str(path.relative_to(kept))
        for path in sorted(kept.rglob("*"))
        if path.is_file() and path.relative_to(kept).parts[0] in ("parts", "fit", "index", "plan.json")
    ]
    rng = np.random.default_rng(seed)
    for name in [*rng.choice(names, 25).tolist(), "plan.json", "plan.json"]:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(kept, partial)
        kind = damage(partial / name, rng)
        try:
            mr.prepare_table(source, out, **OPTIONS)
        except mr.MillraceError as error:
            # A plan that is whole, but says something else, is told by what differs.
            assert name in str(error) or (name == "plan.json" and "was begun" in str(error))  # noqa: PT017
            assert re.search(r"restart=True|remove that folder", str(error))  # noqa: PT017
            mr.prepare_table(source, out, restart=True, **OPTIONS)
        assert tree_digest(out) == whole, f"{kind} of {name}, seed {seed}"
        shutil.rmtree(out)


def test_values_of_a_part_that_changed_on_the_disk_are_read_again(source, interrupted, monkeypatch):
    out, partial, whole = interrupted
    path = sorted(partial.glob("parts/*/values.bin"))[0]
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))
    shutil.rmtree(partial / "shards")
    for found in partial.glob("fit/*"):
        found.unlink()
    parts, run = [], part.PartMaker.run
    monkeypatch.setattr(part.PartMaker, "run", lambda self: (parts.append(self._task.number), run(self))[1])
    mr.prepare_table(source, out, **OPTIONS)
    assert len(parts) == 1
    assert tree_digest(out) == whole


def test_restart_begins_afresh_with_other_options_and_leaves_folders_of_others_alone(source, interrupted):
    out, partial, _ = interrupted
    with pytest.raises(mr.ConfigError, match="categorical was"):
        mr.prepare_table(source, out, **{**OPTIONS, "categorical": None})
    report = mr.prepare_table(source, out, restart=True, **{**OPTIONS, "categorical": None})
    assert report.rows_kept == 0
    assert "categorical" not in report.open().columns
    assert not partial.exists()
    shutil.rmtree(out)
    partial.mkdir()
    (partial / "thesis.txt").write_text("precious")
    with pytest.raises(mr.ConfigError, match=r"out\.partial"):
        mr.prepare_table(source, out, restart=True, **OPTIONS)
    assert (partial / "thesis.txt").read_text() == "precious"


BROKEN = {
    "empty": lambda made: "",
    "no JSON": lambda made: "{",
    "a list": lambda made: "[]",
    "a number": lambda made: "7",
    "no plan": lambda made: json.dumps({**made, "plan": None}),
    "no report": lambda made: json.dumps({key: value for key, value in made.items() if key != "report"}),
    "odd options": lambda made: json.dumps({**made, "plan": {**made["plan"], "options": {"time": 3}}}),
    "odd sources": lambda made: json.dumps({**made, "plan": {**made["plan"], "sources": {"a": ["b"]}}}),
    "odd report": lambda made: json.dumps({**made, "report": {**made["report"], "rows": 7}}),
    "not utf-8": lambda made: json.dumps(made).replace("name", "\udcff"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("append", [False, True])
def test_a_damaged_provenance_is_named(source, tmp_path, kind, append):
    out = tmp_path / "out"
    mr.prepare_table(source, out, **OPTIONS)
    path = out / "provenance.json"
    path.chmod(0o644)
    path.write_bytes(BROKEN[kind](json.loads(path.read_bytes())).encode(errors="surrogateescape"))
    with pytest.raises(mr.ConfigError, match=r"provenance\.json is damaged .*(bring it back|choose another out=)"):
        mr.prepare_table(source, out, append=append, **OPTIONS)
    path.unlink()
    with pytest.raises(mr.ConfigError, match=r"provenance\.json cannot be read"):
        mr.prepare_table(source, out, append=append, **OPTIONS)


def test_a_damaged_last_line_of_provenance_does_not_stop_an_append(source, tmp_path):
    out = tmp_path / "out"
    mr.prepare_table(f"{source}/[01].parquet", out, **OPTIONS)
    path = out / "provenance.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b"{\n")
    assert mr.prepare_table(f"{source}/2.parquet", out, append=True, workers=1).added["rows"] == 60


def test_an_append_is_refused_where_the_line_of_the_last_run_is_damaged(source, tmp_path):
    """Without it the files of that run would be new, and their rows would be there twice."""
    out = tmp_path / "out"
    mr.prepare_table(f"{source}/0.parquet", out, **OPTIONS)
    mr.prepare_table(f"{source}/1.parquet", out, append=True, workers=1)
    path = out / "provenance.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-20] + b"\n")
    with pytest.raises(mr.StoreCorrupt, match=r"provenance.json, line 2, is damaged"):
        mr.prepare_table(f"{source}/[12].parquet", out, append=True, workers=1)
