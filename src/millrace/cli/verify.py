"""``millrace verify``: every byte of a store against the hashes written with it."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = "millrace verify prices/"


def run(
    path: Annotated[str, typer.Argument(help="A store.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Threads that read (default: one per core).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> int:
    """Check every byte and locate damage.

    Reads everything again and compares it with the hashes written with it. Damage is named by shard, block and
    records, and the exit code is then 1.
    """
    import os

    import msgspec

    from millrace.cli.console import byte_progress, print_json, print_line, size
    from millrace.errors import ConfigError
    from millrace.store.folder import Folder
    from millrace.store.open import open_store
    from millrace.store.verify import verify_store

    if not os.path.isfile(os.path.join(path, "store.json")):
        store = open_store(path)
        raise ConfigError(
            f"{path} is a foreign layout ({store.meta['layout']}) without hashes; its sizes are right, no more can be checked"
        )
    total = Folder(path).manifest(None)[0].totals.bytes
    with byte_progress("verify", total) as step:
        report = verify_store(path, workers=workers, progress=step)
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        for damage in report.damage:
            print_line(f"damaged: {damage}")
        what = f"{report.files:,} files in {report.shards:,} shards, {size(report.bytes)}, {report.snapshots} snapshots"
        print_line(f"{'DAMAGED' if report.damage else 'ok'}: {report.path}: {what}, fingerprint {report.fingerprint}")
    return 1 if report.damage else 0
