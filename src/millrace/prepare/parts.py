"""Parts: what a worker has made of some of the input, each in a folder of its own that is whole or not there.

A part gets its name by one rename when it is whole. ``done.json`` in it says what it holds, with a hash of itself in a
second line. A restart uses the part again only if its files still have their sizes.
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


def read_done(folder: str | Path, name: int | str, kind: type[Done], emptied: Collection[str] = ()) -> Done | None:
    """The report of a part that is whole on disk; None where it is not. Files in ``emptied`` may be empty.

    A part that was not synced names the start of the machine that made it (``boot``); after another start it is void.
    """
    path = part_folder(folder, name)
    try:
        line, _, seal = (path / "done.json").read_bytes().partition(b"\n")
        if seal != _seal(line):
            return None
        done: Any = msgspec.json.decode(line, type=kind)
        sizes = {file: (path / file).stat().st_size for file in done.sizes}
    except (OSError, ValueError):  # also errors of msgspec, and names that no file can have
        return None
    is_whole = all(sizes[file] == size or (file in emptied and not sizes[file]) for file, size in done.sizes.items())
    return done if is_whole and getattr(done, "boot", platform.boot_id()) == platform.boot_id() else None


def write_part(
    folder: str | Path, name: int | str, kind: type[Done], make: Callable[[Path], Done], *, durable: bool = True
) -> Done:
    """The part that ``make`` writes into the folder it is given, unless it is there already.

    Two attempts may run at once: each writes a folder of its own, and the first to be whole gets the name.
    """
    if (known := read_done(folder, name, kind)) is not None:
        return known
    final = part_folder(folder, name)
    with platform.writing(final):
        aside = platform.make_attempt(final)
        try:
            done = make(aside)
            line = msgspec.json.encode(done)
            platform.write_file(aside / "done.json", line + b"\n" + _seal(line), mode=0o644, durable=durable)
            if durable:
                platform.sync_dir(aside)
        except Exception:
            platform.remove(aside)
            raise
        platform.place(aside, final)
    return done


def _seal(line: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(line).encode()
