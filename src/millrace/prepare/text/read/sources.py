"""Finds the files of a corpus and cuts them into parts of about equal size.

The order of documents is the order of the arguments, of names by their bytes within a folder or pattern, and of
bytes within a file. A part is some byte ranges of some files: a pure function of them and the options.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, SourceError
from millrace.prepare.files import ENDS, InputFile, find_files
from millrace.prepare.text.read.members import member_slices

ARCHIVES = frozenset((".tar", ".tgz", ".tbz", ".txz", ".zip", ".7z", ".rar"))
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
RECORDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
CODE = """c cc cpp cs css cu go h hpp hs html java jl js jsx kt lua md ml php pl py pyi r rb rs rst scala sh sql swift tex toml
ts tsx yaml yml"""
WHOLE = frozenset(f".{ending}" for ending in CODE.split())  # of which a file is a document
PROSE = frozenset((".html", ".tex"))  # of these, in which indentation says little
PAGES = frozenset((".html", ".htm"))
EXPECTED = "text, JSONL, CSV or Parquet, or - for standard input"
STDIN = "-"
MAX_UNITS = 4096  # of a part
UnitId = tuple[str, int, int, str, int, int]  # path, size, time, ends of its source; start and stop


class Source(InputFile, frozen=True, kw_only=True):
    """One file and what it holds."""

    format: str  # text, jsonl, csv, parquet
    document: str  # line, blank-line, file, record
    compression: str | None = None
    unpacked: str | None = None  # where a compressed one lies that cannot be read as a stream
    problem: str | None = None  # why it is set aside as a whole
    codec: str | None = None  # by which it is decoded, from its beginning on; None: it is UTF-8
    is_page: bool = False  # its document is the text of an HTML page

    @property
    def place(self) -> tuple[str, str]:
        """What the offset of a document counts, of the text where it is compressed or decoded, and its name in an error."""
        return ("row", "row") if self.format == "parquet" else ("byte", "offset")

    @property
    def readable(self) -> str:
        """The file to open where it is read from several places."""
        return self.unpacked or self.location

    @property
    def is_indented(self) -> bool:
        """Whether its indentation matters: code, and markup with lists and code in it."""
        return self.format == "text" and _kind(self.path)[2] in WHOLE - PROSE

    @property
    def is_raw_html(self) -> bool:
        """Whether its tags are kept."""
        return self.format == "text" and not self.is_page and _kind(self.path)[2] in PAGES

    @property
    def is_framed(self) -> bool:
        """Whether its documents are runs of lines of plain text."""
        return self.format == "text" and self.document != "file"


class Unit(msgspec.Struct, frozen=True):
    """A range of one source: bytes of its text, row groups of Parquet, or all of it (stop -1)."""

    source: int
    start: int
    stop: int
    seek: tuple[int, int] | None = None  # of a compressed file: from which byte on it is inflated, and that of the text


class Part(msgspec.Struct, frozen=True):
    """What one task prepares."""

    number: int
    units: tuple[Unit, ...]

    @property
    def first_source(self) -> int:
        """From which the sources of its documents are counted: so it holds for any number that it has."""
        return self.units[0].source


def find_sources(
    paths: Sequence[str],
    document: str | None,
    kind: str | None = None,
    *,
    avoid: Collection[Path] = (),
    given: Mapping[str, InputFile] | None = None,
    exclude: Sequence[str] = (),
    codec: str | None = None,
    html: str = "raw",
) -> tuple[list[Source], list[str]]:
    """Every file of the arguments and what it holds, by its ending or as ``kind`` says; and notes on what was left out."""

    def is_wanted(path: str) -> bool:
        known, _, ending = _kind(path)
        return known is not None or (html == "text" and ending in PAGES)

    found = find_files(paths, is_wanted, EXPECTED, avoid=avoid, given=given, exclude=exclude)
    sources = [_source(file, document, kind, codec) for file in found.files]
    return [_page(source) for source in sources] if html == "text" else sources, found.notes


def _page(source: Source) -> Source:
    """The source, as a page where it is one: then it is one document, whatever other text has."""
    if source.format != "text" or _kind(source.path)[2] not in PAGES:
        return source
    return msgspec.structs.replace(source, document="file", is_page=True)


def _kind(path: str) -> tuple[str | None, str | None, str]:
    """Format (None: unknown ending), compression and the ending itself."""
    name = Path(path)
    compression = COMPRESSED.get(name.suffix.lower())
    ending = (Path(name.stem) if compression else name).suffix.lower()
    if ending in RECORDS:
        return RECORDS[ending], compression, ending
    return ("text" if ending in (".txt", ".text") or ending in WHOLE else None), compression, ending


def _source(file: InputFile, document: str | None, kind: str | None, codec: str | None) -> Source:
    by_name, compression, ending = _kind(file.path)
    if kind is None and codec is None and file.location != STDIN:
        _refuse_unreadable(file, by_name, ending)
    kind = kind or by_name or "text"
    default = "record" if kind != "text" else "file" if ending in WHOLE else "blank-line"
    if default == "record":
        document = None  # the documents of JSONL, CSV and Parquet are their records, whatever plain text has
    elif document == "record":
        raise ConfigError(f"--document record for {file.path!r}; only JSONL, CSV and Parquet have records")
    known = {name: getattr(file, name) for name in ("path", "size", "mtime_ns", "ends", "location")}
    if kind == "parquet":
        codec = None  # its text is UTF-8
    return Source(**known, format=kind, document=document or default, compression=compression, codec=codec)


def _refuse_unreadable(file: InputFile, kind: str | None, ending: str) -> None:
    """What is no text by its name, or by its first bytes where the name says nothing."""
    if ending in ARCHIVES:
        raise ConfigError(f"{file.path!r} is an archive; unpack it and give the files in it")
    if kind is None and _kind(file.path)[1] is None:
        with open(file.location, "rb") as opened:
            head = opened.read(ENDS)
        at = head.find(b"\0")
        if at >= 0 and not head.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16, which the reader names
            raise SourceError(
                f"{file.path!r} is binary: byte {at} is 0, and its ending is none of text; give files of {EXPECTED}, "
                "or say what it holds with --format",
                source=file.path, offset=at,
            )  # fmt: skip


def cut_parts(sources: Sequence[Source], part_bytes: int, finished: Collection[Sequence[UnitId]] = ()) -> list[Part]:
    """Large files in slices, small ones together; compressed ones by their members, or whole.

    Parts that are ``finished`` stay as they are, where all they hold is still there one behind the other.
    """
    known = _by_first(finished)
    found = [entry for number, source in enumerate(sources) for entry in _units(number, source, part_bytes)]
    ids = [unit_id(sources[unit.source], unit) for unit, _ in found] if known else []
    parts: list[Part] = []
    units: list[Unit] = []
    weight = 0

    def close() -> None:
        nonlocal weight
        if units:
            parts.append(Part(len(parts), tuple(units)))
            units.clear()
        weight = 0

    at = 0
    while at < len(found):
        same = (
            next((mine for mine in known.get(ids[at], ()) if ids[at : at + len(mine)] == mine), None) if ids else None
        )
        if same is not None:
            close()
            units += [unit for unit, _ in found[at : at + len(same)]]
            close()
            at += len(same)
            continue
        unit, size = found[at]
        if weight and weight + size > part_bytes:
            close()
        units.append(unit)
        weight += size
        at += 1
        if len(units) >= MAX_UNITS:
            close()
    close()
    return parts


def unit_id(source: Source, unit: Unit) -> UnitId:
    """What a range of a source is, whatever the source's number."""
    return source.path, source.size, source.mtime_ns, source.ends, unit.start, unit.stop


def _by_first(finished: Collection[Sequence[UnitId]]) -> dict[UnitId, list[list[UnitId]]]:
    """Parts by their first unit, the longest first."""
    found: dict[UnitId, list[list[UnitId]]] = {}
    for units in sorted(finished, key=len, reverse=True):
        found.setdefault(units[0], []).append(list(units))
    return found


def _units(number: int, source: Source, part_bytes: int) -> list[tuple[Unit, int]]:
    if source.problem is not None:
        return [(Unit(number, 0, -1), 0)]
    if source.format == "parquet":
        return _row_groups(number, source)
    is_cut = source.codec is None and (source.is_framed or source.format == "jsonl")
    if source.compression and source.size > part_bytes and is_cut:
        found = member_slices(source, source.compression, part_bytes)
        if found:
            return [(Unit(number, *slice_), source.size // len(found)) for slice_ in found]
    if source.compression or not is_cut or source.size <= part_bytes:
        return [(Unit(number, 0, -1), source.size)]
    slices = -(-source.size // part_bytes)
    edges = [k * source.size // slices for k in range(slices + 1)]
    return [(Unit(number, edges[k], edges[k + 1]), edges[k + 1] - edges[k]) for k in range(slices)]


def _row_groups(number: int, source: Source) -> list[tuple[Unit, int]]:
    pyarrow = arrow(source)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.readable) as file:
            metadata = file.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{source.path!r} is not readable Parquet: {error}", source=source.path) from error
    return [(Unit(number, k, k + 1), metadata.row_group(k).total_byte_size) for k in range(metadata.num_row_groups)]


def arrow(source: Source) -> Any:
    """pyarrow, which CSV and Parquet need."""
    try:
        import pyarrow
    except ImportError as error:
        raise SourceError(f"{source.path!r} needs pyarrow; pip install millrace[text]", source=source.path) from error
    return pyarrow
