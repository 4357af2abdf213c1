"""Decides which documents stay and the split of each, from the parts in their order, streaming."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millrace.errors import ConfigError
from millrace.prepare.quarantine import QUARANTINE
from millrace.prepare.text.clean.cut_documents import spread
from millrace.prepare.text.dedup.repeats import EXACT, NEAR, Repeats
from millrace.prepare.text.options import ShardOptions
from millrace.prepare.text.part import PartDone
from millrace.prepare.text.part_files import part_column
from millrace.prepare.text.read.reader import REPLACED
from millrace.ragged import Array, Int64s
from millrace.store import platform

SPLITS = ("train", "val", "test")
SPLITS_FOLDER = "splits"
DROPPED = 255
STEP = 1 << 20  # documents or tokens at a time: a large compressed file makes a part of many millions


def splits_file(folder: str | Path, number: int) -> Path:
    """The file of a part with a byte for each of its documents."""
    return Path(folder) / SPLITS_FOLDER / f"{number:06d}.bin"


class Assignment:
    """The split of each document of each part (``splits_file``)."""

    def __init__(self, folder: Path, parts: Sequence[PartDone], options: ShardOptions) -> None:
        self._folder, self._parts, self._options = folder, parts, options
        self.documents = dict.fromkeys(SPLITS, 0)  # a cut document counts once
        self.cut = self.pieces = 0  # documents that were cut, and the records they became
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.characters = 0
        self.dropped: Counter[str] = Counter()

    def make(self, repeats: Repeats) -> None:
        """Writes the splits of all parts; ``repeats`` marks the documents that are dropped."""
        num_counted, self.characters = 0, sum(part.characters for part in self._parts)
        total = repeats.num_others - sum(part.pieces for part in self._parts)
        first, last_why = 0, 0
        platform.make_dir(self._folder / SPLITS_FOLDER)
        for part in self._parts:
            hashes, lengths = (part_column(self._folder, part.key, column) for column in ("hash", "length"))
            all_goes_on = np.broadcast_to(False, part.documents)
            if part.pieces:
                all_goes_on = part_column(self._folder, part.key, "goes_on")
            with open(splits_file(self._folder, part.number), "wb") as file:
                for start in range(0, part.documents, STEP):
                    some = slice(start, min(start + STEP, part.documents))
                    goes_on, mine = all_goes_on[some], slice(first, first + some.stop - start)
                    why = spread(repeats.among(mine), goes_on, last_why)
                    first, last_why, gone = mine.stop, int(why[-1]), why > 0
                    is_counted = ~(gone | goes_on)
                    splits = self._splits(hashes[some, 0], is_counted, num_counted, total)
                    num_counted += int(np.count_nonzero(is_counted))
                    splits[gone] = DROPPED
                    file.write(splits.tobytes())
                    self._count(lengths[some], goes_on, splits)
                    if gone.any():
                        self._count_dropped(part_column(self._folder, part.key, "size")[some], goes_on, why)
                    if part.pieces:
                        self._count_pieces(all_goes_on[max(start - 1, 0) : some.stop], gone)

    def _count_pieces(self, goes_on: Array, gone: Array) -> None:
        """Counts cut documents; ``goes_on`` begins with the record before, if there is one."""
        is_piece = goes_on[-len(gone) :] & ~gone
        is_second = is_piece & ~np.concatenate(([False], goes_on))[-len(gone) - 1 : -1]
        self.cut += int(is_second.sum())
        self.pieces += int(is_piece.sum() + is_second.sum())

    def _count(self, lengths: Int64s, goes_on: Array, splits: Array) -> None:
        for k, split in enumerate(SPLITS):
            mine = splits == k
            self.documents[split] += int(np.count_nonzero(mine & ~goes_on))
            self.tokens[split] += int(lengths[mine].sum())

    def _count_dropped(self, sizes: Int64s, goes_on: Array, why: Array) -> None:
        self.characters -= int(sizes[why > 0, 1].sum())
        for reason, kind in (("duplicate", EXACT), ("near-duplicate", NEAR)):
            if (gone := why == kind).any():
                self.dropped[reason] += int((gone & ~goes_on).sum())
                self.dropped[f"{reason} bytes"] += int(sizes[gone, 0].sum())

    def _splits(self, hashes: Array, is_counted: Array, before: int, total: int) -> Array:
        """Splits by a stable hash of the document, or by its place; train is 0, val 1, test 2."""
        val, test = self._options.val, self._options.test
        if self._options.val_tail:
            last = max(round(total * test), test > 0)
            edges = [total - last - max(round(total * (val + test)) - last, val > 0), total - last]
            numbers = before + np.cumsum(is_counted) - 1
            return np.searchsorted(edges, numbers, side="right").astype(np.uint8)
        shares, splits = hashes >> np.uint64(11), np.zeros(len(hashes), np.uint8)  # out of 2**53
        splits[shares < np.uint64(math.ceil((val + test) * 2.0**53))] = 2
        splits[shares < np.uint64(math.ceil(val * 2.0**53))] = 1
        return splits

    def check(self) -> None:
        """Refuses an empty split that was asked for."""
        losses = self._describe_losses()
        if not any(self.documents.values()):
            raise ConfigError(f"no documents are left: {losses or 'the sources hold none'}; look at them")
        why = f" ({losses})" if losses else ""
        for split, share in (("val", self._options.val), ("test", self._options.test)):
            if share > 0 and self.documents[split] == 0:
                total = sum(self.documents.values())
                last = "" if self._options.val_tail else ", or the last documents for it with --val-tail"
                raise ConfigError(
                    f"split {split!r} would be empty: {share:g} of {total:,} documents{why}; do without it (--{split} 0), "
                    f"or take more (a larger --{split}{last}); what was read is kept"
                )
        if self.documents["train"] == 0:
            total = sum(self.documents.values())
            raise ConfigError(
                f"no training documents are left: all {total:,} are in other splits{why}; give more, or a smaller --val or "
                "--test; what was read is kept"
            )

    def all_dropped(self) -> dict[str, int]:
        """Counts of dropped documents by reason, from the parts and from here."""
        dropped = Counter(self.dropped)
        for part in self._parts:
            dropped.update(part.dropped)
        return dict(sorted(dropped.items()))

    def _describe_losses(self) -> str:
        """The same for an error, with the files that name what was set aside; '' if nothing was dropped."""
        dropped = ", ".join(
            f"{reason}: {count:,}" for reason, count in self.all_dropped().items() if reason != REPLACED
        )
        is_quarantined = any(QUARANTINE in part.sizes for part in self._parts)
        where = f", named in {self._folder}/parts/*/{QUARANTINE}" if is_quarantined else ""
        return f"dropped were {dropped}{where}" if dropped else ""
