"""From finished parts to shards: which documents stay, in which split, and which of them make which shard.

Everything is decided from the parts in their order, streaming, so the same parts make the same shards on any
number of workers. A shard is then a pure task: copy these documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import ConfigError
from millrace.prepare.parts import part_folder
from millrace.prepare.spill import mapped
from millrace.prepare.text.columns import extra_arrays, names_of, write_names
from millrace.prepare.text.dedup import EXACT, NEAR, Repeats, find_repeats
from millrace.prepare.text.near import BANDS
from millrace.prepare.text.options import ReadOptions, ShardOptions
from millrace.prepare.text.part import DOCUMENT, QUARANTINE, PartDone
from millrace.prepare.text.pieces import spread
from millrace.prepare.text.reading import REPLACED
from millrace.ragged import Array, Int64s
from millrace.store.layout import Column
from millrace.store.shard import ShardEntry, ShardWriter
from millrace.store.snapshot import Base
from millrace.text.tokenizer import Tokenizer

SPLITS = ("train", "val", "test")
DROPPED = 255
STEP = 1 << 20  # documents or tokens looked at in one go: a large compressed file makes a part of many millions


class ShardTask(msgspec.Struct, frozen=True):
    """Documents [first, last) of some parts, those of one split."""

    split: str
    number: int
    pieces: tuple[tuple[int, int, int], ...]  # part, first document, last document
    folder: str
    columns: dict[str, tuple[str, tuple[int, ...], str, str | None, tuple[str, ...] | None]]
    token_bytes: int  # in the parts
    end: int
    codes: tuple[int, ...] = ()  # of the sources in the store's dictionary, where they are not their numbers

    def __str__(self) -> str:
        return f"shard {self.split}-{self.number:05d} (parts {self.pieces[0][0]} to {self.pieces[-1][0]})"


def documents_of(folder: str | Path, number: int) -> Array:
    return mapped(part_folder(folder, number) / "documents.bin", DOCUMENT)


class Assignment:
    """Which split each document of each part goes to, in files of one byte per document."""

    def __init__(self, folder: Path, parts: Sequence[PartDone], options: ShardOptions) -> None:
        self._folder, self._parts, self._options = folder, parts, options
        self.documents = dict.fromkeys(SPLITS, 0)  # one that is cut is one
        self.cut = self.pieces = 0  # how many of them are, and into how many records
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.characters = 0
        self.dropped: Counter[str] = Counter()

    def path(self, number: int) -> Path:
        return part_folder(self._folder, number) / "splits.bin"

    def make(self, repeats: Repeats) -> None:
        """Writes the splits of all parts; ``repeats`` marks the documents that go."""
        kept_before, kept = 0, repeats.num_others - sum(part.pieces for part in self._parts)
        first, last_why = 0, 0
        for part in self._parts:
            all_documents = documents_of(self._folder, part.number)
            with open(self.path(part.number), "wb") as file:
                for start in range(0, len(all_documents), STEP):
                    documents = all_documents[start : start + STEP]
                    goes_on, mine = documents["goes_on"], slice(first, first + len(documents))
                    why = spread(repeats.among(mine), goes_on, last_why)
                    first, last_why, gone = mine.stop, int(why[-1]), why > 0
                    numbers = kept_before + np.cumsum(~gone & ~goes_on) - 1
                    kept_before = int(numbers[-1]) + 1
                    splits = self._splits(documents["hash"][:, 0], numbers, kept)
                    splits[gone] = DROPPED
                    file.write(splits.tobytes())
                    self._count(documents, splits, why)
                    if part.pieces:
                        self._count_pieces(all_documents["goes_on"][max(start - 1, 0) : start + STEP], gone)

    def _count_pieces(self, goes_on: Array, gone: Array) -> None:
        """Of records, with the one before them where there is one."""
        is_piece = goes_on[-len(gone) :] & ~gone
        is_second = is_piece & ~np.concatenate(([False], goes_on))[-len(gone) - 1 : -1]
        self.cut += int(is_second.sum())
        self.pieces += int(is_piece.sum() + is_second.sum())

    def _count(self, documents: Array, splits: Array, why: Array) -> None:
        is_whole, tokens = ~documents["goes_on"], np.ascontiguousarray(documents["tokens"])
        for k, split in enumerate(SPLITS):
            mine = np.flatnonzero(splits == k)
            self.documents[split] += int(np.count_nonzero(is_whole[mine]))
            self.tokens[split] += int(tokens[mine].sum())
        self.characters += int(documents["characters"].sum() - documents["characters"][why > 0].sum())
        for reason, kind in (("duplicate", EXACT), ("near-duplicate", NEAR)):
            if (gone := why == kind).any():
                self.dropped[reason] += int((gone & ~documents["goes_on"]).sum())
                self.dropped[f"{reason} bytes"] += int(documents["bytes"][gone].sum())

    def _splits(self, hashes: Array, numbers: Int64s, kept: int) -> Array:
        """By a stable hash of the document, or the last documents; train is 0, val 1, test 2."""
        val, test = self._options.val, self._options.test
        if self._options.val_tail:
            last = max(round(kept * test), test > 0)
            edges = [kept - last - max(round(kept * (val + test)) - last, val > 0), kept - last]
            return np.searchsorted(edges, numbers, side="right").astype(np.uint8)
        share = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.where(share < val, 1, np.where(share < val + test, 2, 0)).astype(np.uint8)

    def check(self) -> None:
        """A split that was asked for must not be empty."""
        if not any(self.documents.values()):
            raise ConfigError(f"no documents are left: {self._told() or 'the sources hold none'}; look at them")
        told = f" ({self._told()})" if self._told() else ""
        for split, share in (("val", self._options.val), ("test", self._options.test)):
            if share > 0 and self.documents[split] == 0:
                total = sum(self.documents.values())
                last = "" if self._options.val_tail else ", or the last documents for it with --val-tail"
                raise ConfigError(
                    f"split {split!r} would be empty: {share:g} of {total:,} documents{told}; do without it (--{split} 0), "
                    f"or take more (a larger --{split}{last}); what was read is kept"
                )
        if self.documents["train"] == 0:
            total = sum(self.documents.values())
            raise ConfigError(
                f"no training documents are left: all {total:,} are in other splits{told}; give more, or a smaller --val or "
                "--test; what was read is kept"
            )

    def all_dropped(self) -> dict[str, int]:
        """What went and why, when parts were made and since."""
        dropped = Counter(self.dropped)
        for part in self._parts:
            dropped.update(part.dropped)
        return dict(sorted(dropped.items()))

    def _told(self) -> str:
        """The same for an error, with where to read of what was set aside; '' where nothing went."""
        dropped = ", ".join(
            f"{reason}: {count:,}" for reason, count in self.all_dropped().items() if reason != REPLACED
        )
        is_quarantined = any(QUARANTINE in part.sizes for part in self._parts)
        where = f", named in {self._folder}/parts/*/{QUARANTINE}" if is_quarantined else ""
        return f"dropped were {dropped}{where}" if dropped else ""


def repeated(
    folder: Path,
    parts: Sequence[PartDone],
    options: ReadOptions,
    known: Callable[[str], Iterable[Array]] = lambda column: (),
    num_known: int = 0,
) -> Repeats:
    """Which documents repeat earlier ones, or those ``known`` from the store appended to.

    Pieces that go on with a document are not compared: they repeat none.

    ``known`` gives a column of old documents: ``hash`` or, where near-duplicates are looked for, ``bands``.
    """
    total = sum(part.documents for part in parts)
    if not options.dedups_documents:
        return Repeats(np.broadcast_to(np.zeros(1, bool), total))

    def keys(kind: str) -> Iterator[tuple[Array, Array]]:
        for values in known(kind):
            yield from _keys(values, None)
        first = 0
        for part in parts:
            documents = documents_of(folder, part.number)
            values = documents["hash"]
            if kind == "bands":
                values = mapped(part_folder(folder, part.number) / "signatures.bin", "<u8").reshape(-1, BANDS)
            yield from _keys(values, first, documents["goes_on"] if part.pieces else None)
            first += part.documents

    entries, scratch = total + num_known, folder / "partitions"
    exact = find_repeats(keys("hash"), entries, total, scratch)
    is_near = options.dedup == "near"
    return Repeats(exact, find_repeats(keys("bands"), entries * BANDS, total, scratch) if is_near else None)


def _keys(values: Array, first: int | None, goes_on: Array | None = None) -> Iterator[tuple[Array, Array]]:
    """Hashes, or bands told apart by their place, with the numbers from ``first``; None is before all others."""
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


def cut_shards(
    assignment: Assignment, folder: Path, parts: Sequence[PartDone], options: ShardOptions
) -> dict[str, list[list[tuple[int, int, int]]]]:
    """For every split its shards, each a list of (part, first, last): cut before the document that would pass the limit."""
    shards: dict[str, list[list[tuple[int, int, int]]]] = {split: [] for split in SPLITS}
    filled = dict.fromkeys(SPLITS, 0)
    for part in parts:
        documents = documents_of(folder, part.number)
        splits = mapped(assignment.path(part.number), np.uint8)
        for start, (k, split) in product(range(0, len(documents), STEP), enumerate(SPLITS)):
            mine = start + np.flatnonzero(splits[start : start + STEP] == k)
            ends = np.cumsum(documents["tokens"][mine])
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
                shards[split][-1].append((part.number, int(mine[at]), int(mine[last - 1]) + 1))
                filled[split] += int(ends[last - 1]) - done
                at = last
    return {split: [shard for shard in found if shard] for split, found in shards.items() if found}


def shard_tasks(
    planned: Mapping[str, Sequence[Sequence[tuple[int, int, int]]]],
    folder: Path,
    names: Sequence[str],
    columns: Mapping[str, Column],
    tokenizer: Tokenizer,
    base: Base | None,
) -> list[ShardTask]:
    """Tasks that write the shards planned by ``cut_shards``, numbered behind those of the store that is appended to."""
    if columns["source"].dtype == "string":
        write_names(folder, names)
    # The sources of an append are numbered behind those of the store.
    places = {} if base is None else {name: k for k, name in enumerate(columns["source"].values or ())}
    codes = tuple(places[name] for name in names) if places else ()
    plain = {name: (c.dtype, c.shape, c.per, c.axis, c.values) for name, c in columns.items()}
    width, end = tokenizer.spaced_dtype.itemsize, tokenizer.end
    tasks = []
    for split, shards in planned.items():
        first = 0 if base is None else base.next_number(split)
        tasks += [
            ShardTask(split, first + k, tuple(pieces), str(folder), plain, width, end, codes)
            for k, pieces in enumerate(shards)
        ]
    return tasks


def write_shard(task: ShardTask) -> ShardEntry:
    """Copies the documents of one shard out of the parts."""
    columns = {
        name: Column(dtype, shape, per=per, axis=axis, values=values)
        for name, (dtype, shape, per, axis, values) in task.columns.items()
    }
    split = SPLITS.index(task.split)
    with ShardWriter(Path(task.folder) / "shards", task.split, task.number, columns) as writer:
        for number, first, last in task.pieces:
            folder = part_folder(task.folder, number)
            documents = documents_of(task.folder, number)
            bounds = int(documents["tokens"][:first].sum()) + np.concatenate(
                ([0], np.cumsum(documents["tokens"][first:last]))
            )
            is_mine = mapped(folder / "splits.bin", np.uint8)[first:last] == split
            tokens = mapped(folder / "tokens.bin", f"<u{task.token_bytes}")
            for some in _steps(bounds, is_mine):
                places = bounds[some.start : some.stop + 1]
                dtype = np.dtype(columns["tokens"].dtype)
                arrays, offsets = _selected(documents[first:last][some], is_mine[some], tokens, places, dtype)
                arrays["tokens"][offsets[1:] - 1] = task.end
                if task.codes:
                    arrays["source"] = np.array(task.codes, "<i4")[arrays["source"]]
                extras, axes = extra_arrays(folder, columns, first + some.start, is_mine[some], places)
                if columns["source"].dtype == "string":
                    arrays["source"], axes["source"] = names_of(Path(task.folder), arrays["source"])
                writer.write({name: (arrays | extras)[name] for name in columns}, {"rows": offsets, **axes})
        return writer.finish()


def _steps(bounds: Int64s, is_mine: Array) -> Iterator[slice]:
    """Some documents at a time: buffers of a megabyte or two are used again, larger ones are new pages every time."""
    first = 0
    while first < len(is_mine):
        stop = max(first + 1, int(np.searchsorted(bounds, bounds[first] + STEP, side="right")) - 1)
        if is_mine[first:stop].any():
            yield slice(first, min(stop, len(is_mine)))
        first = stop


def _selected(
    documents: Array, is_mine: Array, tokens: Array, bounds: Int64s, dtype: np.dtype[Any]
) -> tuple[dict[str, Any], Int64s]:
    """The columns of those that are mine; the tokens of document k are [bounds[k], bounds[k + 1])."""
    # By runs of documents that are mine: one slice for each document would need more memory than its tokens.
    edges = np.flatnonzero(np.diff(is_mine, prepend=False, append=False))
    parts = [tokens[first:last] for first, last in bounds[edges].reshape(-1, 2).tolist()]
    mine = np.flatnonzero(is_mine)
    arrays = {
        "tokens": np.concatenate(parts, dtype=dtype),
        "source": documents["source"][mine],
        "offset": documents["offset"][mine],
        "hash": documents["hash"][mine],
    }
    return arrays, np.concatenate(([0], np.cumsum(documents["tokens"][mine])))
