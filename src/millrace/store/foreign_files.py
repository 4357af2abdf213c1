"""What the readers of foreign layouts share: mapped files, their JSON, dtypes by name, and ``Foreign``, their result.

Neither this nor the ``foreign_*`` modules write, copy data, or make a path of a name found in data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace import errors
from millrace.errors import ConfigError, StoreCorrupt, StoreError
from millrace.identity import canonical, digest
from millrace.ragged import Array
from millrace.store import platform, strict_json
from millrace.store.layout import DTYPES, Column
from millrace.store.plain_file import open_file, unreadable
from millrace.store.reader import MAX_MAPS

SPLITS = ("train", "val", "test")
SPLIT = re.compile(r"(?:^|_)(train|val|test)(?![a-zA-Z])")
END_BYTES = 64 << 10  # the fingerprint reads this much of both ends of each file
COPY_AGAIN = "copy the file again"

# Every way to spell a dtype that a foreign file may hold: uint16, <u2, u2. Others (big-endian too) are refused.
SPELLINGS: dict[str, str] = {
    spelling: name
    for name, (storage, _) in DTYPES.items()
    if name not in ("string", "dictionary", "bfloat16")
    for spelling in (name, storage.str, storage.str[1:])
}


def as_dtype(dtype: Any) -> str | None:
    """The name of the dtype a user gave, or None where none was given."""
    if dtype is None:
        return None
    spelling = dtype
    if not isinstance(dtype, str):
        try:
            spelling = np.dtype(dtype).str
        except (TypeError, ValueError):
            spelling = ""
    if spelling not in SPELLINGS:
        names = ", ".join(dict.fromkeys(SPELLINGS.values()))
        raise ConfigError(f"dtype={dtype!r} cannot be read in place; expected one of {names} (little-endian)")
    return SPELLINGS[spelling]


def check_given(given: str | None, named: str, where: str) -> None:
    """Refuses a ``dtype=`` that is not the one the layout names itself."""
    if given is not None and given != named:
        problem = f"dtype={given!r} given, but {where} says {named}"
        raise ConfigError(f"{problem}; leave dtype= out, or correct the file if it is wrong", path=where)


def is_integer(dtype: str) -> bool:
    return DTYPES[dtype][0].kind in "iu"


def corrupt(path: str, problem: str, remedy: str = COPY_AGAIN, **context: Any) -> StoreCorrupt:
    return errors.corrupt(path, problem, remedy, **context)


@dataclass(frozen=True, eq=False)
class MappedFile:
    """One file of a layout, mapped read-only, its descriptor closed; ``name`` is its place in the layout."""

    path: str
    name: str  # with / on every platform
    data: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def items(self, dtype: str, start: int = 0, stop: int | None = None) -> Array:
        """The bytes [start, stop) as numbers; a view of the map."""
        return self.data[start:stop].view(DTYPES[dtype][0])

    def identity(self) -> tuple[bytes, ...]:
        """What the fingerprint knows of the file: its name, its size, a hash of both ends."""
        ends = digest(self.data[:END_BYTES].tobytes(), self.data[-END_BYTES:].tobytes())
        return os.fsencode(self.name), str(self.num_bytes).encode(), ends.encode()


@dataclass(frozen=True, eq=False)
class Shard:
    """One shard of a layout: its name, the split it belongs to (if any), its arrays in the order of the files."""

    name: str
    split: str | None
    arrays: list[Array]


@dataclass(frozen=True, eq=False)
class Foreign:
    """All that a store over a foreign layout needs. ``layout`` never changes, ``phrase`` may."""

    layout: str
    phrase: str
    kind: str
    columns: dict[str, Column]
    shards: list[Shard]
    files: list[MappedFile]
    meta: dict[str, Any] = field(default_factory=dict)
    identity: Callable[[], bytes] = bytes  # of what the ends of the files may not show, such as record boundaries
    derived: tuple[str, ...] = ()  # columns that follow from the rest: the fingerprint does without them

    def fingerprint(self) -> str:
        named = {name: column for name, column in self.columns.items() if name not in self.derived}
        columns = {name: [column.dtype, *column.shape] for name, column in named.items()}
        splits = [shard.split for shard in self.shards]
        parts = [part for file in self.files for part in file.identity()]
        return digest("foreign", self.layout, canonical([columns, splits]), self.identity(), *parts)


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of one file without boundaries, which are one record. They begin at byte ``start``."""

    file: MappedFile
    dtype: str
    start: int = 0
    shape: tuple[int, ...] = (-1,)
    split: str | None = None

    def shard(self) -> Shard:
        rows = self.file.items(self.dtype, self.start).reshape(self.shape)
        return Shard(self.file.name, self.split, [np.array([0, len(rows)], np.int64), rows])


def plain_numbers(layout: str, phrase: str, numbers: list[Numbers]) -> Foreign:
    """The layout of such files, a shard each: tokens where they are lines of integers, else values."""
    first = numbers[0]
    is_text = len(first.shape) == 1 and is_integer(first.dtype)
    try:
        column = Column(first.dtype, first.shape[1:])
    except ConfigError as error:
        raise corrupt(first.file.path, str(error), "reshape it and np.save it again") from error
    columns, kind = {"tokens" if is_text else "values": column}, "text" if is_text else "records"
    return Foreign(layout, phrase, kind, columns, [one.shard() for one in numbers], [one.file for one in numbers])


def split_by_name(folder: str, names: list[str]) -> list[str | None]:
    """The split of each file by its name, as in ``web_train_000001.bin``: all of them say one, or none does."""
    said = [set(SPLIT.findall(name.rsplit("/", 1)[-1])) for name in names]
    if not any(said):
        return [None] * len(names)
    for name, splits in zip(names, said, strict=True):
        if len(splits) != 1:
            raise ConfigError(
                f"{os.path.join(folder, name)}: its name says {' and '.join(sorted(splits)) or 'no split'}, and others say one of "
                f"{', '.join(SPLITS)} by _train, _val or _test; rename it, move it away, or open the files one by one",
                path=folder,
            )
    return [splits.pop() for splits in said]


def map_file(path: str, name: str | None = None) -> MappedFile:
    """A file mapped whole; ``name`` is its place in the layout, by default its own name."""
    with open_file(path, follow=True) as (fd, num_bytes):
        try:
            data = platform.map_file(fd, num_bytes)
        except OSError as error:
            problem = f"{path}: its {num_bytes} bytes cannot be mapped ({error.strerror})"
            remedy = "copy it to a local disk, or raise the limit on maps (vm.max_map_count)"
            raise StoreError(f"{problem}; {remedy}", path=path) from error
    return MappedFile(path, name or os.path.basename(path), data)


def map_files(folder: str, names: list[str]) -> list[MappedFile]:
    """Files of a folder by their relative names, all mapped."""
    limit = min(MAX_MAPS, platform.descriptor_limit() // 2) if platform.MAPS_HOLD_DESCRIPTORS else MAX_MAPS
    if len(names) > limit:
        raise ConfigError(
            f"{folder} has {len(names)} data files, more than the {limit} that can be mapped at once; "
            "join files, or prepare a store from them",
            path=folder,
        )
    return [map_file(os.path.join(folder, name), name) for name in names]


def list_folder(folder: str, ending: str = "") -> list[str]:
    """Names in a folder that end so, by bytes, without hidden ones (such as macOS leaves beside files)."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise unreadable(folder, error) from error
    return sorted((name for name in names if name.endswith(ending) and name[0] != "."), key=os.fsencode)


def read_json(path: str, remedy: str = "correct the file") -> dict[str, Any]:
    """The object in a small JSON file, its size checked before a byte is read."""
    with open_file(path, follow=True) as (fd, num_bytes):
        if num_bytes > strict_json.MAX_BYTES:
            problem = f"has {num_bytes} bytes, expected JSON of at most {strict_json.MAX_BYTES}"
            raise corrupt(path, problem, remedy, found=num_bytes)
        data = platform.pread(fd, num_bytes, 0)
    return strict_json.load_json(data, path, remedy)
