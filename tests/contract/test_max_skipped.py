"""``--on-error skip`` leaves out damaged records only: where many are unreadable the run stops, and loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import millrace as mr

GOOD = 200
PART = {"text": {"part_bytes": 1000}, "table": {}, "records": {"part_bytes": 1500}}


def write(kind: Any, path: Path, bad: int) -> str:
    """``GOOD`` records, and among them so many that cannot be read."""
    every = GOOD // max(bad, 1)
    is_bad = [k % every == every - 1 and k // every < bad for k in range(GOOD + bad)] if bad else [False] * GOOD
    if kind.function == "transform":  # a table
        rows = [f"{'' if bad else 'A'},{k},{k}.5" for k, bad in enumerate(is_bad)]
        path = path.with_suffix(".csv")
        path.write_text("\n".join(["name,t,x", *rows]) + "\n")
    elif "tokenizer" in kind.tiny:
        texts = [b"document %d %s" % (k, b"\xff" * bad) for k, bad in enumerate(is_bad)]
        path = path.with_suffix(".txt")
        path.write_bytes(b"\n\n".join(texts))
    else:
        lines = [json.dumps({"x": [k]} if bad else {"x": [k], "label": k}) for k, bad in enumerate(is_bad)]
        path = path.with_suffix(".jsonl")
        path.write_text("\n".join(lines) + "\n")
    return str(path)


def prepare(kind: Any, source: Any, out: Path, workers: int = 1, **options: Any) -> Any:
    name = kind.prepare.__name__.removeprefix("prepare_")
    how = {"text": {"tokenizer": "bytes", "val": 0}, "table": {"time": "t", "entity": "name"}, "records": {}}[name]
    return kind.prepare(source, out, on_error="skip", workers=workers, **how, **PART[name], **options)


def kept(report: Any) -> int:
    counts = getattr(report, "documents", None) or getattr(report, "records", None) or report.rows
    return sum(counts.values())


@pytest.mark.parametrize(("bad", "stops"), [(10, False), (11, True), (40, True)])
def test_many_unreadable_records_stop_a_run_that_a_higher_share_continues(kind, tmp_path, bad, stops):
    source, out = write(kind, tmp_path / "in", bad), tmp_path / "out"
    if not stops:
        assert kept(prepare(kind, source, out)) == GOOD
        return
    share = rf"{bad} unreadable records among {GOOD + bad} \({bad / (GOOD + bad):.1%}\)"
    with pytest.raises(
        mr.SourceError, match=rf"'{source}', .*: the first of {share}.*max_skipped=0\.01; .*max_skipped=0\."
    ):
        prepare(kind, source, out)
    assert not out.exists()
    report = prepare(kind, source, out, max_skipped=0.2)
    assert kept(report) == GOOD
    assert kind.part_module == "millrace.prepare.table.read.part" or any(
        "came from an earlier" in n for n in report.notes
    )
    assert not prepare(kind, source, out).is_new  # what is finished does not depend on it


def test_the_message_is_the_same_for_any_workers_and_after_a_stop(kind, tmp_path):
    source, said = write(kind, tmp_path / "in", 30), set()
    for workers in (1, 2):
        for _ in range(2):
            with pytest.raises(mr.SourceError, match="unreadable records") as caught:
                prepare(kind, source, tmp_path / str(workers), workers)
            said.add(str(caught.value))
        said.add(prepare(kind, source, tmp_path / str(workers), workers, max_skipped=1).fingerprint)
    assert len(said) == 2


@pytest.mark.parametrize("name", ["text", "table"])
def test_a_file_that_is_left_out_whole_counts_with_its_records(name, tmp_path):
    """A header of another form would cost all of them. A file of events that cannot be used stops the run."""
    for which, field in (("good", "text"), ("other", "body")):
        if name == "text":
            lines = [json.dumps({field: f"document {k} of {which}"}) for k in range(GOOD)]
            (tmp_path / f"{which}.jsonl").write_text("\n".join(lines))
        else:
            rows = [f"{which},{k},1" for k in range(GOOD - (which == "other"))]  # the header is a line too
            (tmp_path / f"{which}.csv").write_text("\n".join([f"name,t{field},x", *rows]))
    options = {"tokenizer": "bytes", "val": 0} if name == "text" else {"time": "ttext", "entity": "name"}
    function = mr.prepare_text if name == "text" else mr.prepare_table

    def run(**more: Any) -> Any:
        return function(str(tmp_path / "*.*"), tmp_path / "out", on_error="skip", workers=1, **options, **more)

    with pytest.raises(mr.SourceError, match=rf"other.*first of {GOOD} unreadable records among {2 * GOOD:,} \(50"):
        run()
    assert kept(run(max_skipped=0.5)) == GOOD


def test_one_late_line_of_another_schema_does_not_cost_the_others(tmp_path):
    """The column that it adds is missing in all lines before it."""
    lines = [json.dumps({"x": k}) for k in range(3000)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, json.dumps({"x": 1, "extra": 2})]))
    with pytest.raises(mr.SourceError, match="'extra' is null or missing"):
        mr.prepare_records(str(tmp_path / "in.jsonl"), tmp_path / "out", workers=1)
    with pytest.raises(mr.SourceError, match=r"first of 3,000 unreadable records among 3,001 \(100.0%\)"):
        mr.prepare_records(str(tmp_path / "in.jsonl"), tmp_path / "out", workers=1, on_error="skip")
    assert not (tmp_path / "out").exists()
    with pytest.raises(mr.ConfigError, match=r"max_skipped=1\.5; expected a share"):
        mr.prepare_records(str(tmp_path / "in.jsonl"), tmp_path / "out", max_skipped=1.5)
