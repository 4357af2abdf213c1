"""Writes what preparations of every kind and option make: ``python tests/golden/make_preparations.py``.

``preparations.json`` holds for each case the store's fingerprint, a digest of its files, the counts of the report, how
many notes it has, the records set aside, or the class of the error. Wording is not in it. test_preparations.py
prepares again and compares; run this file anew only when a promise of the format or a default changes on purpose.
"""

import contextlib
import gzip
import hashlib
import io
import json
import struct
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import millrace as mr
from millrace.testing import tree_digest

HERE = Path(__file__).parent
RECORDED = HERE / "preparations.json"
PREPARE = {"text": mr.prepare_text, "table": mr.prepare_table, "records": mr.prepare_records}
# Of a report: what depends on the machine, the place or the moment.
PASSING = {"path", "seconds", "wall_s", "notes", "fingerprint", "bytes_read", "encoder"}


@dataclass
class Case:
    """One preparation, and perhaps what is appended to its store."""

    kind: str
    sources: str  # names in the folder of sources, or a pattern, with spaces between
    options: dict[str, Any] = field(default_factory=dict)
    later: str = ""  # sources of an append


def words(rng: np.random.Generator, count: int) -> str:
    return " ".join(rng.choice(["mill", "wheel", "river", "grain", "Öl", "stone"], count))


def write_text(base: Path) -> None:
    rng = np.random.default_rng(1)
    lines = [words(rng, int(rng.integers(1, 12))) for _ in range(60)]
    (base / "lines.txt").write_text("\n".join([*lines, *lines[:5]]) + "\n")
    (base / "paragraphs.txt").write_text(
        "\n\n".join(f"{a}\n  {b} " for a, b in zip(lines, lines[30:], strict=False)) + "\n"
    )
    (base / "crlf.txt").write_bytes("\r\n".join(lines[:20]).encode() + b"\r\n\r\nlast without an end")
    (base / "broken.txt").write_bytes(b"good line\nbad \xff\xfe line\nanother good one\n" + "\n".join(lines).encode())
    (base / "latin.txt").write_bytes("\n".join(lines[:10]).encode("latin-1"))
    (base / "code.py").write_text("def f(x):\n    if x:\n        return 1\n\n\ndef g():\n    return 2\n")
    (base / "page.html").write_text(
        f"<html><head><title>t</title></head><body><p>{lines[0]}</p><p>a &amp; b</p></body></html>"
    )
    rows = [{"text": line, "id": number, "spans": [[0, min(3, len(line))]]} for number, line in enumerate(lines)]
    (base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "more.jsonl").write_text(
        "".join(json.dumps({"text": f"{line} again"}) + "\n" for line in lines[:25] + lines[:3])
    )
    (base / "odd.jsonl").write_text('{"text": "fine"}\n{"text": 3}\nnot json\n{"other": "x"}\n{"text": "fine too"}\n')
    (base / "rows.csv").write_text(
        "text,id\n" + "".join(f'"{line}, ""quoted""",{k}\n' for k, line in enumerate(lines[:20]))
    )
    (base / "rows.jsonl.gz").write_bytes(gzip.compress((base / "rows.jsonl").read_bytes(), mtime=0))
    near = [f"{words(rng, 40)} number {k}" for k in range(8)]
    (base / "near.txt").write_text("\n".join([*near, *(f"{line} x" for line in near)]) + "\n")
    (base / "long.txt").write_text("\n".join([words(rng, 400), *lines[:5], words(rng, 300)]) + "\n")
    (base / "empty.txt").write_text("")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [*lines[:30], ""], "id": range(31)}), base / "rows.parquet", row_group_size=7)


def write_tables(base: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(2)

    def table(first: int, days: int, names: str = "abc") -> dict[str, Any]:
        count = len(names) * days
        close = np.round(100 + np.cumsum(rng.normal(size=count)), 2)
        return {
            "name": [name for name in names for _ in range(days)],
            "time": pa.array(
                [86_400 * (19_000 + first + day) for _ in names for day in range(days)], pa.timestamp("s")
            ),
            "close": [None if k % 17 == 5 else value for k, value in enumerate(close.tolist())],
            "volume": rng.integers(1, 10_000, count),
            "sector": [f"s{ord(name) % 2}" for name in names for _ in range(days)],
            "mood": [("up", "down", "flat")[k % 3] for k in range(count)],
        }

    pq.write_table(pa.table(table(0, 40)), base / "days.parquet", row_group_size=31)
    pq.write_table(pa.table(table(40, 10)), base / "later.parquet")
    shuffled = pa.table(table(0, 12, "de"))
    pq.write_table(shuffled.take(rng.permutation(24)), base / "shuffled.parquet")
    pq.write_table(pa.concat_tables([shuffled, shuffled.slice(3, 4)]), base / "twice.parquet")
    for name in ("oak", "elm"):
        rows = "".join(
            f"2024-01-{day:02d} 00:{day % 7:02d}:00,{day * 1.5},{day}\n" for day in range(1, 20 if name == "oak" else 8)
        )
        (base / f"{name}.csv").write_text("time,price,volume\n" + rows)
    (base / "german.csv").write_text(
        "Zeit;Preis\n" + "".join(f"{day:02d}.01.2024 10:00;{day},5\n" for day in range(1, 15))
    )
    (base / "damaged.csv").write_text("time,price\n2024-01-01,1\nyesterday,2\n2024-01-03,3\n,4\n2024-01-05,5\n")


def png(k: int) -> bytes:
    """A picture whose bytes depend on no library's version: stored, not compressed."""
    rows = b"".join(b"\0" + bytes((x * 7 + y * 3 + k * 31) % 256 for x in range(12)) for y in range(3))
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 4, 3, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 0)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def write_records(base: Path) -> None:
    import h5py
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet as pq
    import uproot

    rng = np.random.default_rng(3)
    events = [
        {
            "x": rng.normal(size=n).round(3).tolist(),
            "y": rng.normal(size=n).round(3).tolist(),
            "label": k % 3,
            "key": f"event-{k}",
        }
        for k, n in enumerate(rng.integers(0, 6, 30).tolist())
    ]
    (base / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    more = [{**event, "key": f"late-{k}"} for k, event in enumerate(events[:7])]
    (base / "late.jsonl").write_text("".join(json.dumps(event) + "\n" for event in more))
    damaged = [json.dumps(event) for event in events[:10]]
    (base / "damaged.jsonl").write_text("\n".join([*damaged[:4], "{broken", *damaged[4:], '{"x": "text"}']) + "\n")
    table = pa.table({name: [event[name] for event in events] for name in events[0]})
    pq.write_table(table, base / "events.parquet", row_group_size=9)
    pyarrow.feather.write_feather(table, base / "events.arrow", compression="uncompressed")
    with h5py.File(base / "events.h5", "w") as file:
        file["x"], file["y"] = (np.concatenate([np.array(event[name]) for event in events]) for name in "xy")
        file["offsets"] = np.cumsum([0, *(len(event["x"]) for event in events)])
        file["label"] = [event["label"] for event in events]
    with uproot.recreate(base / "events.root") as file:
        import awkward as ak

        file["tree"] = {
            "x": ak.Array([event["x"] for event in events]),
            "label": np.array([event["label"] for event in events]),
        }
    np.savez(base / "arrays.npz", values=rng.normal(size=(12, 3)).round(3), label=np.arange(12))
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (base / "pictures" / split / name).mkdir(parents=True)
            for k in range(3):
                (base / "pictures" / split / name / f"{name}-{split}-{k}.png").write_bytes(png(k + 10 * len(split)))
    with tarfile.open(base / "shard.tar", "w") as archive:
        for k in range(8):
            for ending, data in (
                ("png", png(k)),
                ("cls", str(k % 2).encode()),
                ("json", json.dumps({"k": k}).encode()),
            ):
                entry = tarfile.TarInfo(f"{k:04d}.{ending}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


TEXT, TIMES = {"tokenizer": "bytes"}, {"entity": "name", "time": "time"}
LONG = {**TEXT, "document": "line", "max_document": 1000}
GERMAN = {"time": "Zeit", "delimiter": ";", "decimal": ",", "time_format": "%d.%m.%Y %H:%M"}
CASES: dict[str, Case] = {
    "text lines": Case("text", "lines.txt", {**TEXT, "document": "line", "val": 0.1, "shard_tokens": 300}),
    "text file": Case("text", "lines.txt paragraphs.txt", {**TEXT, "document": "file", "val": 0}),
    "text blank lines": Case("text", "paragraphs.txt crlf.txt", {**TEXT, "document": "blank-line", "val": 0.2, "test": 0.2}),
    "text tail": Case("text", "rows.jsonl", {**TEXT, "val": 0.1, "test": 0.1, "val_tail": True, "dedup": "none"}),
    "text append": Case("text", "rows.jsonl", {**TEXT, "val": 0.1, "shard_tokens": 500}, later="more.jsonl"),
    "text csv": Case("text", "rows.csv", {**TEXT, "val": 0}),
    "text parquet": Case("text", "rows.parquet", {**TEXT, "val": 0.1}),
    "text gzip": Case("text", "rows.jsonl.gz", {**TEXT, "val": 0.1}),
    "text many": Case("text", "rows.jsonl rows.csv rows.parquet more.jsonl", {**TEXT, "val": 0.1, "shard_tokens": 1000}),
    "text gpt2": Case("text", "rows.jsonl", {"tokenizer": "gpt2", "val": 0.1}),
    "text char": Case("text", "lines.txt", {"tokenizer": "char", "document": "line", "val": 0.1}),
    "text trained": Case("text", "lines.txt", {"tokenizer": "train:300", "document": "line", "val": 0.1}),
    "text code": Case("text", "code.py", {**TEXT, "document": "file", "val": 0}),
    "text code as it is": Case("text", "code.py", {**TEXT, "document": "file", "val": 0, "normalize": False}),
    "text html raw": Case("text", "page.html", {**TEXT, "document": "file", "val": 0}),
    "text html": Case("text", "page.html", {**TEXT, "document": "file", "val": 0, "html": "text"}),
    "text latin": Case("text", "latin.txt", {**TEXT, "document": "line", "encoding": "latin-1", "val": 0}),
    "text broken": Case("text", "broken.txt", {**TEXT, "document": "line"}),
    "text broken skip": Case("text", "broken.txt", {**TEXT, "document": "line", "on_error": "skip", "val": 0}),
    "text broken replace": Case("text", "broken.txt", {**TEXT, "document": "line", "on_error": "replace", "val": 0}),
    "text odd rows": Case("text", "odd.jsonl", TEXT),
    "text odd rows skip": Case("text", "odd.jsonl", {**TEXT, "on_error": "skip", "val": 0}),
    "text near": Case("text", "near.txt", {**TEXT, "document": "line", "dedup": "near", "val": 0}),
    "text line dedup": Case("text", "lines.txt paragraphs.txt", {**TEXT, "document": "file", "dedup_unit": "line", "val": 0}),
    "text long": Case("text", "long.txt", LONG),
    "text long split": Case("text", "long.txt", {**LONG, "long_documents": "split", "val": 0}),
    "text short": Case("text", "lines.txt", {**TEXT, "document": "line", "min_chars": 20, "val": 0}),
    "text masked": Case("text", "rows.jsonl", {**TEXT, "mask_field": "spans", "normalize": False, "val": 0}),
    "text other field": Case("text", "rows.jsonl", {**TEXT, "text_field": "missing"}),
    "text nothing": Case("text", "empty.txt", TEXT),
    "text no such file": Case("text", "none.txt", TEXT),
    "text unknown option": Case("text", "lines.txt", {**TEXT, "nonsense": 1}),
    "table plain": Case("table", "days.parquet", TIMES),
    "table by file": Case("table", "oak.csv elm.csv", {"time": "time", "min_rows": 10}),
    "table german": Case("table", "german.csv", GERMAN),
    "table roles": Case(
        "table", "days.parquet",
        {**TIMES, "features": ("close", "volume"), "static": ("sector",), "categorical": ("mood",), "known_future": ("volume",)},
    ),
    "table shuffled": Case("table", "shuffled.parquet days.parquet", {**TIMES, "shard_bytes": 600}),
    "table append": Case("table", "days.parquet", {**TIMES, "split": "tail:0.2", "gap": 2}, later="later.parquet"),
    **{
        f"table nulls {policy}": Case("table", "days.parquet", {**TIMES, "nulls": {"close": policy}})
        for policy in ("ffill", "drop", "interpolate", "mask", "value:0")
    },
    **{
        f"table duplicates {rule}": Case("table", "twice.parquet", {**TIMES, "duplicates": rule})
        for rule in ("error", "first", "last", "mean")
    },
    **{f"table scale {scale}": Case("table", "days.parquet", {**TIMES, "scale": scale}) for scale in ("minmax", "robust", "none")},
    "table per entity": Case("table", "days.parquet", {**TIMES, "per_entity": True, "split": "tail:0.2", "fit_on": "all"}),
    **{f"table {dtype}": Case("table", "days.parquet", {**TIMES, "dtype": dtype}) for dtype in ("float16", "bfloat16")},
    **{
        f"table split {form}": Case("table", "days.parquet", {**TIMES, "split": form, "gap": 1})
        for form in ("time:2022-01-30,2022-02-05", "span:0.2,0.1")
    },
    "table split entity:0.3": Case("table", "days.parquet", {**TIMES, "split": "entity:0.3"}),
    "table split entities:b;c": Case("table", "days.parquet", {**TIMES, "split": "entities:b;c"}),
    "table grid": Case("table", "shuffled.parquet", {**TIMES, "freq": "12h", "calendar": ("dayofweek", "hour")}),
    "table where": Case("table", "days.parquet", {**TIMES, "where": "volume > 3000 and close < 120"}),
    "table damaged": Case("table", "damaged.csv", {"time": "time"}),
    "table damaged skip": Case("table", "damaged.csv", {"time": "time", "on_error": "skip"}),
    "table other time": Case("table", "days.parquet", {"entity": "name", "time": "missing"}),
    "table no such file": Case("table", "none.parquet", TIMES),
    "records jsonl": Case("records", "events.jsonl", {"split": "hash:0.2", "part_bytes": 500, "shard_bytes": 900}),
    "records append": Case("records", "events.jsonl", {"split": "hash:0.2"}, later="late.jsonl"),
    "records parquet": Case("records", "events.parquet", {"split": "tail:0.2,0.1"}),
    "records arrow": Case("records", "events.arrow", {"columns": ("x", "label"), "rename": {"x": "hits"}}),
    "records hdf5": Case("records", "events.h5", {"cast": {"label": "int32"}}),
    "records root": Case("records", "events.root", {}),
    "records npz": Case("records", "arrays.npz", {}),
    "records images": Case("records", "pictures/train", {"format": "imagefolder", "split": "tail:0.3", "check": True}),
    "records image folders": Case("records", "pictures", {"format": "imagefolder", "split": "folder"}),
    "records images decoded": Case("records", "pictures/val", {"format": "imagefolder", "decode": 2}),
    "records webdataset": Case("records", "shard.tar", {"format": "webdataset", "split": "keys:0001,0002;0003"}),
    "records axes": Case("records", "events.jsonl", {"axis": "own", "key": "key"}),
    "records cast": Case("records", "events.jsonl", {"cast": {"x": "float16", "label": "uint8"}}),
    "records damaged": Case("records", "damaged.jsonl", {}),
    "records damaged skip": Case("records", "damaged.jsonl", {"on_error": "skip"}),
    "records bad cast": Case("records", "events.jsonl", {"cast": {"key": "int8"}}),
    "records no such file": Case("records", "none.jsonl", {}),
}  # fmt: skip


def write_sources(base: Path) -> None:
    base.mkdir()
    for write in (write_text, write_tables, write_records):
        write(base)


def outcome(case: Case, base: Path, out: Path) -> dict[str, Any]:
    """What is compared: of each step (the preparation, then the append) what it made, or the class of its error."""
    steps = {"made": lambda: _prepare(case, case.sources, base, out, case.options)}
    if case.later:
        # Text and records take their options from the store.
        steps["appended"] = lambda: _prepare(case, case.later, base, out, {}, append=True)
    return {step: _result(make, out) for step, make in steps.items()}


def _prepare(case: Case, names: str, base: Path, out: Path, options: dict[str, Any], **more: Any) -> Any:
    # Relative names: the lines set aside hold them, and the manifest says how long those lines are.
    with contextlib.chdir(base):
        return PREPARE[case.kind](names.split(), out, workers=1, progress=lambda *_: None, **options, **more)


def _result(make: Callable[[], Any], out: Path) -> dict[str, Any]:
    import msgspec

    try:
        report = make()
    except mr.MillraceError as error:
        return {"error": type(error).__name__}
    counts = {name: value for name, value in msgspec.to_builtins(report).items() if name not in PASSING}
    digests = {name: digest for name, digest in tree_digest(out).items() if name != "quarantine.jsonl"}  # has wording
    files = json.dumps(digests, sort_keys=True)
    aside = out / "quarantine.jsonl"
    lines = [json.loads(line) for line in aside.read_text().splitlines()] if aside.exists() else []
    return {
        "fingerprint": report.fingerprint,
        "files": hashlib.sha256(files.encode()).hexdigest()[:16],
        "counts": counts,
        "notes": len(report.notes),
        "set_aside": [{name: value for name, value in line.items() if name != "reason"} for line in lines],
    }


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "sources"
        write_sources(base)
        recorded = {
            name: outcome(case, base, Path(folder) / f"store-{k}") for k, (name, case) in enumerate(CASES.items())
        }
    RECORDED.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
