"""Finds the files of a corpus and cuts them into parts of about equal size.

Documents are in the order of the arguments, then of file names by their bytes, then of bytes within a file.
A part is some slices of some files: a pure function of the files and the options.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.distribution import install_command
from millrace.errors import ConfigError, SourceError
from millrace.prepare.files import ENDS, InputFile, find_files
from millrace.prepare.inflate import COMPRESSED
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.zstd_frames import frame_slices

ARCHIVES = frozenset((".tar", ".tgz", ".tbz", ".txz", ".zip", ".7z", ".rar"))
RECORDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
CODE = """c cc cpp cs css cu go h hpp hs html java jl js jsx kt lua md ml php pl py pyi r rb rs rst scala sh sql swift tex toml
ts tsx yaml yml"""
WHOLE = frozenset(f".{ending}" for ending in CODE.split())  # a file is one document
PROSE = frozenset((".html", ".tex"))  # of these: indentation says little
PAGES = frozenset((".html", ".htm"))
EXPECTED = "text, JSONL, CSV or Parquet, or - for standard input"
STDIN = "-"
MAX_SLICES = 4096  # of a part
DEFAULTS = ReadOptions()
SliceId = tuple[str, int, int, str, int, int]  # path, size, time, ends of its source; start and stop


class Source(InputFile, frozen=True, kw_only=True):
    """One file and what it holds."""

    format: str  # text, jsonl, csv, parquet
    document: str  # line, blank-line, file, record
    compression: str | None = None
    problem: str | None = None  # why the whole file goes to quarantine
    codec: str | None = None  # its encoding; None is UTF-8
    is_page: bool = False  # an HTML page whose text is the document

    @property
    def place(self) -> tuple[str, str]:
        """What the offset of a document counts (in the inflated and decoded text), and its name in an error."""
        return ("row", "row") if self.format == "parquet" else ("byte", "offset")

    @property
    def is_indented(self) -> bool:
        """Whether its indentation matters: code, and markup with lists and code in it."""
        return self.format == "text" and _kind(self.path)[2] in WHOLE - PROSE

    @property
    def is_raw_html(self) -> bool:
        """Whether it is HTML that keeps its tags."""
        return self.format == "text" and not self.is_page and _kind(self.path)[2] in PAGES


class SourceSlice(msgspec.Struct, frozen=True):
    """A range of one source: bytes of its text, row groups of Parquet, or all of it (stop -1)."""

    source: int
    start: int
    stop: int
    seek: tuple[int, int] | None = None  # where inflating begins: byte of the file, byte of the text


class Part(msgspec.Struct, frozen=True):
    """What one task prepares."""

    number: int
    slices: tuple[SourceSlice, ...]

    @property
    def first_source(self) -> int:
        """The sources of its documents are counted from this one, so that its number may change."""
        return self.slices[0].source


def find_sources(paths: Sequence[str], options: ReadOptions = DEFAULTS, **where: Any) -> tuple[list[Source], list[str]]:
    """All files of the arguments (``where`` is for ``find_files``) and what they hold; and notes on files left out."""

    def is_wanted(path: str) -> bool:
        known, _, ending = _kind(path)
        return known is not None or (options.html == "text" and ending in PAGES)

    files, notes = find_files(paths, is_wanted, EXPECTED, **where)
    sources = [_source(file, options) for file in files]
    for k, source in enumerate(sources):
        if options.html == "text" and source.is_raw_html:  # a page is one document, whatever ``--document`` says
            sources[k] = msgspec.structs.replace(source, document="file", is_page=True)
    return sources, notes


def _kind(path: str) -> tuple[str | None, str | None, str]:
    """Format (None: unknown ending), compression and the ending itself."""
    name = Path(path)
    compression = COMPRESSED.get(name.suffix.lower())
    ending = (Path(name.stem) if compression else name).suffix.lower()
    if ending in RECORDS:
        return RECORDS[ending], compression, ending
    return ("text" if ending in (".txt", ".text") or ending in WHOLE else None), compression, ending


def _source(file: InputFile, options: ReadOptions) -> Source:
    by_name, compression, ending = _kind(file.path)
    document, codec = options.document, options.codec
    if options.format is None and codec is None and file.location != STDIN:
        _refuse_unreadable(file, by_name, ending)
    kind = options.format or by_name or "text"
    default = "record" if kind != "text" else "file" if ending in WHOLE else "blank-line"
    if default == "record":
        document = None  # a document is a record, whatever ``--document`` says
    elif document == "record":
        raise ConfigError(f"--document record for {file.path!r}; only JSONL, CSV and Parquet have records")
    known = {name: getattr(file, name) for name in ("path", "size", "mtime_ns", "ends", "location")}
    if kind == "parquet":
        codec = None  # its text is UTF-8
    return Source(**known, format=kind, document=document or default, compression=compression, codec=codec)


def _refuse_unreadable(file: InputFile, kind: str | None, ending: str) -> None:
    """Refuses what is not text by its ending, or by its first bytes if the ending is unknown."""
    if ending in ARCHIVES:
        raise ConfigError(f"{file.path!r} is an archive; unpack it and give the files in it")
    if kind is None and _kind(file.path)[1] is None:
        with open(file.location, "rb") as opened:
            head = opened.read(ENDS)
        at = head.find(b"\0")
        if at >= 0 and not head.startswith((b"\xff\xfe", b"\xfe\xff")):  # the reader has a message for UTF-16
            raise SourceError(
                f"{file.path!r} is binary: byte {at} is 0, and its ending is not one of text; give files of {EXPECTED}, "
                "or say what it holds with --format",
                source=file.path, offset=at,
            )  # fmt: skip


def cut_parts(sources: Sequence[Source], part_bytes: int, finished: Collection[Sequence[SliceId]] = ()) -> list[Part]:
    """Large files in slices, small ones together; zstd by its frames, other compressed files whole.

    A ``finished`` part stays as it is if all its slices are still there, one after the other.
    """
    known: dict[SliceId, list[list[SliceId]]] = {}  # finished parts by their first slice, the longest first
    for mine in sorted(finished, key=len, reverse=True):
        known.setdefault(mine[0], []).append(list(mine))
    cuts = [entry for number, source in enumerate(sources) for entry in _cut_source(number, source, part_bytes)]
    ids = [slice_id(sources[piece.source], piece) for piece, _ in cuts] if known else []
    parts: list[Part] = []
    slices: list[SourceSlice] = []
    weight = 0

    def close() -> None:
        nonlocal weight
        if slices:
            parts.append(Part(len(parts), tuple(slices)))
            slices.clear()
        weight = 0

    at = 0
    while at < len(cuts):
        candidates = known.get(ids[at], ()) if ids else ()
        same = next((part for part in candidates if ids[at : at + len(part)] == part), None)
        if same is not None:
            close()
            slices += [piece for piece, _ in cuts[at : at + len(same)]]
            close()
            at += len(same)
            continue
        piece, size = cuts[at]
        if weight and weight + size > part_bytes:
            close()
        slices.append(piece)
        weight += size
        at += 1
        if len(slices) >= MAX_SLICES:
            close()
    close()
    return parts


def slice_id(source: Source, piece: SourceSlice) -> SliceId:
    """The identity of a slice, whatever the number of its source."""
    return source.path, source.size, source.mtime_ns, source.ends, piece.start, piece.stop


def _cut_source(number: int, source: Source, part_bytes: int) -> list[tuple[SourceSlice, int]]:
    """The slices of a source, each with its weight in bytes."""
    if source.problem is not None:
        return [(SourceSlice(number, 0, -1), 0)]
    if source.format == "parquet":
        return _row_groups(number, source)
    is_by_line = source.format == "jsonl" or (source.format == "text" and source.document != "file")
    may_cut = is_by_line and source.codec is None and source.size > part_bytes
    frames = frame_slices(source, part_bytes) if may_cut and source.compression == "zstd" else []
    if frames:
        return [(SourceSlice(number, *frame), source.size // len(frames)) for frame in frames]
    if source.compression or not may_cut:
        return [(SourceSlice(number, 0, -1), source.size)]
    count = -(-source.size // part_bytes)
    edges = [k * source.size // count for k in range(count + 1)]
    return [(SourceSlice(number, edges[k], edges[k + 1]), edges[k + 1] - edges[k]) for k in range(count)]


def _row_groups(number: int, source: Source) -> list[tuple[SourceSlice, int]]:
    pyarrow = arrow(source)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.location) as file:
            metadata = file.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{source.path!r} is not readable Parquet: {error}", source=source.path) from error
    sizes = [metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups)]
    return [(SourceSlice(number, k, k + 1), size) for k, size in enumerate(sizes)]


def arrow(source: Source) -> Any:
    """pyarrow, which Parquet needs."""
    try:
        import pyarrow
    except ImportError as error:
        raise SourceError(f"{source.path!r} needs pyarrow; {install_command('text')}", source=source.path) from error
    return pyarrow
