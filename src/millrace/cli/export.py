"""``millrace export``: a store as Parquet, .npy or WebDataset files."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from millrace.cli import options

EXAMPLE = "millrace export events/ --to parquet --out events-parquet/ --split train"


def run(
    path: options.Layout,
    to: Annotated[str, Option(help="The format: parquet, npy or webdataset.")],
    out: Annotated[str, Option(help="The new folder for the files.")],
    split: Annotated[str | None, Option(help="Only this split.")] = None,
    where: Annotated[
        str | None, Option(help="Only records for which this holds: 'label == 3 and n_hits > 10'.")
    ] = None,
    columns: Annotated[str | None, Option(help="Only these columns, with commas between.")] = None,
    file_size: Annotated[int, Option(min=1, help="Begin a new file after so many MB (not npy).")] = 256,
    as_json: options.Json = False,
) -> None:
    """Write a store in a format of other tools.

    One row or sample per record; rows of a record are a list or an array. Values are as stored.
    """
    from millrace.cli.printing import plural, print_json, print_line, size
    from millrace.exports.export import export
    from millrace.store.open import open_store

    store = open_store(path)
    store = store if split is None else store.split(split)
    store = store if where is None else store.where(where)
    names = None if columns is None else [name.strip() for name in columns.split(",")]
    result = export(store, out, to=to, columns=names, file_bytes=file_size << 20)
    if as_json:
        print_json(result)
        return
    files = plural(len(result["files"]), "file")
    print_line(f"{plural(result['records'], 'record')} in {files}, {size(result['bytes'])}: {result['out']}")
