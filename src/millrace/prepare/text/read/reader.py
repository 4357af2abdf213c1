"""Documents as they are stored: read, cleaned, filtered; what cannot be used is counted, set aside, or stops the run."""

from __future__ import annotations

import base64
import contextlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from millrace.errors import SourceError
from millrace.native import core
from millrace.prepare.engines import alive
from millrace.prepare.files import check_unchanged
from millrace.prepare.functions import load_function
from millrace.prepare.text.clean.characters import clean, clean_all, clean_many, is_utf8
from millrace.prepare.text.clean.cut_documents import Piece
from millrace.prepare.text.clean.long_documents import check_utf8, clean_long, is_long, num_characters
from millrace.prepare.text.clean.masks import Masked
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.framing import Bad, Stretch, read_documents, read_stretches
from millrace.prepare.text.read.html import page_text
from millrace.prepare.text.read.sources import Part, Source, Unit
from millrace.prepare.text.read.streams import open_source
from millrace.prepare.text.read.turns import alone, is_heavy
from millrace.ragged import Array
from millrace.text.lump import Lump, lengths_of, take

REPLACED = "documents with invalid characters replaced"  # counted among those that go, though they stay
LARGE = 64  # documents that lie together and are not worth to be put with others
CHUNK_BYTES = 1 << 19  # documents are cleaned and tokenised this many bytes at a time
Offsets = MutableSequence[int]  # an array where there are many: integers are made and taken apart again for nothing
Texts = tuple[Offsets, Sequence[bytes]]  # where documents stand, and what they say


class Reader:
    """The documents of parts; ``quarantine`` is told of each that is set aside, as a line of JSON.

    What needs much memory is read by one reader of a ``folder`` at a time.
    """

    def __init__(
        self, options: ReadOptions, quarantine: Callable[[bytes], None], folder: str | Path | None = None
    ) -> None:
        self._options, self._quarantine, self._folder = options, quarantine, folder
        self._filter = load_function(options.filter, "--filter")
        self._looks_at_each = self._filter is not None or options.min_chars > 1
        self.bytes_read = 0
        self.without: list[int] = []  # sources in whose ranges no document begins, or none but empty ones
        self.dropped: Counter[str] = Counter()

    def chunks(self, part: Part, sources: Sequence[Source]) -> Iterator[tuple[int, Offsets, Sequence[bytes]]]:
        """(number of the source, offsets, texts) of about a megabyte at a time."""
        for unit, source in zip(part.units, sources, strict=True):
            check_unchanged(source)
            before, is_empty = self._num_unlike_empty(), True
            heavy = self._folder is not None and is_heavy(source, unit)
            with alone(Path(self._folder or "", "alone")) if heavy else contextlib.nullcontext():
                told = self.bytes_read
                for offsets, texts in self._gathered(self._read(source, unit)):
                    is_empty = False
                    yield unit.source, offsets, texts
                    alive(bytes=self.bytes_read - told)
                    told = self.bytes_read
            if is_empty and self._num_unlike_empty() == before:
                self.without.append(unit.source)
            check_unchanged(source)

    def _num_unlike_empty(self) -> int:
        """Documents that went and held something."""
        return self.dropped.total() - self.dropped["empty"]

    def _read(self, source: Source, unit: Unit) -> Iterator[Texts]:
        """The usable documents of a unit, some at a time."""
        try:
            if source.is_framed:
                for stretch in read_stretches(source, unit, self._options):
                    yield self._usable_stretch(source, stretch)
            else:
                for chunk in _chunks(read_documents(source, unit, self._options)):
                    yield self._usable_ones(source, chunk)
        except OSError as error:  # else it would pass for a failure to write
            raise SourceError(
                f"{source.path!r} cannot be read: {error.strerror or error}; fix that, then run again",
                source=source.path,
            ) from error

    def _gathered(self, some: Iterable[Texts]) -> Iterator[Texts]:
        """The same, about a chunk at a time: every call of a tokenizer and of write has its price."""
        offsets: Offsets = array("q")
        texts: list[bytes] = []
        before = last = self.bytes_read
        document = None  # of which these are pieces: they are given apart from all others
        for more_offsets, more_texts in some:
            is_large = isinstance(more_texts, Lump) and len(more_texts) >= LARGE
            if texts and more_texts and (is_large or _document(more_offsets) != document):
                yield offsets, texts
                texts, before = [], last
            if is_large:
                yield more_offsets, more_texts
                document, before = None, self.bytes_read
                continue
            document, last = _document(more_offsets) if more_texts else document, self.bytes_read
            if not texts:
                offsets = array("q") if document is None else []
            offsets.extend(more_offsets)
            texts += more_texts
            if self.bytes_read - before + 64 * len(texts) >= CHUNK_BYTES:
                yield offsets, texts
                offsets, texts, before = array("q"), [], self.bytes_read
        if texts:
            yield offsets, texts

    def _usable_stretch(self, source: Source, stretch: Stretch) -> Texts:
        """Of documents that lie together, looked at together where all are valid and nothing asks for them one by one."""
        offsets = stretch.offsets()
        texts = None if self._looks_at_each or len(offsets) == 1 else self._together(stretch)
        if texts is None:
            return self._usable_ones(source, list(zip(offsets, stretch.documents(), strict=True)))
        self.bytes_read += int((stretch.ends - stretch.starts).sum())
        return self._not_empty(offsets, texts)

    def _not_empty(self, offsets: Offsets, texts: Sequence[bytes]) -> Texts:
        kept = np.flatnonzero(lengths_of(texts))
        if len(kept) == len(texts):
            return offsets, texts
        self.dropped["empty"] += len(texts) - len(kept)
        return those_of(offsets, kept), take(texts, kept)

    def _together(self, stretch: Stretch) -> Sequence[bytes] | None:
        """The documents as they are tokenised; None where one is not utf-8: then it is looked for."""
        if self._options.normalize:
            try:
                return clean_many(stretch.data, stretch.starts, stretch.ends)
            except UnicodeDecodeError:
                return None
        if not is_utf8(stretch.data, int(stretch.starts[0]), int(stretch.ends[-1])):
            return None
        return Lump(stretch.data, stretch.starts, stretch.ends) if core else stretch.documents()

    def _all_of(self, documents: Sequence[bytes | Bad]) -> Sequence[bytes] | None:
        """The same of documents that lie anywhere; None also where one must be looked at for itself."""
        if self._looks_at_each or any(type(document) is not bytes or is_long(document) for document in documents):
            return None
        found = cast(Sequence[bytes], documents)
        if not self._options.normalize:
            joined = b"\n".join(found)
            return found if is_utf8(joined, 0, len(joined)) else None
        try:
            return clean_all(found)
        except UnicodeDecodeError:
            return None

    def _usable_ones(self, source: Source, chunk: Sequence[tuple[int, bytes | Bad]]) -> Texts:
        together = None if source.is_page else self._all_of([document for _, document in chunk])
        if together is not None:
            self.bytes_read += sum(len(document) for _, document in chunk if isinstance(document, bytes))
            return self._not_empty([offset for offset, _ in chunk], together)
        offsets, texts = [], []
        for offset, document in chunk:
            self.bytes_read += len(document.data if isinstance(document, Bad) else document)
            text = self._usable(source, offset, document)
            if text is not None:
                offsets.append(offset)
                texts.append(text)
        return offsets, texts

    def _usable(self, source: Source, offset: int, document: bytes | Bad) -> bytes | None:
        """The document as it is tokenised, or None where it is dropped and counted."""
        try:
            if isinstance(document, Bad):
                raise document
            looks_at_str = self._filter is not None or self._options.on_error == "replace" or source.is_page
            if is_long(document) and not looks_at_str:
                return self._usable_long(source, offset, document)
            text = self._decoded(source, offset, document)
            text = page_text(text) if source.is_page else text
        except Bad as bad:
            self._set_aside(source, bad)
            return None
        if self._options.normalize:
            text = clean(text)
        if len(text) < max(self._options.min_chars, 1):
            self.dropped["empty" if not text.strip() else "too short"] += 1
            return None
        if self._filter is not None and not self._stays(source, offset, text):
            self.dropped["filter"] += 1
            return None
        return document if isinstance(document, Masked) else text.encode()

    def _usable_long(self, source: Source, offset: int, document: bytes) -> bytes | None:
        """The same of a long document, which never becomes one ``str``."""
        try:
            text = clean_long(document) if self._options.normalize else document
            check_utf8(document)
        except UnicodeDecodeError:
            self._decoded(source, offset, document)  # says where
            raise
        if num_characters(text) < max(self._options.min_chars, 1):
            self.dropped["too short" if text.decode().strip() else "empty"] += 1
            return None
        return text

    def _stays(self, source: Source, offset: int, text: str) -> bool:
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

    def _decoded(self, source: Source, offset: int, document: bytes) -> str:
        try:
            return document.decode()
        except UnicodeDecodeError as error:
            if self._options.on_error == "replace":
                self.dropped[REPLACED] += 1
                return document.decode(errors="replace")
            bad = document[error.start : error.start + 8]
            place = offset + error.start if source.format == "text" else offset  # of the record
            raise Bad(place, f"invalid utf-8 ({bad.hex(' ')})", document) from None

    def _set_aside(self, source: Source, bad: Bad) -> None:
        if self._options.on_error == "stop":
            raise unreadable(source, bad, self._options)
        self.dropped[f"unreadable: {bad.reason.split(';')[0].split('(')[0].split(':')[0].strip()}"] += 1
        line = {
            "source": source.path,
            "offset": bad.offset,
            "reason": bad.reason,
            "start": base64.b64encode(bad.data[:1024]).decode(),
        }
        self._quarantine(json.dumps(line).encode() + b"\n")


def unreadable(source: Source, bad: Bad, options: ReadOptions) -> SourceError:
    """What is wrong with a document, where that stops the run."""
    unit, name = source.place
    is_other = bad.reason.startswith("invalid utf-8") and source.format != "parquet"
    hint = "; if the file is not UTF-8, name its encoding, such as --encoding latin-1" if is_other else ""
    return SourceError(
        f"{source.path!r}, {unit} {bad.offset}: {bad.reason}; fix {_line(source, bad.offset, options)}, or go on with "
        f"--on-error skip{hint}",
        source=source.path, **{name: bad.offset},
    )  # fmt: skip


def _line(source: Source, offset: int, options: ReadOptions) -> str:
    """The line of a byte, as editors count: nobody knew it until something was wrong there."""
    if source.format == "parquet":
        return "it"
    line, left = 1, offset
    with open_source(source, options) as file:
        while block := file.read(min(1 << 20, left)):
            line, left = line + block.count(b"\n"), left - len(block)
    return f"line {line}"


def those_of(offsets: Offsets, kept: Array) -> Offsets:
    """Those of these numbers."""
    if isinstance(offsets, array):
        return array("q", np.frombuffer(offsets, np.int64)[kept].tobytes())
    return [offsets[k] for k in kept.tolist()]


def _document(offsets: Offsets) -> int | None:
    """Where the document of which these are pieces begins; pieces of different ones never come together."""
    return offsets[0].document if isinstance(offsets[0], Piece) else None


def _chunks(documents: Iterator[tuple[int, bytes | Bad]]) -> Iterator[list[tuple[int, bytes | Bad]]]:
    chunk: list[tuple[int, bytes | Bad]] = []
    size = 0
    for entry in documents:
        chunk.append(entry)
        document = entry[1]
        size += 64 + (len(document) if isinstance(document, bytes) else len(document.data))
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
