"""``millrace stage``: copies a store to a faster disk of this machine."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from millrace.cli import options
from millrace.cli.push import run as push
from millrace.errors import ConfigError
from millrace.store.ownership import check_local

EXAMPLE = "millrace stage /shared/prices --to /scratch/prices"


def run(
    path: Annotated[str, Argument(metavar="DIR", help="The store to copy: a path or a URL.")],
    to: Annotated[str, Option(metavar="PATH", help="The folder that becomes the store.")],
    compress: options.Compress = None,
    workers: Annotated[int, Option(min=1, help="Files copied at a time.")] = 16,
    as_json: options.Json = False,
) -> None:
    """Copy a store to a faster disk before training.

    It first checks that there is space. A second call does nothing. If the source has changed since, it says so.
    A compressed store becomes a plain one. With --compress the copy is compressed; commands and feeds read it through the
    cache.
    """
    check_local(to)
    if compress is not None:
        if "://" in path and not path.startswith("file:"):
            raise ConfigError(f"--compress needs a store on disk, and {path} is a URL; stage it plain first")
        push(path, to, compress, workers, as_json=as_json)
        return
    options.copy_store("stage", path, to, workers, as_json=as_json)
