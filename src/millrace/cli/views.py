"""The options that say which view and order a command means, shared by ``explain`` and ``verify-resume``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Path = Annotated[str, typer.Argument(help="A store, or a foreign layout such as train.bin.")]
Split = Annotated[str | None, typer.Option(help="The split (default: train where there is one).")]
Length = Annotated[int | None, typer.Option(min=1, help="Blocks of this many tokens.")]
Lookback = Annotated[int | None, typer.Option(min=1, help="Windows with this many rows of x; needs --horizon.")]
Horizon = Annotated[int | None, typer.Option(min=1, help="Windows with this many rows of y.")]
Stride = Annotated[int | None, typer.Option(min=1, help="Rows from one sample to the next.")]
Lead = Annotated[int, typer.Option(min=0, help="Rows between lookback and horizon.")]
BatchSize = Annotated[int, typer.Option(min=1, help="The global batch.")]
Seed = Annotated[int, typer.Option(min=0, help="The seed of the order.")]


def build_view(
    path: str,
    split: str | None,
    length: int | None,
    lookback: int | None,
    horizon: int | None,
    stride: int | None,
    lead: int,
) -> Any:
    """The view the options describe: Blocks with --length, Windows with --lookback, else whole records."""
    from millrace.errors import ConfigError
    from millrace.store.open import open_store
    from millrace.view.blocks import Blocks
    from millrace.view.records import Records
    from millrace.view.windows import Windows

    store = open_store(path)
    if split is None and "train" in store.splits:
        split = "train"
    part = store if split is None else store.split(split)
    if length is not None and (lookback is not None or horizon is not None):
        raise ConfigError("--length makes blocks, --lookback and --horizon make windows; give one kind")
    if length is not None:
        return Blocks(part, length=length, stride=stride)
    if lookback is not None or horizon is not None:
        if lookback is None or horizon is None:
            given, wanted = ("horizon", "lookback") if lookback is None else ("lookback", "horizon")
            raise ConfigError(f"--{given} without --{wanted}; windows need both")
        return Windows(part, lookback=lookback, horizon=horizon, stride=stride or 1, lead=lead)
    if store.kind != "records":
        wanted = "--length 1024" if store.kind == "text" else "--lookback 64 --horizon 8"
        raise ConfigError(f"{path} is a {store.kind} store; say what a sample is, as in: {wanted}")
    return Records(part)
