"""Foreign layouts opened in place, read-only: what a path is, and the store over its mapped files.

``open_store`` (open.py) comes here for what is not a millrace store. Each layout has a reader in a
``foreign_*`` module that returns what it found; nothing is copied, written or unpickled.
"""

from __future__ import annotations

import os
from typing import Any

from millrace.errors import ConfigError
from millrace.store.folder import missing
from millrace.store.foreign_files import SPLIT, SPLITS, Foreign, as_dtype, list_folder
from millrace.store.foreign_megatron import has_index, read_megatron, read_megatron_folder
from millrace.store.foreign_npy import read_npy, read_npy_folder
from millrace.store.foreign_series import DATA, read_series
from millrace.store.foreign_tokens import read_bin, read_bin_folder, read_shards, read_split_folders, split_files
from millrace.store.layout import Layout
from millrace.store.memory import array_store
from millrace.store.store import Store


def open_foreign(path: str, dtype: Any = None) -> Store:
    """A store over somebody else's files; ``meta["layout"]`` says what they were taken for.

    ``dtype`` says what headerless tokens are; where the layout names its dtype itself, it must be the same.
    """
    path = os.path.abspath(path)
    given = as_dtype(dtype)
    found = _find_in_folder(path, given) if os.path.isdir(path) else _find_file(path, given)
    if found is None:
        raise missing(path)
    splits = tuple(split for split in SPLITS if any(shard.split == split for shard in found.shards))
    return array_store(
        Layout(found.columns),
        [(shard.name, shard.arrays) for shard in found.shards],
        kind=found.kind,
        meta={"layout": found.phrase, **found.meta},
        splits=splits,
        split_of=[splits.index(shard.split) if shard.split else 0 for shard in found.shards],
        path=path,
        fingerprint=found.fingerprint,
        reopen=(open_foreign, (path, given)),
    )


def _find_file(path: str, given: str | None) -> Foreign | None:
    stem, ending = os.path.splitext(path)
    if not os.path.isfile(path):
        return read_megatron(path, given) if os.path.isfile(f"{path}.idx") else None
    if ending == ".idx":
        return read_megatron(stem, given)
    if ending == ".bin":
        return read_megatron(stem, given) if has_index(stem, given) else read_bin(path, given)
    return read_npy(path, given) if ending == ".npy" else None


def _find_in_folder(folder: str, given: str | None) -> Foreign | None:
    names = list_folder(folder)
    if DATA in names:
        return read_series(folder, given)
    pairs = [name[:-4] for name in names if name.endswith(".idx") and f"{name[:-4]}.bin" in names]
    if any(has_index(os.path.join(folder, stem), given) for stem in pairs):
        return read_megatron_folder(folder, names, given)
    has_bins = "train.bin" in names or "val.bin" in names
    if "dataset_metadata.json" in names:
        if has_bins and split_files(folder):
            problem = f"{folder} has .bin files beside and inside its split folders"
            raise ConfigError(f"{problem}; open one of the files, or move one kind away", path=folder)
        if not has_bins:
            return read_split_folders(folder, given)
    if has_bins:
        return read_bin_folder(folder, given)
    if names and all(name.endswith(".npy") for name in names):
        return read_npy_folder(folder, given)
    bins = [name for name in names if name.endswith(".bin")]
    return read_shards(folder, bins, given) if any(map(SPLIT.search, bins)) else None
