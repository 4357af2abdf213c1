"""Makes shards from finished parts: finds repeated documents, and decides which document is in which shard.

Everything is decided from the parts in their order, streaming, so the same parts make the same shards for
any number of workers. A shard is then a pure task: copy these documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec
import numpy as np

from millrace.prepare.parts import part_folder
from millrace.prepare.runs import copy_runs, offsets_of
from millrace.prepare.spill import map_array
from millrace.prepare.text.dedup.near import BANDS
from millrace.prepare.text.dedup.repeats import Repeats, find_repeats
from millrace.prepare.text.options import ReadOptions, ShardOptions
from millrace.prepare.text.part import PartDone
from millrace.prepare.text.part_files import part_column
from millrace.prepare.text.recipe import TextBase
from millrace.prepare.text.shards.assignment import SPLITS, STEP, splits_file
from millrace.prepare.text.shards.columns import extra_arrays, names_of, write_names
from millrace.ragged import Array, Int64s
from millrace.store.layout import Column
from millrace.store.shard import ShardEntry, ShardWriter
from millrace.store.snapshot import Base
from millrace.text.tokenizer import Tokenizer

RECORDS = ("source", "offset", "hash")  # columns that are the same in parts and shards
CODES = "codes.bin"  # of the sources of an append in the store's dictionary
Range = tuple[int, int, int, int]  # part, first document, last document, tokens of the part before the first


class ShardTask(msgspec.Struct, frozen=True):
    """Documents [first, last) of some parts, those of one split."""

    split: str
    number: int
    ranges: tuple[Range, ...]
    places: tuple[tuple[str, int], ...]  # for each range: the key and the first source of its part
    folder: str
    columns: Mapping[str, Column]  # without the names of sources, which may be many
    token_bytes: int  # in the parts
    end: int
    has_codes: bool = False  # sources have other codes than their numbers

    @property
    def parts(self) -> set[int]:
        return {number for number, *_ in self.ranges}

    def __str__(self) -> str:
        return f"shard {self.split}-{self.number:05d} (parts {self.ranges[0][0]} to {self.ranges[-1][0]})"


def document_repeats(
    folder: Path, parts: Sequence[PartDone], options: ReadOptions, existing: TextBase | None
) -> Repeats:
    """The documents that repeat earlier ones; pieces after the first of a cut document are not compared."""
    total = sum(part.documents for part in parts)
    if not options.dedups_documents:
        return Repeats(np.broadcast_to(np.zeros(1, bool), total))

    def keys(kind: str) -> Iterator[tuple[Array, Array]]:
        for values in () if existing is None else existing.documents(kind):
            yield from _keys(values, None)
        first = 0
        for part in parts:
            values = part_column(folder, part.key, "hash")
            if kind == "bands":
                values = map_array(part_folder(folder, part.key) / "signatures.bin", "<u8").reshape(-1, BANDS)
            yield from _keys(values, first, part_column(folder, part.key, "goes_on") if part.pieces else None)
            first += part.documents

    num_known = 0 if existing is None else existing.manifest.totals.records
    entries, scratch = total + num_known, folder / "partitions"
    exact = find_repeats(keys("hash"), entries, total, scratch)
    is_near = options.dedup == "near"
    return Repeats(exact, find_repeats(keys("bands"), entries * BANDS, total, scratch) if is_near else None)


def _keys(values: Array, first: int | None, goes_on: Array | None = None) -> Iterator[tuple[Array, Array]]:
    """Hashes, or bands with their place, and numbers from ``first`` on; without ``first`` they are -1."""
    for start in range(0, len(values), STEP):
        some = values[start : start + STEP]
        numbers = np.full(len(some), -1) if first is None else np.arange(first + start, first + start + len(some))
        if goes_on is not None:
            heads = ~goes_on[start : start + STEP]
            some, numbers = some[heads], numbers[heads]
        if some.shape[1] == 2:
            yield some, numbers
            continue
        for band in range(BANDS):
            yield np.column_stack((some[:, band], np.full(len(some), band, np.uint64))), numbers


def cut_shards(folder: Path, parts: Sequence[PartDone], options: ShardOptions) -> dict[str, list[list[Range]]]:
    """The shards of every split, each a list of ranges; none exceeds the limit if it can."""
    shards: dict[str, list[list[Range]]] = {split: [] for split in SPLITS}
    filled = dict.fromkeys(SPLITS, 0)
    for part in parts:
        lengths = part_column(folder, part.key, "length")
        splits, before, bounds = map_array(splits_file(folder, part.number), np.uint8), 0, np.zeros(1, np.int64)
        for start, (k, split) in product(range(0, part.documents, STEP), enumerate(SPLITS)):
            if k == 0:
                before += int(bounds[-1])
                bounds = offsets_of(lengths[start : start + STEP])
            mine = start + np.flatnonzero(splits[start : start + STEP] == k)
            ends = np.cumsum(lengths[mine])
            at = 0
            while at < len(mine):
                done = int(ends[at - 1]) if at else 0
                last = int(np.searchsorted(ends, done + options.shard_tokens - filled[split], side="right"))
                if last <= at:
                    if filled[split]:
                        filled[split] = 0
                        shards[split].append([])
                        continue
                    last = at + 1  # a document larger than a shard has one to itself
                if not shards[split]:
                    shards[split].append([])
                first = int(mine[at])
                tokens = before + int(bounds[first - start])
                shards[split][-1].append((part.number, first, int(mine[last - 1]) + 1, tokens))
                filled[split] += int(ends[last - 1]) - done
                at = last
    return {split: [shard for shard in found if shard] for split, found in shards.items() if found}


def shard_tasks(
    planned: Mapping[str, Sequence[Sequence[Range]]],
    folder: Path,
    names: Sequence[str],
    parts: Sequence[PartDone],
    columns: Mapping[str, Column],
    tokenizer: Tokenizer,
    base: Base | None,
) -> list[ShardTask]:
    """Tasks that write the shards of ``cut_shards``, numbered after those of the store that is appended to."""
    if columns["source"].dtype == "string":
        write_names(folder, names)
    # The sources of an append are numbered after those of the store.
    places = {} if base is None else {name: k for k, name in enumerate(columns["source"].values or ())}
    if places:
        (folder / CODES).write_bytes(np.array([places[name] for name in names], "<i4").tobytes())
    plain = {name: column if column.values is None else column.with_values(None) for name, column in columns.items()}
    width, end = tokenizer.spaced_dtype.itemsize, tokenizer.end
    where = [(part.key, part.first_source) for part in parts]
    tasks = []
    for split, shards in planned.items():
        first = 0 if base is None else base.next_number(split)
        tasks += [
            ShardTask(split, first + k, tuple(ranges), tuple(where[number] for number, *_ in ranges), str(folder),
                      plain, width, end, bool(places))
            for k, ranges in enumerate(shards)
        ]  # fmt: skip
    return tasks


def write_shard(task: ShardTask) -> ShardEntry:
    """Copies the documents of one shard out of the parts."""
    columns, split, dtype = task.columns, SPLITS.index(task.split), np.dtype(task.columns["tokens"].dtype)
    with ShardWriter(Path(task.folder) / "shards", task.split, task.number, columns) as writer:
        codes = map_array(Path(task.folder) / CODES, "<i4") if task.has_codes else None
        for (number, first, last, tokens_before), (key, first_source) in zip(task.ranges, task.places, strict=True):
            folder = part_folder(task.folder, key)
            lengths = part_column(task.folder, key, "length")
            bounds = tokens_before + offsets_of(lengths[first:last])
            is_mine = map_array(splits_file(task.folder, number), np.uint8)[first:last] == split
            tokens = map_array(folder / "tokens.bin", f"<u{task.token_bytes}")
            records = {name: part_column(task.folder, key, name)[first:last] for name in RECORDS}
            for some in _steps(bounds, is_mine):
                edges = np.flatnonzero(np.diff(is_mine[some], prepend=False, append=False)).reshape(-1, 2)
                token_edges = bounds[some.start + edges]
                arrays = {name: copy_runs(values[some], edges) for name, values in records.items()}
                offsets = offsets_of(copy_runs(lengths[first:last][some], edges))
                arrays["tokens"] = copy_runs(tokens, token_edges, dtype)
                if tokens.dtype != dtype:  # narrower ones have a 0 for the end (``Tokenizer.encode_spaced``)
                    arrays["tokens"][offsets[1:] - 1] = task.end
                arrays["source"] = arrays["source"] + np.int32(first_source)
                if codes is not None:
                    arrays["source"] = codes[arrays["source"]]
                extras, axes = extra_arrays(
                    folder, columns, slice(first + some.start, first + some.stop), edges, token_edges
                )
                if columns["source"].dtype == "string":
                    arrays["source"], axes["source"] = names_of(Path(task.folder), arrays["source"])
                writer.write({name: (arrays | extras)[name] for name in columns}, {"rows": offsets, **axes})
        return writer.finish()


def _steps(bounds: Int64s, is_mine: Array) -> Iterator[slice]:
    """Some documents at a time: buffers of a megabyte or two are reused, larger ones are new pages every time."""
    first = 0
    while first < len(is_mine):
        stop = max(first + 1, int(np.searchsorted(bounds, bounds[first] + STEP, side="right")) - 1)
        if is_mine[first:stop].any():
            yield slice(first, min(stop, len(is_mine)))
        first = stop
