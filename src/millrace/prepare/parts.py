"""Parts: what a worker has made of some of the input, each in a folder of its own that is whole or not there.

It is renamed into place when it is whole; ``done.json`` in it says what it holds, with a hash of itself in a second
line, and a restart keeps it only if the sizes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from millrace.store import platform

Done = TypeVar("Done", bound=msgspec.Struct)


def part_folder(folder: str | Path, name: int | str) -> Path:
    return Path(folder) / "parts" / (name if isinstance(name, str) else f"{name:06d}")


def read_done(folder: str | Path, name: int | str, kind: type[Done], spent: Collection[str] = ()) -> Done | None:
    """The report of a part that is whole on disk, with its ``sizes``; files that may be ``spent`` may be empty too.

    Parts that are not synced say at which start of the machine they were made (``boot``): of an earlier one they are none.
    """
    path = part_folder(folder, name)
    try:
        line, _, seal = (path / "done.json").read_bytes().partition(b"\n")
        if seal != _seal(line):
            return None
        done: Any = msgspec.json.decode(line, type=kind)
        found = {file: (path / file).stat().st_size for file in done.sizes}
    except (OSError, ValueError):  # also of msgspec, and of names that are none
        return None
    is_whole = all(found[file] == size or (file in spent and not found[file]) for file, size in done.sizes.items())
    return done if is_whole and getattr(done, "boot", platform.boot_id()) == platform.boot_id() else None


def make_part(
    folder: str | Path, name: int | str, kind: type[Done], make: Callable[[Path], Done], *, durable: bool = True
) -> Done:
    """The part that ``make`` writes into the folder it is given, unless it is there already."""
    known = read_done(folder, name, kind)
    if known is not None:
        return known
    final = part_folder(folder, name)
    aside = final.with_name(final.name + ".tmp")
    with platform.writing(aside):
        platform.remove(aside)
        platform.remove(final)
        platform.make_dir(aside)
        done = make(aside)
        line = msgspec.json.encode(done)
        platform.write_file(aside / "done.json", line + b"\n" + _seal(line), mode=0o644, durable=durable)
        if durable:
            platform.sync_dir(aside)
        platform.rename(aside, final)
    return done


def _seal(line: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(line).encode()
