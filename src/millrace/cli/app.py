"""The table of commands. Their modules import only typer; a command imports its work when it runs."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from millrace.cli import prepare_records, prepare_table, prepare_text, queue
from millrace.cli.caching import with_cache

COMMANDS = (
    "info",
    "head",
    "inspect",
    "watch",
    "verify",
    "gc",
    "push",
    "pull",
    "stage",
    "explain",
    "verify-resume",
    "augment",
    "export",
    "train",
    "generate",
    "forecast",
    "worker",
    "plan",
    "doctor",
    "bench",
    "demo",
)
# Those that open a store, which may lie at a URL.
READERS = frozenset(
    (
        *("info", "head", "inspect", "verify", "explain", "verify-resume", "augment", "export", "train", "generate"),
        *("forecast", "worker", "plan"),
    )
)
# Newer typer contains click, older typer imports it: reach click's classes through typer's names.
UsageError: type[Any] = typer.BadParameter.__mro__[1]
Abort: type[BaseException] = typer.Abort

app = typer.Typer(
    name="millrace",
    help="Prepare datasets larger than memory, look at them, and train on them.",
    epilog="Example: millrace demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

for name in COMMANDS:
    command = import_module(f"millrace.cli.{name.replace('-', '_')}")
    run = with_cache(command.run) if name in READERS else command.run
    app.command(name, epilog=f"Example: {command.EXAMPLE}")(run)


prepare = typer.Typer(
    help="Make a store from source files.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=f"Example: {prepare_text.EXAMPLE}",
)
prepare.command("text", epilog=f"Example: {prepare_text.EXAMPLE}")(prepare_text.run)
prepare.command("table", epilog=f"Example: {prepare_table.EXAMPLE}")(prepare_table.run)
prepare.command("records", epilog=f"Example: {prepare_records.EXAMPLE}")(prepare_records.run)
prepare.callback()(lambda: None)
app.add_typer(prepare, name="prepare")


queues = typer.Typer(
    help="Look into a queue, or empty it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=f"Example: {queue.EXAMPLE}",
)
queues.command("status", epilog=f"Example: {queue.EXAMPLE}")(queue.status)
queues.command("drain", epilog=f"Example: {queue.DRAIN_EXAMPLE}")(queue.drain)
queues.callback()(lambda: None)
app.add_typer(queues, name="queue")


def _version(show: bool) -> None:
    if show:
        from millrace import __version__

        typer.echo(f"millrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Prepare datasets larger than memory, look at them, and train on them."""
