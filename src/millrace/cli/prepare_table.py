"""``millrace prepare table``: from Parquet and CSV files to a scaled series store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from millrace.cli.prepare_text import count

EXAMPLE = "millrace prepare table prices/*.parquet --out prices --entity symbol --time date --target close --val-from 2023-01-01"


def names(values: list[str] | None) -> list[str] | None:
    """``a,b`` and repeated options alike."""
    if not values:
        return None
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def policies(values: list[str] | None) -> dict[str, str]:
    """``ffill`` for every column, ``volume=value:0`` for one."""
    found = {}
    for value in values or []:
        column, equals, policy = value.rpartition("=")
        found[column if equals else "*"] = policy
    return found


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def run(
    context: typer.Context,
    sources: Annotated[list[str], typer.Argument(help="Parquet or CSV files, folders or patterns.")],
    out: Annotated[str, typer.Option(help="Where the store will be.")],
    time: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The column with the times; an append knows it.", show_default=False),
    ] = None,
    entity: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMNS", help="The column(s) that name the entity.", show_default="the file's name"),
    ] = None,
    features: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMNS", help="What a model is given.", show_default="every numeric column"),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(metavar="COLUMNS", help="What is predicted.", show_default="every feature")
    ] = None,
    static: Annotated[
        list[str] | None, typer.Option(metavar="COLUMNS", help="Columns with one value per entity.")
    ] = None,
    categorical: Annotated[list[str] | None, typer.Option(metavar="COLUMNS", help="Columns kept as codes.")] = None,
    known_future: Annotated[
        list[str] | None, typer.Option(metavar="COLUMNS", help="Features known ahead, such as holidays.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(metavar="EXPR", help='Rows to take: "volume > 0 and year >= 2015".')
    ] = None,
    transform: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="A pure function on Arrow tables, run on every batch.")
    ] = None,
    nulls: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[COLUMN=]POLICY", help="ffill, drop, interpolate, mask or value:NUMBER.", show_default="ffill"
        ),
    ] = None,
    duplicates: Annotated[str, typer.Option(help="Rows of one time: error, first, last or mean.")] = "error",
    freq: Annotated[
        str | None, typer.Option(help="Make a regular grid, such as 15min; gaps become masked rows.")
    ] = None,
    min_rows: Annotated[int, typer.Option(help="Drop entities with fewer rows.")] = 1,
    calendar: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PARTS",
            help="Features of the time, in its zone: minute, hour, dayofweek, dayofmonth, dayofyear, month.",
        ),
    ] = None,
    scale: Annotated[str, typer.Option(help="standard, minmax, robust or none.")] = "standard",
    per_entity: Annotated[bool, typer.Option("--per-entity", help="Scale every entity by its own statistics.")] = False,
    fit_on: Annotated[str, typer.Option(help="Rows the scaling is fitted on: train or all.")] = "train",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    split_by: Annotated[str, typer.Option(help="time or entity.")] = "time",
    val_from: Annotated[str | None, typer.Option(metavar="TIME", help="Rows from this time on are val.")] = None,
    test_from: Annotated[str | None, typer.Option(metavar="TIME", help="Rows from this time on are test.")] = None,
    val: Annotated[float, typer.Option(help="Share of the time span (or of the entities) for val.")] = 0.0,
    test: Annotated[float, typer.Option(help="Share of the time span (or of the entities) for test.")] = 0.0,
    val_last: Annotated[float, typer.Option(help="Share of each entity's last rows for val.")] = 0.0,
    test_last: Annotated[float, typer.Option(help="Share of each entity's last rows for test.")] = 0.0,
    val_entities: Annotated[list[str] | None, typer.Option(metavar="NAMES", help="Entities for val.")] = None,
    test_entities: Annotated[list[str] | None, typer.Option(metavar="NAMES", help="Entities for test.")] = None,
    gap: Annotated[int, typer.Option(help="Rows after a cut that hold no horizon.")] = 0,
    on_error: Annotated[
        str, typer.Option(help="Rows without time or entity, files that cannot be used: stop or skip.")
    ] = "stop",
    delimiter: Annotated[
        str | None,
        typer.Option(metavar="CHAR", help="Of CSV files, such as ';'.", show_default="a comma, a tab in .tsv"),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of CSV files, such as latin-1.", show_default="UTF-8")
    ] = None,
    decimal: Annotated[str, typer.Option(metavar="CHAR", help="Of numbers in CSV files: '.' or ','.")] = ".",
    time_format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Of times written as text: '%d/%m/%Y %H:%M'.", show_default="ISO 8601"),
    ] = None,
    widen: Annotated[bool, typer.Option("--widen", help="Take the wider type where files differ in one.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse files without rows.")] = False,
    shard_bytes: Annotated[int, typer.Option(parser=count, metavar="BYTES", help="The largest shard.")] = "256MiB",  # type: ignore[assignment]
    lookback: Annotated[int, typer.Option(help="Of the windows counted in the summary.")] = 64,
    horizon: Annotated[int, typer.Option(help="Of the windows counted in the summary.")] = 8,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads; processes with --transform.", show_default="one per core")
    ] = None,
    stall: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Report a --transform that makes no progress for so long; 0: never."
        ),
    ] = 1800,
    engine: Annotated[str, typer.Option(help="Where the work is done: local.")] = "local",
    append: Annotated[bool, typer.Option("--append", help="Add rows and entities to a store that is there.")] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="With --append: fit the scaling again and rewrite all rows.")
    ] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Files or folders to leave out; may be repeated.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin afresh: remove what an interrupted run has left.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Make a scaled series store from tables.

    Two passes in constant memory; statistics see train rows only. Interrupted at any time, the same command continues.
    """
    import msgspec

    from millrace.cli.printing import print_json
    from millrace.cli.table_progress import TableProgress
    from millrace.errors import ConfigError
    from millrace.prepare.advice import with_flags
    from millrace.prepare.table.table import prepare_table

    if engine != "local":
        raise ConfigError(f"--engine {engine}: this version prepares on one machine; leave it out, or give local")
    if time is None and not append:
        raise typer.BadParameter("name the column with the times", param_hint="--time")
    asked = {
        "time": time, "entity": names(entity), "features": names(features), "target": names(target), "static": names(static),
        "categorical": names(categorical), "known_future": names(known_future), "where": where, "transform": transform,
        "nulls": policies(nulls), "duplicates": duplicates, "freq": freq, "min_rows": min_rows, "calendar": names(calendar),
        "scale": scale, "per_entity": per_entity, "fit_on": fit_on, "dtype": dtype, "split_by": split_by, "val_from": val_from,
        "test_from": test_from, "val": val, "test": test, "val_last": val_last, "test_last": test_last,
        "val_entities": names(val_entities), "test_entities": names(test_entities), "gap": gap, "on_error": on_error,
        "widen": widen, "delimiter": delimiter, "encoding": encoding, "decimal": decimal, "time_format": time_format,
        "strict": strict, "shard_bytes": shard_bytes, "refit": refit,
    }  # fmt: skip
    # Only what was written: to an append a default is no wish.
    given = {name: value for name, value in asked.items() if _is_given(context, name)}
    with TableProgress() as progress:
        report = with_flags(prepare_table)(
            sources, out, workers=workers, append=append, restart=restart, exclude=exclude or (), progress=progress,
            stall_s=stall, **given,
        )  # fmt: skip
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        show(report, out, lookback, horizon)


def show(report: Any, out: str, lookback: int, horizon: int) -> None:
    from millrace.cli.printing import print_line

    if not report.is_new:
        print_line(f"already complete: {report.path}, fingerprint {report.fingerprint}")
        return
    if report.added:
        print_line(
            f"added {_counted(report.added['rows'], 'row')} to {_counted(report.added['entities'], 'entity')}, "
            f"{_counted(report.added['new entities'], 'new entity')}"
        )
        _show_run(report)
        print_line("the store now has")
        _show_store(report, lookback, horizon)
    else:
        _show_store(report, lookback, horizon)
        _show_run(report)
    if list(report.rows) == ["train"]:
        print_line("note: there is no validation split; --val-last 0.1 or --val-from TIME makes one")
    seconds = max(report.seconds, 1e-9)
    now = report.rows_read - report.rows_kept
    before = f"; {_counted(report.rows_kept, 'row')} had been read before" if report.rows_kept else ""
    print_line(f"read {now:,} rows in {seconds:.1f} s: {now / seconds:,.0f} rows/s{before}")
    print_line(f"wrote {report.path}, fingerprint {report.fingerprint}")
    print_line(f"next: millrace head {out}")


def _counted(number: int, noun: str) -> str:
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else many}"


def _show_store(report: Any, lookback: int, horizon: int) -> None:
    """What the store holds."""
    from millrace.cli.printing import print_line, print_table, size

    counts, short, longest = _windows(report, lookback, horizon)
    print_table(
        [
            ("split", "rows", f"windows of {lookback} + {horizon}"),
            *((s, f"{n:,}", f"{counts[s]:,}") for s, n in report.rows.items()),
        ],
        indent="",
    )
    too_short = f"; {_counted(short, 'entity')} {'is' if short == 1 else 'are'} shorter than a window" if short else ""
    print_line(
        f"{_counted(report.entities, 'entity')} in {_counted(report.shards, 'shard')}, {size(report.bytes)}{too_short}"
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
    from millrace.cli.printing import print_line, size

    for reason, number in report.dropped.items():
        print_line(f"{'' if 'added' in reason else 'dropped, '}{reason}: {number:,}")
    for name, number in report.missing.items():
        print_line(f"missing, {name}: {number:,} (a category of its own, or the centre of a static number)")
    if report.rows_sorted:
        print_line(f"sorted by entity and time: {report.rows_sorted:,} rows came in another order")
    for note in report.notes:
        print_line(f"note: {note}")
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
