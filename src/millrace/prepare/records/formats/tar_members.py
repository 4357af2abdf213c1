"""The members of a tar file, one after the other, never extracted: names in an archive become no paths.

Python's own reader takes a damaged header for the end of the archive. Here an archive must end as tar files do.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from millrace.errors import SourceError
from millrace.prepare.files import printable
from millrace.prepare.records.formats.format import Source

BLOCK = 512
MAX_NAME = 1 << 16  # bytes of a long name, or of the further facts of a member
KINDS = {
    tarfile.LNKTYPE: "a hard link", tarfile.SYMTYPE: "a link", tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe", tarfile.GNUTYPE_SPARSE: "a sparse file",
}  # fmt: skip


class Member(NamedTuple):
    name: str
    size: int
    problem: str | None  # why it cannot be used


def members(file: IO[bytes], source: Source, most: int) -> Iterator[tuple[Member, bytes]]:
    """Every file in the archive with its bytes; folders are left out. ``most`` bounds the bytes of one."""
    place, long_name, facts = 0, None, dict[str, str]()
    while True:
        block = file.read(BLOCK)
        if block == bytes(BLOCK):
            return
        info = _header(block, place, source)
        place += BLOCK
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            data = _data(file, info.size, place, source, MAX_NAME)
            if info.type == tarfile.GNUTYPE_LONGNAME:
                long_name = data.rstrip(b"\0").decode(errors="surrogateescape")
            elif info.type == tarfile.XHDTYPE:
                facts = _pax(data)
        else:
            size = int(facts["size"]) if facts.get("size", "").isdecimal() else info.size
            name = facts.get("path") or long_name or info.name
            is_file = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
            data = _data(file, size if is_file else 0, place, source, most)
            long_name, facts = None, {}
            info.size = size if is_file else 0
            if info.type != tarfile.DIRTYPE and not (is_file and name.endswith("/")):
                yield Member(name, size, _problem(name, info.type, is_file, "GNU.sparse.major" in facts)), data
        place += -(-info.size // BLOCK) * BLOCK


def _header(block: bytes, place: int, source: Source) -> tarfile.TarInfo:
    try:
        if len(block) < BLOCK:
            raise tarfile.HeaderError("it ends without the mark at the end of a tar file; it was cut short")
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise damaged(source, place, str(error)) from error


def damaged(source: Source, place: int, problem: str) -> SourceError:
    return SourceError(
        f"{source.path!r}, byte {place}: it is no whole tar file: {problem}; copy it again, or leave it out with --exclude",
        source=source.path, offset=place,
    )  # fmt: skip


def _data(file: IO[bytes], size: int, place: int, source: Source, most: int) -> bytes:
    if not 0 <= size <= most:
        raise damaged(source, place - BLOCK, f"a member claims {size:,} bytes, more than there can be")
    data = file.read(size)
    rest = -size % BLOCK
    if len(data) < size or len(file.read(rest)) < rest:
        raise damaged(source, place, "it ends in the middle of a member; it was cut short")
    return data


def _pax(data: bytes) -> dict[str, str]:
    """The facts of a member in records such as ``27 path=name``."""
    found = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            break
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        found[key.decode(errors="replace")] = value.decode(errors="surrogateescape")
        data = data[int(length) :]
    return found


def _problem(name: str, kind: bytes, is_file: bool, is_sparse: bool) -> str | None:
    if not is_file or is_sparse:
        return f"member {printable(name)!r} is {KINDS.get(kind, 'no plain file')}; only plain files are read"
    if name.startswith("/") or ".." in name.split("/"):
        return f"member {printable(name)!r} has a path that leads out of the archive"
    return None
