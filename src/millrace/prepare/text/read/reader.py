"""Reads documents as they are stored: cleaned and filtered. A bad one is counted, set aside, or stops the run."""

from __future__ import annotations

import base64
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from millrace.errors import SourceError
from millrace.prepare.engines import alive
from millrace.prepare.files import check_unchanged
from millrace.prepare.functions import load_function
from millrace.prepare.quarantine import Skips, count_lines
from millrace.prepare.text.clean.characters import clean, clean_documents, is_utf8
from millrace.prepare.text.clean.long_documents import clean_long, num_characters
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.framing import read_chunks, read_records
from millrace.prepare.text.read.html import page_text
from millrace.prepare.text.read.records import Bad, Record
from millrace.prepare.text.read.sources import Part, Source, SourceSlice
from millrace.prepare.text.read.streams import open_source
from millrace.prepare.text.read.turns import is_heavy, take_turn
from millrace.text.breaks import is_long
from millrace.text.documents import Documents

REPLACED = "documents with invalid characters replaced"  # counted as dropped, though they stay
LARGE = 64  # documents in a chunk that is not worth joining with others
CHUNK_BYTES = 1 << 19  # documents are cleaned and tokenised this many bytes at a time


class DocumentReader:
    """Reads the documents of parts; ``quarantine`` gets a line of JSON for each that is set aside.

    Readers of one ``folder`` take turns with what needs much memory.
    """

    def __init__(
        self, options: ReadOptions, quarantine: Callable[[bytes], None], folder: str | Path | None = None
    ) -> None:
        self._options, self._quarantine, self._folder = options, quarantine, folder
        self._filter = load_function(options.filter, "--filter")
        self._one_by_one = self._filter is not None or options.min_chars > 1
        self.bytes_read = 0
        self.without: list[int] = []  # sources without a document in these slices, or with empty ones alone
        self.dropped: Counter[str] = Counter()
        self.skips = Skips()

    def chunks(self, part: Part, sources: Sequence[Source]) -> Iterator[tuple[int, Documents]]:
        """(number of the source, documents), about a megabyte at a time; a long document is a chunk of its own."""
        for piece, source in zip(part.slices, sources, strict=True):
            check_unchanged(source)
            before, is_empty = self._num_dropped(), True
            heavy = self._folder is not None and is_heavy(source, piece)
            with take_turn(Path(self._folder or "", "alone")) if heavy else contextlib.nullcontext():
                reported = self.bytes_read
                for documents in self._gather(self._read(source, piece)):
                    is_empty = False
                    yield piece.source, documents
                    alive(bytes=self.bytes_read - reported)
                    reported = self.bytes_read
            if is_empty and self._num_dropped() == before:
                self.without.append(piece.source)
            check_unchanged(source)

    def _num_dropped(self) -> int:
        """Documents that were dropped and were not empty."""
        return self.dropped.total() - self.dropped["empty"]

    def _read(self, source: Source, piece: SourceSlice) -> Iterator[Documents]:
        """The usable documents of a slice, some at a time."""
        try:
            if source.format == "text":
                for chunk in read_chunks(source, piece, self._options):
                    self._count(read=len(chunk))
                    yield self._use_chunk(source, chunk)
            else:
                for records in _groups(read_records(source, piece, self._options)):
                    self._count(read=len(records))
                    yield self._use_records(source, records)
        except OSError as error:  # else it would pass for a failure to write
            raise SourceError(
                f"{source.path!r} cannot be read: {error.strerror or error}; fix that, then run again",
                source=source.path,
            ) from error

    def _gather(self, chunks: Iterable[Documents]) -> Iterator[Documents]:
        """Joins small chunks: every call of a tokenizer and of write has its price."""
        waiting: list[Documents] = []
        count, before = 0, self.bytes_read
        for chunk in chunks:
            if not len(chunk):
                continue
            is_large = len(chunk) >= LARGE or is_long(chunk.num_bytes)
            if waiting and (is_large or chunk.piece_of != waiting[0].piece_of):
                yield Documents.join(waiting)
                waiting, count, before = [], 0, self.bytes_read
            if is_large:
                yield chunk
                before = self.bytes_read
                continue
            waiting.append(chunk)
            count += len(chunk)
            if self.bytes_read - before + 64 * count >= CHUNK_BYTES:
                yield Documents.join(waiting)
                waiting, count, before = [], 0, self.bytes_read
        if waiting:
            yield Documents.join(waiting)

    def _use_chunk(self, source: Source, chunk: Documents) -> Documents:
        """A chunk of plain text, cleaned at once unless its documents must be looked at one by one."""
        if not (self._one_by_one or source.is_page or is_long(chunk.num_bytes)):
            cleaned = self._clean(chunk)
            if cleaned is not None:
                self.bytes_read += chunk.num_bytes
                return self._drop_empty(cleaned)
        records = [Record(offset, text) for offset, text in zip(chunk.offsets.tolist(), chunk, strict=True)]
        return self._use_each(source, records, chunk.piece_of)

    def _use_records(self, source: Source, records: Sequence[Record | Bad]) -> Documents:
        """The same of records, which may be bad or have masks."""
        good = [record for record in records if isinstance(record, Record)]
        num_bytes = sum(len(record.text) for record in good)
        if len(good) < len(records) or self._one_by_one or (len(good) == 1 and is_long(num_bytes)):
            return self._use_each(source, records)
        cleaned = self._clean(self._chunk(good))
        if cleaned is None:
            return self._use_each(source, records)
        self.bytes_read += num_bytes
        return self._drop_empty(cleaned)

    def _chunk(self, records: Sequence[Record], piece_of: int | None = None) -> Documents:
        spans = [record.spans for record in records if record.spans is not None]
        has_masks = self._options.mask_field is not None
        texts, offsets = [record.text for record in records], [record.offset for record in records]
        return Documents.of(texts, offsets, spans if has_masks else None, piece_of)

    def _drop_empty(self, documents: Documents) -> Documents:
        numbers = np.flatnonzero(documents.lengths)
        if len(numbers) == len(documents):
            return documents
        self.dropped["empty"] += len(documents) - len(numbers)
        return documents.take(numbers)

    def _clean(self, documents: Documents) -> Documents | None:
        """The documents as they are tokenised; None where one is not utf-8."""
        if self._options.normalize:
            try:
                return clean_documents(documents)
            except UnicodeDecodeError:
                return None
        is_valid = is_utf8(documents.text, int(documents.starts[0]), int(documents.stops[-1]))
        return documents if is_valid else None

    def _use_each(self, source: Source, records: Iterable[Record | Bad], piece_of: int | None = None) -> Documents:
        usable = []
        for record in records:
            self.bytes_read += len(record.data if isinstance(record, Bad) else record.text)
            text = self._use(source, record)
            if text is not None and isinstance(record, Record):
                usable.append(record._replace(text=text))
        return self._chunk(usable, piece_of)

    def _use(self, source: Source, record: Record | Bad) -> bytes | None:
        """The text of a document as it is tokenised; None where it is dropped and counted."""
        try:
            if isinstance(record, Bad):
                raise record
            needs_str = self._filter is not None or self._options.on_error == "replace" or source.is_page
            if is_long(len(record.text)) and not needs_str:
                return self._use_long(source, record)
            text = self._decode(source, record)
            text = page_text(text) if source.is_page else text
        except Bad as bad:
            self._set_aside(source, bad)
            return None
        if self._options.normalize:
            text = clean(text)
        if len(text) < max(self._options.min_chars, 1):
            self.dropped["empty" if not text.strip() else "too short"] += 1
            return None
        if self._filter is not None and not self._passes(source, record.offset, text):
            self.dropped["filter"] += 1
            return None
        return text.encode()

    def _use_long(self, source: Source, record: Record) -> bytes | None:
        """The same of a long document, which never becomes one ``str``."""
        if not is_utf8(record.text, 0, len(record.text)):
            self._decode(source, record)  # raises Bad with the place
        text = clean_long(record.text) if self._options.normalize else record.text
        if num_characters(text) < max(self._options.min_chars, 1):
            self.dropped["too short" if text.decode().strip() else "empty"] += 1
            return None
        return text

    def _passes(self, source: Source, offset: int, text: str) -> bool:
        assert self._filter is not None
        alive()
        try:
            return bool(self._filter(text))
        except (Exception, SystemExit) as error:
            where = f"{source.path!r} from {offset}"
            raise SourceError(
                f"--filter {self._options.filter} raised {type(error).__name__} on the document of {where}: {error}",
                source=source.path, offset=offset,
            ) from error  # fmt: skip

    def _decode(self, source: Source, record: Record) -> str:
        try:
            return record.text.decode()
        except UnicodeDecodeError as error:
            if self._options.on_error == "replace":
                self.dropped[REPLACED] += 1
                return record.text.decode(errors="replace")
            bytes_ = record.text[error.start : error.start + 8]
            place = record.offset + error.start if source.format == "text" else record.offset
            raise Bad(place, f"invalid utf-8 ({bytes_.hex(' ')})", record.text) from None

    def _count(self, *, read: int = 0, skipped: int = 0, first: str = "") -> None:
        skips = self.skips
        self.skips = Skips(skips.count + skipped, skips.read + read, skips.first or first)

    def _set_aside(self, source: Source, bad: Bad) -> None:
        if self._options.on_error == "stop":
            raise unreadable(source, bad, self._options)
        number = 1 if source.problem is None else num_records(source, self._options)
        self._count(
            read=number - 1, skipped=number, first=f"{source.path!r}, {source.place[0]} {bad.offset}: {bad.reason}"
        )
        self.dropped[f"unreadable: {bad.reason.split(';')[0].split('(')[0].split(':')[0].strip()}"] += 1
        start = base64.b64encode(bad.data[:1024]).decode()
        line = {"source": source.path, "offset": bad.offset, "reason": bad.reason, "start": start}
        self._quarantine(json.dumps(line).encode() + b"\n")


def num_records(source: Source, options: ReadOptions) -> int:
    """About how many records a file has that is left out whole."""
    if source.format != "parquet":
        return count_lines(lambda: open_source(source, options))
    with contextlib.suppress(Exception):  # whatever is wrong with the file
        from pyarrow import parquet

        return max(1, int(parquet.read_metadata(source.location).num_rows))
    return 1


def unreadable(source: Source, bad: Bad, options: ReadOptions) -> SourceError:
    """A document that cannot be used, as the error that stops the run."""
    unit, name = source.place
    may_be_other = bad.reason.startswith("invalid utf-8") and source.format != "parquet"
    hint = "; if the file is not UTF-8, name its encoding, such as --encoding latin-1" if may_be_other else ""
    return SourceError(
        f"{source.path!r}, {unit} {bad.offset}: {bad.reason}; fix {_line(source, bad.offset, options)}, or go on with "
        f"--on-error skip{hint}",
        source=source.path, **{name: bad.offset},
    )  # fmt: skip


def _line(source: Source, offset: int, options: ReadOptions) -> str:
    """The number of the line with this byte; counted only when it is needed."""
    if source.format == "parquet":
        return "it"
    line, left = 1, offset
    with open_source(source, options) as file:
        while block := file.read(min(1 << 20, left)):
            line, left = line + block.count(b"\n"), left - len(block)
    return f"line {line}"


def _groups(records: Iterator[Record | Bad]) -> Iterator[list[Record | Bad]]:
    """Records by about a chunk; a long one is a group of its own."""
    group: list[Record | Bad] = []
    size = 0
    for record in records:
        num_bytes = len(record.data if isinstance(record, Bad) else record.text)
        if group and is_long(num_bytes):
            yield group
            group, size = [], 0
        group.append(record)
        size += 64 + num_bytes
        if size >= CHUNK_BYTES or is_long(num_bytes):
            yield group
            group, size = [], 0
    if group:
        yield group
