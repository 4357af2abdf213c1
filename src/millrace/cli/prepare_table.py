"""``millrace prepare table``: from Parquet and CSV files to a scaled series store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import typer

from millrace.cli.options import Address, Engine, MaxSkipped, SameSource
from millrace.cli.prepare_text import count, given_options, prepare
from millrace.cli.printing import plural, print_line, print_table, size
from millrace.terminal import quoted

EXAMPLE = "millrace prepare table prices/*.parquet --out store --entity symbol --time date --target close --split time:2023-01-01"
Names: TypeAlias = list[str] | None


def option(text: str | None = None, metavar: str | None = None, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, **more)


def read_names(values: Sequence[str]) -> list[str]:
    """``a,b`` and repeated options alike."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def read_policies(values: Sequence[str]) -> dict[str, str]:
    """``ffill`` for every column, ``volume=value:0`` for one."""
    pairs = [value.rpartition("=") for value in values]
    return {column if equals else "*": policy for column, equals, policy in pairs}


def run(
    context: typer.Context,
    sources: Annotated[list[str], typer.Argument(help="Parquet or CSV files, folders or patterns.")],
    out: Annotated[str, option("Where the store will be.")],
    time: Annotated[
        str | None, option("The column with the times; not needed with --append.", "COLUMN", show_default=False)
    ] = None,
    entity: Annotated[
        Names, option("The columns that name the entity.", "COLUMNS", show_default="the file's name")
    ] = None,
    features: Annotated[Names, option("The inputs of a model.", "COLUMNS", show_default="every numeric column")] = None,
    target: Annotated[Names, option("What is predicted.", "COLUMNS", show_default="every feature")] = None,
    static: Annotated[Names, option("Columns with one value per entity.", "COLUMNS")] = None,
    categorical: Annotated[Names, option("Columns kept as codes.", "COLUMNS")] = None,
    known_future: Annotated[Names, option("Features known ahead, such as holidays.", "COLUMNS")] = None,
    where: Annotated[str | None, option('Rows to take: "volume > 0 and year >= 2015".', "EXPR")] = None,
    transform: Annotated[
        str | None, option("A pure function on Arrow tables, run on every chunk of rows.", "MODULE:FUNCTION")
    ] = None,
    nulls: Annotated[
        Names, option("ffill, drop, interpolate, mask or value:NUMBER.", "[COLUMN=]POLICY", show_default="ffill")
    ] = None,
    duplicates: Annotated[str, option("Rows of one time: error, first, last or mean.")] = "error",
    freq: Annotated[str | None, option("Make a regular grid, such as 15min; gaps become masked rows.")] = None,
    min_rows: Annotated[int, option("Drop entities with fewer rows.")] = 1,
    calendar: Annotated[
        Names,
        option("Features of the time, in its zone: minute, hour, dayofweek, dayofmonth, dayofyear, month.", "PARTS"),
    ] = None,
    scale: Annotated[str, option("standard, minmax, robust or none.")] = "standard",
    per_entity: Annotated[bool, option("Scale every entity by its own statistics.", None, "--per-entity")] = False,
    fit_on: Annotated[str, option("Rows the scaling is fitted on: train or all.")] = "train",
    dtype: Annotated[str, option("float32, float16 or bfloat16.")] = "float32",
    split: Annotated[
        str | None,
        option(
            "What val is: time:2024-03-01 (from then on), tail:0.1 (the last rows of each entity), span:0.1 (the end of the "
            "time span), entity:0.1 (a share of the entities), entities:A,B. A second value is test: tail:0.1,0.1.",
            "FORM",
            show_default="no split",
        ),
    ] = None,
    split_by: Annotated[str, option(hidden=True)] = "time",
    val_from: Annotated[str | None, option(hidden=True)] = None,
    test_from: Annotated[str | None, option(hidden=True)] = None,
    val: Annotated[float, option(hidden=True)] = 0.0,
    test: Annotated[float, option(hidden=True)] = 0.0,
    val_last: Annotated[float, option(hidden=True)] = 0.0,
    test_last: Annotated[float, option(hidden=True)] = 0.0,
    val_entities: Annotated[Names, option(hidden=True)] = None,
    test_entities: Annotated[Names, option(hidden=True)] = None,
    gap: Annotated[int, option("Leave out targets in this many rows after a cut.")] = 0,
    on_error: Annotated[str, option("Rows without time or entity, files that cannot be used: stop or skip.")] = "stop",
    max_skipped: MaxSkipped = 0.01,
    delimiter: Annotated[
        str | None, option("Delimiter of CSV files, such as ';'.", "CHAR", show_default="as the first line shows")
    ] = None,
    encoding: Annotated[
        str | None, option("Encoding of CSV files, such as latin-1.", "NAME", show_default="UTF-8")
    ] = None,
    decimal: Annotated[str, option("Decimal sign of numbers in CSV files: '.' or ','.", "CHAR")] = ".",
    time_format: Annotated[
        str | None, option("Format of times written as text: '%d/%m/%Y %H:%M'.", "FORMAT", show_default="ISO 8601")
    ] = None,
    widen: Annotated[bool, option("Take the wider type where files differ in one.", None, "--widen")] = False,
    strict: Annotated[bool, option("Refuse files without rows.", None, "--strict")] = False,
    shard_bytes: Annotated[int, option("The largest shard.", "BYTES", parser=count)] = "256MiB",  # type: ignore[assignment]
    lookback: Annotated[int, option("Lookback of the windows counted in the summary.")] = 64,
    horizon: Annotated[int, option("Horizon of the windows counted in the summary.")] = 8,
    workers: Annotated[
        int | None, option("Threads; processes with --transform.", min=1, show_default="one per core")
    ] = None,
    stall: Annotated[
        float, option("Report a --transform that makes no progress for so long; 0: never.", "SECONDS", min=0)
    ] = 1800,
    engine: Engine = "local",
    address: Address = None,
    append: Annotated[bool, option("Add rows and entities to a store that is there.", None, "--append")] = False,
    same_source: SameSource = None,
    refit: Annotated[
        bool, option("With --append: fit the scaling again and rewrite all rows.", None, "--refit")
    ] = False,
    exclude: Annotated[Names, option("Files or folders to leave out; may be repeated.", "GLOB")] = None,
    restart: Annotated[bool, option("Begin afresh: delete the work of an interrupted run.", None, "--restart")] = False,
    as_json: Annotated[bool, option("Print JSON for machines.", None, "--json")] = False,
) -> None:
    """Make a scaled series store from tables.

    It makes two passes in constant memory; statistics see train rows only. If it is stopped, the same command continues.
    """
    from millrace.cli.prepare_progress import TableProgress
    from millrace.prepare.split_forms import TABLE_FORMS
    from millrace.prepare.table.options import TableOptions
    from millrace.prepare.table.table import prepare_table

    if time is None and not append:
        raise typer.BadParameter("name the column with the times", param_hint="--time")
    given = given_options(context, (*TableOptions.__struct_fields__, "refit"), TABLE_FORMS)
    for name, value in given.items():
        if isinstance(value, (list, tuple)):
            given[name] = read_policies(value) if name == "nulls" else read_names(value)
    report = prepare(context, prepare_table, TableProgress(), given)
    if not as_json:
        show(report, out, lookback, horizon)


def show(report: Any, out: str, lookback: int, horizon: int) -> None:
    if not report.is_new:
        print_line(f"already complete: {report.path}, fingerprint {report.fingerprint}")
        return
    if report.added:
        print_line(
            f"added {plural(report.added['rows'], 'row')} to {plural(report.added['entities'], 'entity')}, "
            f"{plural(report.added['new entities'], 'new entity')}"
        )
        _show_run(report)
        print_line("the store now has")
        _show_store(report, lookback, horizon)
    else:
        _show_store(report, lookback, horizon)
        _show_run(report)
    if list(report.rows) == ["train"]:
        print_line("note: there is no validation split; --split tail:0.1 or --split time:TIME makes one")
    seconds = max(report.seconds, 1e-9)
    now = report.rows_read - report.rows_kept
    before = f"; {plural(report.rows_kept, 'row')} had been read before" if report.rows_kept else ""
    print_line(f"read {now:,} rows in {seconds:.1f} s: {now / seconds:,.0f} rows/s{before}")
    print_line(f"wrote {report.path}, fingerprint {report.fingerprint}")
    print_line(f"next: millrace head {quoted(out)}")


def _show_store(report: Any, lookback: int, horizon: int) -> None:
    """What the store holds."""
    counts, short, longest = _windows(report, lookback, horizon)
    print_table(
        [
            ("split", "rows", f"windows of {lookback} + {horizon}"),
            *((s, f"{n:,}", f"{counts[s]:,}") for s, n in report.rows.items()),
        ],
        indent="",
    )
    too_short = f"; {plural(short, 'entity')} {'is' if short == 1 else 'are'} shorter than a window" if short else ""
    print_line(
        f"{plural(report.entities, 'entity')} in {plural(report.shards, 'shard')}, {size(report.bytes)}{too_short}"
    )
    for note in _window_notes(counts, longest, lookback, horizon):
        print_line(f"note: {note}")
    rows = [("column", "mean", "std", "min", "max", "nulls", "filled")]
    for name, column in report.columns.items():
        figures = ["" if column[key] is None else f"{column[key]:.6g}" for key in ("mean", "std", "min", "max")]
        rows.append((name, *figures, f"{column['nulls'] + column['infinite']:,}", f"{column['filled']:,}"))
    print_table(rows, indent="")


def _show_run(report: Any) -> None:
    """What this run did."""
    for reason, number in report.dropped.items():
        print_line(f"{'' if 'added' in reason else 'dropped, '}{reason}: {number:,}")
    for name, number in report.missing.items():
        print_line(f"missing, {name}: {number:,} (a category of its own, or the centre of a static number)")
    if report.rows_sorted:
        print_line(f"sorted by entity and time: {report.rows_sorted:,} rows came in another order")
    if report.rewritten:
        new = max(report.rewritten["new bytes"], 1)
        print_line(
            f"rewrote {size(report.rewritten['copied bytes'])} for {size(new)} of new rows: "
            f"{(report.rewritten['copied bytes'] + new) / new:.1f} times"
        )


def _window_notes(counts: dict[str, int], longest: tuple[str, int], lookback: int, horizon: int) -> list[str]:
    """What is said of splits without a single window."""
    window = f"{lookback} + {horizon} rows"
    if longest[1] < lookback + horizon:
        return [
            f"no entity is as long as a window of {window}: the longest, {longest[0]!r}, has {longest[1]:,}; "
            "train with a smaller lookback or horizon"
        ]
    return [
        f"split {split!r} holds no window of {window}: all {horizon} rows of a horizon must lie in it; make it larger, or "
        "train with a smaller horizon"
        for split, number in counts.items()
        if not number
    ]


def _windows(report: Any, lookback: int, horizon: int) -> tuple[dict[str, int], int, tuple[str, int]]:
    """Windows of each split, how many entities have fewer rows than one needs, and the longest with its rows."""
    import numpy as np

    from millrace.view.windows import Windows

    store = report.open()
    counts = {split: len(Windows(store.split(split), lookback=lookback, horizon=horizon)) for split in report.rows}
    rows = np.diff(store.offsets)
    longest = int(rows.argmax())
    return counts, int((rows < lookback + horizon).sum()), (str(store.columns["name"][longest]), int(rows[longest]))
