"""``millrace inspect``: what a store holds or how a run went, in a few lines or as one page with charts."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Option

from millrace.cli import options
from millrace.cli.printing import print_json, print_line, print_table, shorten

MOST_BARS = 6  # that a line names
EXAMPLE = "millrace inspect prices/ --html report.html"


def run(
    path: Annotated[str, Argument(help="A store, or the folder of a training run.")],
    html: Annotated[str | None, Option(metavar="FILE", help="Write one page with charts, which loads nothing.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the sample that is read.")] = 0,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Show what a store holds, or how a training run went.

    It reads a sample, so it takes seconds for a store of any size. The page says how much it read.
    """
    from millrace.report.blocks import plain
    from millrace.report.runs import is_run, run_report

    if is_run(path):
        report = run_report(path)
    else:
        from millrace.report.stores import store_report
        from millrace.store.open import open_store

        report = store_report(open_store(path, dtype=dtype), seed=seed)
    if html is not None:
        _write(html, report)
    if as_json:
        print_json(plain(report))
    elif html is not None:
        print_line(f"wrote {html}: open it in a browser")
    else:
        show(report)


def _write(path: str, report: Any) -> None:
    """The page, by rename: a reader sees a whole page or none."""
    import os
    from pathlib import Path

    from millrace.errors import ConfigError
    from millrace.report.html import page
    from millrace.store import platform

    target = Path(path)
    is_other = target.exists() and not target.is_file()  # a folder, a pipe or a device, which the rename would replace
    if is_other or not target.parent.is_dir():
        raise ConfigError(
            f"--html {path} is not the name of a file in a folder that exists; give one such as report.html"
        )
    with platform.writing(path):
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        platform.write_file(aside, page(report).encode(), mode=0o644)
        platform.rename(aside, target)


def show(report: Any) -> None:
    """The facts and tables of a report; charts are for the page."""
    from millrace.report.blocks import Bars, Facts, Histogram, Note, Table

    print_line(report.title)
    print_line(report.subtitle)
    for section in report.sections:
        if not any(isinstance(block, (Bars, Facts, Histogram, Note, Table)) for block in section.blocks):
            continue  # all of it is for the page
        print_line()
        print_line(section.title)
        for block in section.blocks:
            if isinstance(block, Facts):
                print_table([("", ""), *_cells(block.rows)][1:], fit="")
            elif isinstance(block, Table):
                print_table(_cells(block.rows))
            elif isinstance(block, Note):
                print_line(f"  {block.text}")
            elif isinstance(block, Bars):
                pairs = list(zip(block.names, block.counts, strict=True))
                shown = [f"{name} ({count:,.0f})" for name, count in pairs[:MOST_BARS]]
                more = [f"{len(pairs) - MOST_BARS} more"] if len(pairs) > MOST_BARS else []
                print_line(f"  {block.title}: {', '.join(shown + more)}")
            elif isinstance(block, Histogram):
                about = f" ({block.note})" if block.note else ""
                print_line(f"  {block.title}{about}: {block.edges[0]:,.6g} to {block.highest or 0:,.6g}")
    print_line()
    print_line("--html report.html draws the charts, passages and pictures.")


def _cells(rows: Any) -> list[tuple[str, ...]]:
    return [tuple(shorten(cell, 200) for cell in row) for row in rows]
