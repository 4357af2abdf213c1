"""``millrace prepare records``: from images, events and rows with lists to a store of records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import typer

from millrace.cli.options import Address, Engine, MaxSkipped, SameSource
from millrace.cli.prepare_table import option, read_names
from millrace.cli.prepare_text import count, given_options, prepare
from millrace.cli.printing import plural, print_line, print_table, size
from millrace.terminal import quoted

EXAMPLE = "millrace prepare records photos/ --out store --split hash:0.1"
Names: TypeAlias = list[str] | None
PAIRS = ("rename", "cast", "axis", "offsets")


def run(
    context: typer.Context,
    sources: Annotated[list[str], typer.Argument(help="Files, folders or patterns.")],
    out: Annotated[str, option("Folder for the new store.")],
    format_: Annotated[
        str | None,
        option(
            "imagefolder, webdataset, hdf5, root, parquet, arrow, jsonl, npz, mds, litdata, datasets or lance.",
            None,
            "--format",
            show_default="guessed from the names of the files",
        ),
    ] = None,
    columns: Annotated[Names, option("Take these columns only.", "COLUMNS", show_default="all")] = None,
    rename: Annotated[Names, option("Give a column another name.", "OLD=NEW")] = None,
    cast: Annotated[
        Names, option("Store a column as another type: x=float32, or box=float32[4] for lists of 4.", "NAME=TYPE")
    ] = None,
    axis: Annotated[
        Names,
        option(
            "Columns whose lists are equally long: hits=x,y,energy; own: none are.",
            "NAME=COLUMNS",
            show_default="as the first records show",
        ),
    ] = None,
    key: Annotated[
        str | None, option("The column that a record is known by, for splits.", "COLUMN", show_default="key")
    ] = None,
    split: Annotated[
        str | None,
        option(
            "What val is: hash:0.1 (a share, by key or contents), tail:0.1 (the last records), list:FILE (a key per line), "
            "keys:A,B, or folder (the first folder is train, val or test). A second value is test: hash:0.1,0.1.",
            "FORM",
            show_default="everything is train",
        ),
    ] = None,
    decode: Annotated[
        int | None, option("Images: store pixels, the shorter side scaled to N and the centre cut out.", "N", min=1)
    ] = None,
    check: Annotated[bool, option("Images: decode each to see whether it is whole.", None, "--check")] = False,
    tree: Annotated[str | None, option("ROOT: the tree to read, where there are several.", "NAME")] = None,
    offsets: Annotated[
        Names, option("HDF5: the dataset of offsets or counts of an axis: hits=hit_offsets.", "AXIS=DATASET")
    ] = None,
    filter_: Annotated[
        str | None, option("Keep only records for which this function returns true.", "MODULE:FUNCTION", "--filter")
    ] = None,
    on_error: Annotated[str, option("What to do with unreadable records: stop or skip.")] = "stop",
    max_skipped: MaxSkipped = 0.01,
    max_ratio: Annotated[int, option("Refuse files that grow more than this many times, above 1 GiB.")] = 1000,
    shard_bytes: Annotated[int, option("The largest shard.", "BYTES", parser=count)] = "256MiB",  # type: ignore[assignment]
    exclude: Annotated[Names, option("Files or folders to leave out; may be repeated.", "GLOB")] = None,
    restart: Annotated[bool, option("Begin afresh: delete the work of an interrupted run.", None, "--restart")] = False,
    workers: Annotated[int | None, option("Number of worker processes.", min=1, show_default="one per core")] = None,
    stall: Annotated[
        float, option("Stop if a worker makes no progress for this long; 0: never.", "SECONDS", min=0)
    ] = 1800,
    engine: Engine = "local",
    address: Address = None,
    append: Annotated[bool, option("Add to an existing store, as a new snapshot.", None, "--append")] = False,
    same_source: SameSource = None,
    as_json: Annotated[bool, option("Print JSON for machines.", None, "--json")] = False,
) -> None:
    """Make a store of records: images, events, rows with lists.

    A list is a run of rows, any other value one item per record. If it is stopped, the same command continues.
    """
    from millrace.cli.prepare_progress import RecordProgress
    from millrace.prepare.records.options import RecordOptions
    from millrace.prepare.records.records import prepare_records
    from millrace.prepare.split_forms import RECORD_FORMS

    given = given_options(context, RecordOptions.__struct_fields__, RECORD_FORMS)
    for name in PAIRS:
        if given.get(name) is not None:
            given[name] = read_pairs(given[name], f"--{name}")
    if given.get("columns") is not None:
        given["columns"] = read_names(given["columns"])
    report = prepare(context, prepare_records, RecordProgress(), given)
    if not as_json:
        show(report, out, is_append=append)


def read_pairs(values: Sequence[str], flag: str) -> Any:
    """``old=new`` and ``a=b,c=d``; of ``--axis`` also ``hits=x,y`` and ``own``."""
    if flag == "--axis" and list(values) == ["own"]:
        return "own"
    found: dict[str, Any] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not name.strip() or not rest.strip():
            raise typer.BadParameter(f"{value!r} is not NAME=VALUE", param_hint=flag)
        found[name.strip()] = read_names([rest]) if flag == "--axis" else rest.strip()
    return found


def show(report: Any, out: str, *, is_append: bool) -> None:
    if not report.is_new:
        what = "already complete" if report.records else "nothing to add to"
        print_line(f"{what}: {report.path}, fingerprint {report.fingerprint}")
        return
    if is_append:
        print_line("added:")
    rows = [(split, f"{number:,}", f"{report.shards.get(split, 0):,}") for split, number in report.records.items()]
    print_table([("split", "records", "shards"), *rows], indent="")
    lengths = [plural(number, "row") + f" of {axis}" * (axis != "rows") for axis, number in report.rows.items()]
    print_line(f"{' and '.join(lengths)}, {size(report.bytes)}, from {report.format}")
    for reason, number in report.dropped.items():
        where = f" (named in {out}/quarantine.jsonl)" if reason == "unreadable" else ""
        print_line(f"dropped, {reason}: {number:,}{where}")
    seconds, records = max(report.seconds, 1e-9), sum(report.records.values())
    print_line(
        f"read {plural(records, 'record')} in {seconds:.1f} s: {records / seconds:,.0f} records/s, "
        f"{report.bytes / seconds / 1e6:.1f} MB/s"
    )
    print_line(f"wrote {report.path}, fingerprint {report.fingerprint}")
    print_line(f"next: millrace head {quoted(out)}")
