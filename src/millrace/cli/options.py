"""Options that several commands share, the view that some of them describe, and loading a trained model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

from typer import Argument, Option

from millrace.distribution import install_command
from millrace.errors import ConfigError

Json = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
Layout = Annotated[str, Argument(help="A store, or a file of another tool such as train.bin.")]
Dtype = Annotated[str | None, Option(help="Number type of a file without a header, e.g. uint32.")]
Split = Annotated[str | None, Option(help="Only this split.", show_default="train, if there is one")]
Length = Annotated[int | None, Option(min=1, help="Text: a sample is a block of this many tokens.")]
Lookback = Annotated[int | None, Option(min=1, help="Series: rows of x in a window; needs --horizon.")]
Horizon = Annotated[int | None, Option(min=1, help="Series: rows of y in a window; needs --lookback.")]
Stride = Annotated[
    int | None,
    Option(min=1, help="Rows from one sample to the next.", show_default="--length for blocks, else 1"),
]
Lead = Annotated[int, Option(min=0, help="Series: rows between lookback and horizon.")]
ColumnName = Annotated[
    str | None,
    Option(metavar="NAME", help="The row column of samples.", show_default="tokens or values, else the only one"),
]
BatchSize = Annotated[int, Option(min=1, help="Samples of one step, over all ranks.")]
Seed = Annotated[int, Option(min=0, help="Seed of the sample order.")]
RunFolder = Annotated[str, Argument(metavar="RUN", help="The run folder, as given to millrace train --run.")]
Checkpoint = Annotated[str, Option(help="Which checkpoint to use: latest or best.")]
MovedStore = Annotated[str | None, Option(help="Path of the run's store, if it was moved.")]
Engine = Annotated[str, Option(metavar="NAME", help="Where the work runs: local, ray or dask.")]
Address = Annotated[
    str | None,
    Option(
        metavar="ADDRESS", help="The Ray or Dask cluster to use.", show_default="one that is started on this machine"
    ),
]
SameSource = Annotated[
    str | None,
    Option(
        metavar="skip|keep",
        help="With --append, sources that the store has: skip leaves them out, also where they have changed; keep adds all.",
        show_default="skip those that are the same, refuse those that have changed",
    ),
]
MaxSkipped = Annotated[
    float,
    Option(
        metavar="SHARE",
        min=0,
        max=1,
        help="With --on-error skip: stop where more than 10 records, and more than this share of all, are unreadable.",
    ),
]
OwnModel = Annotated[
    str | None,
    Option(metavar="MODULE:CALLABLE", help="Your own model of the run, if you trust its code."),
]


def build_view(
    path: str,
    split: str | None,
    length: int | None,
    lookback: int | None,
    horizon: int | None,
    stride: int | None,
    lead: int,
    *,
    column: str | None = None,
    guesses: bool = False,
) -> Any:
    """The view that the options describe: Blocks with --length, Windows with --lookback, else whole records.

    With ``guesses`` it takes samples that are usual for the kind of store, if no option says what they are.
    """
    from millrace.store.open import open_store
    from millrace.view.blocks import Blocks
    from millrace.view.records import Records
    from millrace.view.windows import Windows

    store = open_store(path)
    if split is None and "train" in store.splits:
        split = "train"
    part = store if split is None else store.split(split)
    if guesses and length is None and lookback is None and horizon is None:
        length = 1024 if store.kind == "text" else None
        lookback, horizon = (64, 8) if store.kind == "series" else (None, None)
    if length is not None and (lookback is not None or horizon is not None):
        raise ConfigError("--length makes blocks, --lookback and --horizon make windows; give one kind")
    if length is not None:
        return Blocks(part, length=length, stride=stride, column=column)
    if lookback is not None or horizon is not None:
        if lookback is None or horizon is None:
            given, wanted = ("horizon", "lookback") if lookback is None else ("lookback", "horizon")
            raise ConfigError(f"--{given} without --{wanted}; windows need both")
        return Windows(part, lookback=lookback, horizon=horizon, stride=stride or 1, lead=lead, column=column)
    if column is not None:
        raise ConfigError(f"--column {column} without --length or --lookback; whole records have all columns")
    if store.kind != "records":
        wanted = "--length 1024" if store.kind == "text" else "--lookback 64 --horizon 8"
        raise ConfigError(f"{path} is a {store.kind} store; say what a sample is, as in: {wanted}")
    return Records(part)


@contextlib.contextmanager
def training_extras() -> Iterator[None]:
    """Around imports of the trainer: names the extra that is missing, or why torch does not load."""
    try:
        yield
    except FileNotFoundError as error:
        if "temporary directory" not in str(error):  # torch looks for one when it is imported
            raise
        raise ConfigError(
            f"torch cannot be loaded ({error.strerror}); free space there, raise the file size limit (ulimit -f), or set "
            "TMPDIR to a folder that can be written"
        ) from error
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise ConfigError(f"this needs {error.name}; {install_command('torch')}") from error


def load_trained(run: str, checkpoint: str, model: str | None, store: str | None) -> Any:
    """The trained model of a run folder."""
    import warnings
    from pathlib import Path

    from millrace.cli.printing import print_note
    from millrace.train.open_run import load_model

    with training_extras(), warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always", UserWarning)
        trained = load_model(Path(run), checkpoint, own=model, store=store)
    for note in noted:
        print_note(f"note: {note.message}")
    return trained


Compress = Annotated[
    str | None,
    Option(metavar="CODEC", help="Compress the files: zstd, zstd:1 to zstd:22, or lz4.", show_default="plain"),
]


def copy_store(command: str, source: str, target: str, workers: int, *, as_json: bool) -> None:
    """Copies a store into a folder, with progress and a report: ``pull`` and ``stage``."""
    from millrace.cli.printing import byte_progress, print_transfer
    from millrace.store.folder import Folder
    from millrace.store.remote.contents import Contents
    from millrace.store.remote.objects import Objects
    from millrace.store.remote.pull import pull

    objects = Objects(source)
    contents = Contents.of(Folder(objects.url)) if objects.is_local else Contents.read(objects)
    with byte_progress(command, contents.manifest.totals.bytes) as step:
        report = pull(source, target, workers=workers, progress=step)
    print_transfer(f"{command.removesuffix('e')}ed", report, as_json=as_json)
