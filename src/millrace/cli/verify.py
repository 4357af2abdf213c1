"""``millrace verify``: compares every byte of a store with the hashes written with it."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from millrace.cli import options

EXAMPLE = "millrace verify prices/"


def run(
    path: Annotated[str | None, Argument(help="The store to check.", show_default=False)] = None,
    cache: Annotated[bool, Option("--cache", help="Check the cache of stores at a URL instead.")] = False,
    workers: Annotated[int | None, Option(min=1, help="Number of threads.", show_default="one per core")] = None,
    as_json: options.Json = False,
) -> int:
    """Check every byte of a store and locate damage.

    Reads all files and compares them with the hashes of the store. If something is damaged, it names the shard, the block
    and the records, and the exit code is 1. With --cache it reads the files in the cache of this machine; a damaged one is
    fetched again when it is needed.
    """
    from millrace.errors import ConfigError

    if cache == (path is not None):
        raise ConfigError("verify takes either a store or --cache; give one of them")
    return (
        _verify_store(path, workers, as_json=as_json) if path is not None else _verify_cache(workers, as_json=as_json)
    )


def _verify_cache(workers: int | None, *, as_json: bool) -> int:
    import msgspec

    from millrace.cli.printing import plural, print_json, print_line, size
    from millrace.native import cache_folder
    from millrace.store.remote.verify_cache import verify_cache

    report = verify_cache(cache_folder(), workers=workers)
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        for damage in report.damage:
            print_line(f"damaged: {damage}")
        what = f"{plural(report.files, 'file')} of {plural(report.stores, 'store')}, {size(report.bytes)}"
        what += f", and {plural(report.unknown_files, 'file')} of no store whose tables are here" * bool(
            report.unknown_files
        )
        print_line(f"{'DAMAGED' if report.damage else 'ok'}: {report.path}: {what}")
    return 1 if report.damage else 0


def _verify_store(path: str, workers: int | None, *, as_json: bool) -> int:
    import os

    import msgspec

    from millrace.cli.printing import byte_progress, plural, print_json, print_line, size
    from millrace.errors import ConfigError
    from millrace.store.folder import Folder
    from millrace.store.open import open_store
    from millrace.store.verify import verify_store

    if "://" not in path and not os.path.isfile(os.path.join(path, "store.json")):
        store = open_store(path)
        raise ConfigError(
            f"{path} is in the layout of another tool ({store.meta['layout']}) and has no hashes; "
            "its sizes are right, and nothing else can be checked"
        )
    total = Folder(path).manifest(None)[0].totals.bytes
    with byte_progress("verify", total) as step:
        report = verify_store(path, workers=workers, progress=step)
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        for damage in report.damage:
            print_line(f"damaged: {damage}")
        what = f"{plural(report.files, 'file')} in {plural(report.shards, 'shard')}, {size(report.bytes)}"
        what += f", {plural(report.snapshots, 'snapshot')}"
        print_line(f"{'DAMAGED' if report.damage else 'ok'}: {report.path}: {what}, fingerprint {report.fingerprint}")
    return 1 if report.damage else 0
