"""Files of records are looked at before any work: what cannot be used is named at once, or set aside as a whole."""

import gzip
import json

import pytest

import millrace as mr
from millrace.prepare.advice import with_flags

OPTIONS = {"tokenizer": "bytes", "val": 0, "workers": 1}


@pytest.fixture
def folder(tmp_path):
    """Good files, and three whose header lacks the text, in three formats."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.csv").write_text("id,text\n1,good csv\n")
    (folder / "b.csv").write_text("id,body\n1,no such column\n")
    (folder / "c.jsonl").write_text(json.dumps({"text": "good json"}) + "\n")
    (folder / "d.jsonl").write_text(json.dumps({"body": "no such field"}) + "\n")
    parquet.write_table(pyarrow.table({"text": ["good parquet"]}), folder / "e.parquet")
    parquet.write_table(pyarrow.table({"body": ["one", "two"]}), folder / "f.parquet", row_group_size=1)
    (folder / "g.txt").write_text("plain text")
    return folder


def test_all_files_that_cannot_be_used_are_named_before_any_work(folder, tmp_path, parts_read):
    with pytest.raises(mr.SourceError) as caught:
        mr.prepare_text(str(folder), tmp_path / "out", **OPTIONS)
    said = str(caught.value)
    assert said.startswith("no field 'text' in 3 files: ")
    for name in ("b.csv", "d.jsonl", "f.parquet"):
        assert f"{name}'" in said
    assert "b.csv' has id, body | " in said
    assert said.endswith(REMEDY.format("the files without it"))
    assert "\n" not in said
    assert parts_read == []
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_skip_sets_such_files_aside_as_a_whole(folder, tmp_path, workers):
    report = mr.prepare_text(str(folder), tmp_path / "out", on_error="skip", **{**OPTIONS, "workers": workers})
    assert report.documents == {"train": 4}
    assert report.dropped == {"unreadable: the whole file": 2, "unreadable: no field 'text'": 1}
    lines = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["source"][-9:], line["reason"]) for line in lines if "whole" in line["reason"]] == [
        ("/in/b.csv", "the whole file: has no column 'text'; it has id, body"),
        ("f.parquet", "the whole file: has no column 'text'; it has body"),
    ]


def test_exclude_leaves_them_out(folder, tmp_path):
    exclude = ["b.csv", "d.*", "f.*"]
    assert mr.prepare_text(str(folder), tmp_path / "out", exclude=exclude, **OPTIONS).documents == {"train": 4}


def test_a_line_that_is_wrong_does_not_take_its_file_with_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('not json\n{"text": "good"}\n')
    report = mr.prepare_text(str(tmp_path / "a.jsonl"), tmp_path / "out", on_error="skip", **OPTIONS)
    assert (report.documents, report.dropped) == ({"train": 1}, {"unreadable: not JSON": 1})


def test_a_file_that_is_no_parquet_is_set_aside_too(folder, tmp_path):
    (folder / "h.parquet").write_bytes(b"nothing of the kind")
    (folder / "i.parquet.gz").write_bytes(gzip.compress((folder / "f.parquet").read_bytes()))
    with pytest.raises(
        mr.SourceError, match=r"^5 files .*h\.parquet' is not readable Parquet.*i\.parquet\.gz' is Parquet inside gzip"
    ):
        mr.prepare_text(str(folder), tmp_path / "out", **OPTIONS)
    report = mr.prepare_text(str(folder), tmp_path / "out", on_error="skip", **OPTIONS)
    assert report.dropped["unreadable: the whole file"] == 4
    assert report.documents == {"train": 4}


def test_an_error_at_the_header_leaves_finished_parts_where_they_are(folder, tmp_path):
    for name in ("b.csv", "d.jsonl", "f.parquet"):
        (folder / name).unlink()
    with pytest.raises(mr.ConfigError, match="would be empty"):  # all parts are read
        mr.prepare_text(str(folder), tmp_path / "out", **{**OPTIONS, "val": 1e-9})
    (folder / "b.csv").write_text("id,body\n1,no such column\n")
    with pytest.raises(mr.SourceError, match=r"no field 'text' in 1 file: .*b\.csv' has id, body"):
        mr.prepare_text(str(folder), tmp_path / "out", **OPTIONS)
    (folder / "b.csv").write_text("id,text\n1,fixed\n")
    report = mr.prepare_text(str(folder), tmp_path / "out", **OPTIONS)
    assert report.documents == {"train": 5}


@pytest.mark.parametrize(
    ("ending", "named"), [(".gz", "gzip; unpack it first (gunzip)"), (".zst", "zstd; unpack it first (unzstd)")]
)
def test_parquet_that_is_compressed_as_a_whole_is_refused_before_any_work(folder, tmp_path, parts_read, ending, named):
    path = tmp_path / f"a.parquet{ending}"
    path.write_bytes(b"never opened")
    with pytest.raises(mr.SourceError) as caught:
        mr.prepare_text([str(folder / "a.csv"), str(path)], tmp_path / "out", **OPTIONS)
    assert str(caught.value) == f"{str(path)!r} is Parquet inside {named}: Parquet is compressed inside"
    assert parts_read == []
    assert not (tmp_path / "out.partial").exists()
    report = mr.prepare_text([str(folder / "a.csv"), str(path)], tmp_path / "out", on_error="skip", **OPTIONS)
    assert (report.documents, report.dropped) == ({"train": 1}, {"unreadable: the whole file": 1})


REMEDY = (
    "; other files have it: prepare those first and leave {0} out with exclude=; then add {0} with append=True and "
    'text_field="NAME"'
)


@pytest.mark.parametrize(
    ("names", "these"),
    [(["b.csv"], "this file"), (["d.jsonl"], "this file"), (["b.csv", "f.parquet"], "the files without it")],
)
def test_text_fields_of_two_names_are_told_how_to_go_on(folder, tmp_path, names, these):
    paths = [str(folder / name) for name in ("a.csv", *names)]
    with pytest.raises(mr.SourceError) as caught:
        mr.prepare_text(paths, tmp_path / "out", **OPTIONS)
    assert REMEDY.format(these) in str(caught.value)
    mr.prepare_text(paths, tmp_path / "out", exclude=[*names], **OPTIONS)
    mr.prepare_text(paths[1:], tmp_path / "out", append=True, text_field="body", workers=1)
    assert mr.open_store(tmp_path / "out").num_records > 1


def test_the_remedy_for_two_names_is_given_only_where_it_helps(folder, tmp_path):
    for paths, options in (
        (["b.csv"], {}),  # no other file
        (["b.csv", "g.txt"], {}),  # none with fields
        (["a.csv", "c.jsonl"], {"mask_field": "loss", "normalize": False}),  # another field
    ):
        with pytest.raises(mr.SourceError) as caught:
            mr.prepare_text([str(folder / name) for name in paths], tmp_path / "out", **OPTIONS, **options)
        assert "other files have it" not in str(caught.value)


def test_a_command_gives_the_remedy_for_two_names_in_flags(folder, tmp_path):
    with pytest.raises(
        mr.SourceError, match=r"with --exclude; then add this file with --append and --text-field NAME$"
    ):
        with_flags(mr.prepare_text)([str(folder / "a.csv"), str(folder / "b.csv")], tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("content", "b.jsonl' has content; if they name their text differently, prepare one kind"),
        ("body", "b.jsonl' has body; choose one that all have (body) with --text-field; if they name"),
    ],
)
def test_files_that_all_lack_the_text_are_listed_with_one_remedy(tmp_path, second, said):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "one"}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({second: "two"}) + "\n")
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(mr.SourceError) as caught:
        with_flags(mr.prepare_text)(paths, tmp_path / "out", **OPTIONS)
    assert str(caught.value).startswith("no field 'text' in 2 files: ")
    assert said in str(caught.value)
    assert str(caught.value).endswith("then add the others with --append and --text-field NAME")
