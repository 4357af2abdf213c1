"""``millrace watch``: the page of a run, renewed while training runs."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from millrace.cli.printing import print_line

EXAMPLE = "millrace watch runs/first"


def run(
    path: Annotated[str, Argument(metavar="RUN", help="The folder of a training run.")],
    port: Annotated[int, Option(min=0, max=65535, help="The port to answer at.", show_default="any free one")] = 0,
) -> None:
    """Show a training run in your browser while it goes on.

    The page can be read on this machine alone, and only under the address that is printed. It changes nothing. Ctrl-C ends it.
    For a machine elsewhere use ssh -L PORT:127.0.0.1:PORT, and --port PORT here.
    """
    import contextlib
    import sys

    from millrace.report.watch import Watch

    with contextlib.closing(Watch(path, port=port)) as watch:
        print_line(f"{path} is at {watch.url}")
        print_line("Ctrl-C ends this page; the training goes on.")
        sys.stdout.flush()
        watch.serve()
