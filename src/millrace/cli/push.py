"""``millrace push``: copies a store to object storage."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from millrace.cli import options

EXAMPLE = "millrace push prices/ s3://bucket/prices"


def run(
    path: Annotated[str, Argument(help="The store to copy.")],
    url: Annotated[str, Argument(help="Where to: s3://, gs:// or az://, or a folder.")],
    compress: options.Compress = None,
    workers: Annotated[int, Option(min=1, help="Files sent at a time.")] = 16,
    as_json: options.Json = False,
) -> None:
    """Copy a store to object storage.

    Files that are there already are not sent again: run it again after an interruption. The manifest is written last.
    Credentials come from the usual variables, such as AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and AWS_REGION.
    """
    from millrace.cli.printing import byte_progress, print_transfer
    from millrace.store.folder import Folder
    from millrace.store.remote.push import push

    with byte_progress("push", Folder(path).manifest(None)[0].totals.bytes) as step:
        report = push(path, url, compress=compress, workers=workers, progress=step)
    print_transfer("pushed", report, as_json=as_json)
