"""``millrace gc``: deletes what no kept snapshot names."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = "millrace gc prices/ --keep 1 --dry-run"


def run(
    path: Annotated[str, typer.Argument(help="A store.")],
    keep: Annotated[int | None, typer.Option(min=1, help="Keep only the newest KEEP snapshots (default: all).")] = None,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Delete old snapshots and leftovers.

    Removes snapshots beyond --keep with the shards only they name, and what an interrupted append left behind.
    """
    from millrace.cli.console import print_json, print_line, size
    from millrace.store.gc import collect

    result = collect(path, keep=keep, dry_run=dry_run)
    if as_json:
        print_json(result)
        return
    for name in result["removed"]:
        print_line(f"{'would remove' if dry_run else 'removed'} {name}")
    verb = "would free" if dry_run else "freed"
    print_line(
        f"{verb} {size(result['freed_bytes'])}; {len(result['kept'])} snapshots kept, the newest {result['kept'][0]}"
    )
