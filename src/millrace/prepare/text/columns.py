"""The columns of a token store: those that all have, and those that only some options make.

The latter are copied from the files of a part into a shard beside its tokens.

``line``: the hash of every line, kept where lines are deduplicated. ``bands``: the signature of every document, kept
where near-duplicates are. ``mask``: for every token whether it counts for the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.prepare.text.lines import as_keys
from millrace.prepare.text.near import BANDS
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.spill import mapped
from millrace.ragged import Array, Int64s
from millrace.store.layout import MAX_DICTIONARY, Column
from millrace.text.tokenizer import Tokenizer

LINES = "lines"  # the axis of the column "line"


def extra_columns(options: ReadOptions) -> dict[str, Column]:
    columns = {}
    if options.dedup_unit == "line":
        columns["line"] = Column("uint64", (2,), axis=LINES)
    if options.dedup == "near":
        columns["bands"] = Column("uint64", (BANDS,), per="record")
    if options.mask_field is not None:
        columns["mask"] = Column("uint8")
    return columns


def store_columns(
    names: Sequence[str], tokenizer: Tokenizer, options: ReadOptions, known: Sequence[str]
) -> dict[str, Column]:
    """All columns of a store of these sources, behind those ``known`` of a store that is appended to."""
    values = tuple(dict.fromkeys((*known, *names)))
    if len(values) > MAX_DICTIONARY:
        raise ConfigError(f"{len(values)} source files; at most {MAX_DICTIONARY} in one store: join small files first")
    return {
        "tokens": Column(tokenizer.dtype),
        "source": Column("dictionary", per="record", values=values),
        "offset": Column("int64", per="record"),
        "hash": Column("uint64", (2,), per="record"),
        **extra_columns(options),
    }


HOW = {"line": "--dedup-unit line", "bands": "--dedup near", "mask": "--mask-field"}


def check_continues(options: ReadOptions, columns: Mapping[str, Any], out: Path) -> None:
    """An append must make the columns that the store has: what was not kept of old documents cannot be compared."""
    wanted = extra_columns(options)
    for name, flag in HOW.items():
        if (name in wanted) != (name in columns):
            was, remedy = ("with", "give it again") if name in columns else ("without", "leave it out")
            raise ConfigError(f"{out} was made {was} {flag}; {remedy} to append, or prepare everything anew")


def extra_arrays(
    folder: Path, names: Collection[str], first: int, is_mine: Array, token_bounds: Int64s
) -> tuple[dict[str, Array], dict[str, Int64s]]:
    """Arrays and offsets of those documents of a part, counted from ``first``, that are mine."""
    arrays: dict[str, Array] = {}
    offsets: dict[str, Int64s] = {}
    last = first + len(is_mine)
    if "bands" in names:
        arrays["bands"] = mapped(folder / "signatures.bin", "<u8").reshape(-1, BANDS)[first:last][is_mine]
    if "line" in names:
        counts = mapped(folder / "line_counts.bin", "<i8")
        bounds = int(counts[:first].sum()) + np.concatenate(([0], np.cumsum(counts[first:last])))
        arrays["line"] = _runs(as_keys(mapped(folder / "lines.bin", np.uint8)), bounds, is_mine)
        offsets[LINES] = np.concatenate(([0], np.cumsum(counts[first:last][is_mine])))
    if "mask" in names:
        arrays["mask"] = _runs(mapped(folder / "mask.bin", np.uint8), token_bounds, is_mine)
    return arrays, offsets


def _runs(values: Array, bounds: Int64s, is_mine: Array) -> Array:
    """Values of the documents that are mine, by runs of them."""
    edges = np.flatnonzero(np.diff(is_mine, prepend=False, append=False))
    return np.concatenate([values[first:last] for first, last in bounds[edges].reshape(-1, 2).tolist()])
