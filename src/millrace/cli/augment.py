"""``millrace augment``: augmented copies of the records of a store."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from millrace.cli import options

EXAMPLE = "millrace augment pixels/ --out more/ --copies 4 --flip 0.5 --crop 4"


def run(
    path: Annotated[str, Argument(help="A store of records.")],
    out: Annotated[str, Option(help="The new store.")],
    copies: Annotated[int, Option(min=1, help="Write this many augmented copies of each record.")],
    transform: Annotated[
        str | None,
        Option(metavar="MODULE:FUNCTION", help="Your own function of (record, rng), which returns a record."),
    ] = None,
    flip: Annotated[float | None, Option(min=0, max=1, help="Pixels: mirror with this probability.")] = None,
    crop: Annotated[int | None, Option(min=0, help="Pixels: pad by this many, and cut out a random part.")] = None,
    color: Annotated[
        float | None, Option(min=0, max=1, help="Pixels: change brightness, contrast and saturation by up to this.")
    ] = None,
    column: Annotated[str, Option(help="The column of the pixels.")] = "image",
    split: Annotated[str, Option(help="The split to augment. Others are copied as they are.")] = "train",
    keep: Annotated[bool, Option("--keep", help="Also write the records as they are, before their copies.")] = False,
    seed: Annotated[int, Option(min=0, help="Seed of the random numbers.")] = 0,
    workers: Annotated[
        int | None, Option(min=1, help="Number of threads.", show_default="one per core, up to 4")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write augmented copies of the records of a store.

    Give --transform, or for columns of pixels some of --flip, --crop and --color. The same seed gives the same bytes, with
    any number of workers.
    """
    from millrace.augment import ColorJitter, RandomCrop, RandomFlip, augment_store
    from millrace.augment.offline import OnPixels
    from millrace.cli.printing import byte_progress, plural, print_json, print_line
    from millrace.errors import ConfigError
    from millrace.prepare.functions import load_function
    from millrace.store.open import open_store

    steps = [
        *([] if crop is None else [RandomCrop(crop, column=column)]),
        *([] if flip is None else [RandomFlip(flip, column=column)]),
        *([] if color is None else [ColorJitter(color, color, color, column=column)]),
    ]
    if bool(steps) == (transform is not None):
        raise ConfigError("give --transform module:function, or some of --flip, --crop and --color")
    store = open_store(path)
    record_bytes = store.num_bytes // max(store.num_records, 1)
    with byte_progress("augment", store.num_bytes * copies) as step:
        result = augment_store(
            path, out, copies=copies, record=load_function(transform, "--transform"),
            batch=OnPixels(tuple(steps), column) if steps else None, split=split, keep=keep, seed=seed, workers=workers,
            progress=lambda: step(record_bytes),
        )  # fmt: skip
    if as_json:
        print_json(result)
        return
    counts = ", ".join(f"{name} {plural(count, 'record')}" for name, count in result["records"].items())
    print_line(f"wrote {out}: {counts}; fingerprint {result['fingerprint']}")
