"""``millrace pull``: copies a store from object storage to this machine."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from millrace.cli import options

EXAMPLE = "millrace pull s3://bucket/prices prices/"


def run(
    url: Annotated[str, Argument(help="The store to copy: s3://, gs://, az:// or https://, or a path.")],
    path: Annotated[str, Argument(metavar="DIR", help="The folder that becomes the store.")],
    workers: Annotated[int, Option(min=1, help="Files fetched at a time.")] = 16,
    as_json: options.Json = False,
) -> None:
    """Copy a store from object storage.

    Every byte is compared with the hashes of the store. Run it again after an interruption: it goes on.
    """
    options.copy_store("pull", url, path, workers, as_json=as_json)
