"""``millrace gc``: deletes old snapshots, and files that no snapshot uses."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from millrace.cli import options

EXAMPLE = "millrace gc prices/ --keep 1 --dry-run"


def run(
    path: Annotated[str, Argument(help="The store to clean.")],
    keep: Annotated[int | None, Option(min=1, help="Keep this many newest snapshots.", show_default="all")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be deleted, and delete nothing.")] = False,
    as_json: options.Json = False,
) -> None:
    """Delete old snapshots and leftovers.

    Deletes all but the --keep newest snapshots, the shards that only those used, and the leftovers of interrupted appends.
    """
    from millrace.cli.printing import plural, print_json, print_line, size
    from millrace.store.gc import collect

    result = collect(path, keep=keep, dry_run=dry_run)
    if as_json:
        print_json(result)
        return
    for name in result["removed"]:
        print_line(f"{'would remove' if dry_run else 'removed'} {name} (no longer used)")
    verb = "would free" if dry_run else "freed"
    kept = result["kept"]
    print_line(f"{verb} {size(result['freed_bytes'])}; {plural(len(kept), 'snapshot')} kept, the newest {kept[0]}")
