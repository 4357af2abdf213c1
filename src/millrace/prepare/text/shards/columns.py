"""The columns of a token store: those of every store, and those that some options add.

``line`` (``--dedup-unit line``): the hash of every line. ``bands`` (``--dedup near``): the signature of
every document. ``mask`` (``--mask-field``): whether a token counts for the loss. ``source`` is a
dictionary, or text where there are too many files for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.prepare.runs import copy_runs, offsets_of
from millrace.prepare.spill import Spill, map_array
from millrace.prepare.text.dedup.lines import as_keys
from millrace.prepare.text.dedup.near import BANDS
from millrace.prepare.text.options import ReadOptions
from millrace.ragged import Array, Int64s
from millrace.store import platform
from millrace.store.layout import MAX_DICTIONARY, Column
from millrace.text.tokenizer import Tokenizer

LINES = "lines"  # the axis of the column "line"
MAX_NAMES = 8 << 20  # characters of all names of sources in a manifest


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
    names: Sequence[str], tokenizer: Tokenizer, options: ReadOptions, known: Column | None
) -> dict[str, Column]:
    """All columns of a store; ``known`` is the column of sources of a store that is appended to."""
    return {
        "tokens": Column(tokenizer.dtype),
        "source": _source_column(names, known),
        "offset": Column("int64", per="record"),
        "hash": Column("uint64", (2,), per="record"),
        **extra_columns(options),
    }


def _source_column(names: Sequence[str], known: Column | None) -> Column:
    """A dictionary in the manifest; with more names than fit there, every record has its own text."""
    before = () if known is None else known.values or ()
    values = tuple(dict.fromkeys((*before, *names)))
    fits = len(values) <= MAX_DICTIONARY and sum(map(len, values)) <= MAX_NAMES
    if fits and (known is None or known.dtype == "dictionary"):
        return Column("dictionary", per="record", values=values)
    if known is not None and known.dtype == "dictionary":
        raise ConfigError(
            f"{len(values)} source files with those appended; this store has room for {MAX_DICTIONARY}, or "
            f"{MAX_NAMES} characters of names: join small files first, or prepare everything again"
        )
    return Column("string", per="record")


def write_names(folder: Path, names: Sequence[str]) -> None:
    """Writes the names of sources to files, for tasks that store them with every record."""
    encoded = [name.encode() for name in names]
    for path, data in (
        (folder / "names.bin", np.frombuffer(b"".join(encoded), np.uint8)),
        (folder / "name_ends.bin", np.cumsum([0, *map(len, encoded)], dtype="<i8")),
    ):
        platform.remove(path)  # of an interrupted run
        with contextlib.closing(Spill(path)) as spill:
            spill.write(data)
            spill.finish()


def names_of(folder: Path, sources: Array) -> tuple[Array, Int64s]:
    """The names of these sources one after the other, and their offsets."""
    data, ends = map_array(folder / "names.bin", np.uint8), map_array(folder / "name_ends.bin", "<i8")
    starts, stops = ends[sources], ends[sources + 1]
    pieces = [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return np.concatenate(pieces), np.concatenate(([0], np.cumsum(stops - starts)))


HOW = {"line": "--dedup-unit line", "bands": "--dedup near", "mask": "--mask-field"}


def check_continues(options: ReadOptions, columns: Mapping[str, Any], out: Path) -> None:
    """Refuses an append with other columns than the store: old documents could not be compared."""
    wanted = extra_columns(options)
    for name, flag in HOW.items():
        if (name in wanted) != (name in columns):
            was, remedy = ("with", "give it again") if name in columns else ("without", "leave it out")
            raise ConfigError(f"{out} was made {was} {flag}; {remedy} to append, or prepare everything again")


def extra_arrays(
    folder: Path, names: Collection[str], documents: slice, edges: Int64s, token_edges: Int64s
) -> tuple[dict[str, Array], dict[str, Int64s]]:
    """Arrays and offsets of runs of documents of a part; ``edges`` count from the first of ``documents``."""
    arrays: dict[str, Array] = {}
    offsets: dict[str, Int64s] = {}
    if "bands" in names:
        bands = map_array(folder / "signatures.bin", "<u8").reshape(-1, BANDS)
        arrays["bands"] = copy_runs(bands[documents], edges)
    if "line" in names:
        counts = map_array(folder / "line_counts.bin", "<i8")
        bounds = int(counts[: documents.start].sum()) + offsets_of(counts[documents])
        arrays["line"] = copy_runs(as_keys(map_array(folder / "lines.bin", np.uint8)), bounds[edges])
        offsets[LINES] = offsets_of(copy_runs(counts[documents], edges))
    if "mask" in names:
        arrays["mask"] = copy_runs(map_array(folder / "mask.bin", np.uint8), token_edges)
    return arrays, offsets
