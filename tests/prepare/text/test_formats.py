"""JSONL, CSV, Parquet, and their compressed forms: the same documents make the same tokens in every wrapping."""

import csv
import gzip
import io
import json
import os

import pytest

import millrace as mr
from millrace.testing import tree_digest

SMALL = {"part_bytes": 20_000, "workers": 1, "val": 0, "tokenizer": "bytes", "normalize": False}


@pytest.fixture(scope="module")
def texts(corpus, tools):
    """Documents with line ends, quotes, commas and non-ASCII letters in them."""
    return [d.text for d in tools.oracle(corpus / "a.txt", normalize=False)]


def as_jsonl(texts):
    return b"".join(json.dumps({"id": k, "text": text}).encode() + b"\n" for k, text in enumerate(texts))


def as_csv(texts):
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([("id", "text"), *enumerate(texts)])
    return file.getvalue().encode()


def as_parquet(texts):
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), file, row_group_size=7)
    return file.getvalue()


def as_lines(texts):
    return "\n\n".join(texts).encode()


def zstd_compress(data):
    try:
        from compression import zstd
    except ImportError:
        from backports import zstd
    return zstd.compress(data)


def gzip_members(data):
    """Two members, as from ``cat a.gz b.gz``."""
    return gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])


FORMATS = {"jsonl": as_jsonl, "csv": as_csv, "parquet": as_parquet, "txt": as_lines}
WRAPPINGS = {"": bytes, ".gz": gzip_members, ".zst": zstd_compress}


@pytest.mark.parametrize(
    ("form", "wrapping"),
    [(form, wrapping) for form in FORMATS for wrapping in WRAPPINGS if form != "parquet" or not wrapping],
)
def test_every_format_gives_the_same_documents(texts, tmp_path, tools, form, wrapping):
    source = tmp_path / f"corpus.{form}{wrapping}"
    source.write_bytes(WRAPPINGS[wrapping](FORMATS[form](texts)))
    mr.prepare_text(str(source), tmp_path / "out", **SMALL)
    store = mr.open_store(tmp_path / "out")
    found = tools.records(store)
    assert [store.decode(tokens[:-1]) for _, _, tokens in found] == texts
    if form == "parquet":
        assert [offset for _, offset, _ in found] == list(range(len(texts))), "the offset is the row"
    if form == "csv":
        places = [as_csv(texts)[offset:] for _, offset, _ in found]
        assert [place.split(b",")[0] for place in places] == [b"%d" % k for k in range(len(texts))], "it is a row's"
    if form == "jsonl":
        data = as_jsonl(texts)
        places = [data[offset : data.index(b"\n", offset)] for _, offset, _ in found]
        assert [json.loads(line)["id"] for line in places] == list(range(len(texts))), "the offset is a line's"


def test_a_long_jsonl_file_is_cut_into_parts_without_losing_a_line(texts, tmp_path, tools):
    source = tmp_path / "a.jsonl"
    source.write_bytes(as_jsonl(texts))
    for part_bytes in (997, 5_000, 1 << 20):
        mr.prepare_text(str(source), tmp_path / f"{part_bytes}", **{**SMALL, "part_bytes": part_bytes})
    trees = [tree_digest(tmp_path / f"{part_bytes}") for part_bytes in (997, 5_000, 1 << 20)]
    assert trees[0] == trees[1] == trees[2]
    assert mr.open_store(tmp_path / "997").num_records == len(texts)


def test_sources_of_all_kinds_follow_the_order_of_the_arguments(texts, tmp_path, tools):
    third = len(texts) // 3
    pieces = {"z.csv": as_csv(texts[:third]), "m.jsonl": as_jsonl(texts[third : 2 * third])}
    pieces |= {"a.parquet": as_parquet(texts[2 * third :])}
    for name, data in pieces.items():
        (tmp_path / name).write_bytes(data)
    mr.prepare_text([str(tmp_path / name) for name in pieces], tmp_path / "out", **SMALL)
    store = mr.open_store(tmp_path / "out")
    assert [store.decode(tokens[:-1]) for _, _, tokens in tools.records(store)] == texts
    assert list(dict.fromkeys(store.columns["source"][:])) == list(pieces)


def test_names_of_any_bytes_are_sources(tmp_path, tools):
    names = [b"n\xff.txt", b"line\nend.txt", b"a b" * 60 + b".txt"]
    for k, name in enumerate(names):
        (tmp_path / os.fsdecode(name)).write_text(f"document {k}")
    paths = [str(tmp_path / os.fsdecode(name)) for name in names]
    for _ in range(2):  # made, then already complete
        mr.prepare_text(paths, tmp_path / "out", **SMALL)
    shown = [name.decode(errors="backslashreplace") for name in names]
    assert [source for source, _, _ in tools.records(mr.open_store(tmp_path / "out"))] == shown


def test_what_cannot_be_read_is_set_aside_beside_the_store(texts, tmp_path):
    lines = as_jsonl(texts).splitlines(keepends=True)
    lines[3:3] = [b'{"id": 1}\n', b"{broken\n"]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(mr.SourceError, match=r'byte [0-9]+: .*on_error="skip"') as stopped:
        mr.prepare_text(str(tmp_path / "a.jsonl"), tmp_path / "out", **SMALL)
    assert stopped.value.offset == sum(map(len, lines[:3]))
    report = mr.prepare_text(str(tmp_path / "a.jsonl"), tmp_path / "out", on_error="skip", **SMALL)
    aside = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_bytes().splitlines()]
    assert [line["offset"] for line in aside] == [sum(map(len, lines[:3])), sum(map(len, lines[:4]))]
    assert sum(n for reason, n in report.dropped.items() if reason.startswith("unreadable")) == 2
    assert report.documents == {"train": len(texts)}
