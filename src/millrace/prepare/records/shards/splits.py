"""Which split each record is in: by the hash of its key or its values, by its key, by its folder, or the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millrace.errors import ConfigError
from millrace.prepare.parts import part_folder
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.records.read.hashes import HASHES, hash_texts
from millrace.prepare.records.read.part import PartDone
from millrace.prepare.spill import map_array
from millrace.ragged import Array

SPLITS = ("train", "val", "test")


class Splits:
    """Gives a code for each record of a part: its place in ``SPLITS``."""

    def __init__(self, folder: Path, parts: Sequence[PartDone], options: RecordOptions) -> None:
        self._folder, self._options = folder, options
        self._total, self._before = sum(part.records for part in parts), 0
        self._keys = {split: options.keys_of(split) for split in ("val", "test")}
        self._named = {split: _as_hashes(hash_texts(keys)) for split, keys in self._keys.items() if keys}
        self._is_found = {split: np.zeros(len(keys), bool) for split, keys in self._named.items()}
        both = set(self._keys["val"]) & set(self._keys["test"])
        if both:
            raise ConfigError(f"key {min(both)!r} is named for val and for test; name it once")

    def of(self, part: PartDone) -> Array | None:
        """The codes of a part's records, which come in order; None where all are in train."""
        options, count = self._options, part.records
        if not options.has_split:
            return None
        if part.split is not None:
            return np.full(count, SPLITS.index(part.split), np.uint8)
        codes = np.zeros(count, np.uint8)
        if options.val_tail:
            first_test = self._total - round(self._total * options.test)
            first_val = first_test - round(self._total * options.val)
            places = self._before + np.arange(count)
            codes[places >= first_val], codes[places >= first_test] = 1, 2
            self._before += count
            return codes
        hashes = (
            _as_hashes(bytes(map_array(part_folder(self._folder, part.key) / HASHES, np.uint8)))
            if count
            else _as_hashes(b"")
        )
        shares = hashes[:, 0].astype(np.float64) / 2.0**64
        codes[shares < options.val + options.test] = 2
        codes[shares < options.val] = 1
        for split, named in self._named.items():
            codes[_are_in(hashes, named)] = SPLITS.index(split)
            self._is_found[split] |= _are_in(named, hashes)
        return codes

    def check(self, counts: dict[str, int]) -> None:
        """Refuses keys that no record has, and splits without a record."""
        for split, is_found in self._is_found.items():
            if not is_found.all():
                lost = np.flatnonzero(~is_found)
                raise ConfigError(
                    f"no record has the key {self._keys[split][int(lost[0])]!r}, which is one of {len(lost):,} missing keys "
                    f"named for {split}; check them, or name another column with --key; what was read is kept"
                )
        asked = [split for split in ("val", "test") if getattr(self._options, split)]
        for split in ("train", *asked):
            if not counts.get(split):
                raise ConfigError(
                    f"split {split!r} would be empty: {sum(counts.values()):,} records; give other shares, or more records; "
                    "what was read is kept"
                )


def _as_hashes(data: bytes) -> Array:
    return np.frombuffer(data, "<u8").reshape(-1, 2)


def _are_in(hashes: Array, others: Array) -> Array:
    found: Array = np.isin(hashes[:, 0], others[:, 0]) & np.isin(hashes[:, 1], others[:, 1])
    return found
