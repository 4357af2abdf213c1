"""Makes one part of a corpus, in a worker: reads, cleans, hashes and tokenises documents into a folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import SourceError
from millrace.prepare.engines import alive
from millrace.prepare.parts import write_part
from millrace.prepare.quarantine import QUARANTINE, Skips
from millrace.prepare.spill import Spill, map_array
from millrace.prepare.text.clean.cut_documents import CutDocument
from millrace.prepare.text.clean.masks import end_counts, hash_masked, token_mask
from millrace.prepare.text.dedup.lines import HASH_BYTES, RepeatedLines
from millrace.prepare.text.dedup.repeats import KnownHashes
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.reader import DocumentReader
from millrace.prepare.text.read.sources import Part, SliceId, Source, slice_id
from millrace.prepare.text.tokens.worker_tokenizer import tokenizer_of
from millrace.ragged import Int64s
from millrace.text.breaks import Uncuttable, is_long
from millrace.text.documents import Documents, hash_documents, measure
from millrace.text.tokenizer import UnknownCharacter


class PartTask(msgspec.Struct, frozen=True):
    """What a worker needs to make a part; it reads the tokenizer from the folder."""

    part: Part
    sources: tuple[Source, ...]  # of this part's slices, in their order
    options: ReadOptions
    folder: str
    tokenizer: dict[str, Any]
    key: str  # the name of its folder: a hash of what it is made of, without its number
    encoder: str = ""  # the run has compared encoders on its documents, and chose this one
    lines: tuple[str, int, int] | None = None  # the file of repeated lines, and the range of this part's

    def __str__(self) -> str:
        first = self.part.slices[0]
        return f"part {self.part.number} ({self.sources[0].path!r} from {first.start}, {len(self.part.slices)} ranges)"


class PartDone(msgspec.Struct, frozen=True):
    """What a finished part holds."""

    number: int  # number and first source are those of this run; another run may have made the part
    first_source: int
    key: str
    documents: int
    tokens: int
    characters: int
    bytes_read: int
    dropped: dict[str, int]
    sizes: dict[str, int]
    pieces: int = 0  # documents that go on with the one before
    without: tuple[int, ...] = ()  # sources, counted from its first, without a document, or with empty ones alone
    hashes: dict[str, str] = {}  # of its files
    slices: tuple[SliceId, ...] = ()  # by these it is found again when other sources changed
    skips: Skips = Skips()


def prepare_part(task: PartTask) -> PartDone:
    """Makes one part, unless it is there."""
    return write_part(task.folder, task.key, PartDone, lambda folder: PartMaker(task, folder).run())


class PartMaker:
    """Makes one part in ``folder``: a file for each column of its documents, and one for their tokens."""

    def __init__(self, task: PartTask, folder: Path) -> None:
        self._task, self._options, self._folder = task, task.options, folder
        self._tokenizer = tokenizer_of(task.folder, task.tokenizer, task.encoder)
        self._spills: dict[str, Spill] = {}
        self._reader = DocumentReader(task.options, lambda line: self._spill(QUARANTINE).write_bytes(line), task.folder)
        self._dropped = self._reader.dropped
        self._num_documents = self._num_tokens = self._num_characters = self._num_pieces = 0
        self._cut: CutDocument | None = None  # the document whose pieces are being stored
        self._known = KnownHashes()
        self._lines = self._repeated_lines()
        self._line_hashes: list[bytes] = []  # of the documents that are being stored

    def _spill(self, name: str) -> Spill:
        if name not in self._spills:
            self._spills[name] = Spill(self._folder / name)
        return self._spills[name]

    def _repeated_lines(self) -> RepeatedLines | None:
        if self._task.lines is None:
            return None
        name, first, last = self._task.lines
        repeats = map_array(Path(self._task.folder) / name, bool)[first:last]
        return RepeatedLines(repeats, is_clean=self._options.normalize, dropped=self._dropped)

    def run(self) -> PartDone:
        with contextlib.closing(self):
            for name in self._options.part_files:
                self._spill(name)
            for number, documents in self._reader.chunks(self._task.part, self._task.sources):
                self._add(number, documents)
            self._finish_cut()
            if self._lines is not None:
                self._lines.finish()
            sizes = {name: spill.finish() for name, spill in self._spills.items()}
            hashes = {name: spill.hash for name, spill in self._spills.items()}
            dropped = {reason: count for reason, count in sorted(self._dropped.items()) if count}
            part, sources = self._task.part, self._task.sources
            without = tuple(number - part.first_source for number in self._reader.without)
            slices = tuple(slice_id(source, piece) for piece, source in zip(part.slices, sources, strict=True))
            return PartDone(
                part.number, part.first_source, self._task.key, self._num_documents, self._num_tokens,
                self._num_characters, self._reader.bytes_read, dropped, sizes, self._num_pieces, without, hashes, slices,
                self._reader.skips,
            )  # fmt: skip

    def close(self) -> None:
        for spill in self._spills.values():
            spill.close()

    def _add(self, number: int, documents: Documents) -> None:
        if self._lines is not None:
            documents, self._line_hashes = self._lines.remove(documents)
        if not len(documents):
            return
        if documents.piece_of is not None:
            hashes = self._cut_document(number, documents.piece_of).add(documents)
        else:
            self._finish_cut()
            hashes = hash_documents(documents) if documents.masks is None else hash_masked(documents)
            if self._options.dedups_documents:
                documents, hashes = self._drop_repeats(documents, hashes)
        if len(documents) == 1 and is_long(documents.num_bytes):
            self._store_long(number, documents, hashes)
        elif len(documents):
            self._store(number, documents, hashes)

    def _cut_document(self, number: int, begin: int) -> CutDocument:
        """The document that begins there; pieces of it are stored next."""
        if self._cut is None or self._cut.key != (number, begin):
            self._finish_cut()
            self._cut = CutDocument((number, begin), self._num_documents)
        return self._cut

    def _finish_cut(self) -> None:
        if self._cut is not None:
            signatures = self._spill("signatures.bin") if self._options.dedup == "near" else None
            columns = self._spill("hash.bin"), self._spill("goes_on.bin")
            self._num_pieces += self._cut.finish(self._num_documents, *columns, signatures)
            self._cut = None

    def _drop_repeats(self, documents: Documents, hashes: bytes) -> tuple[Documents, bytes]:
        """Drops documents that this part has already: the first one in source order stays."""
        are_new = self._known.are_new(hashes)
        if 0 not in are_new:
            return documents, hashes
        numbers = np.flatnonzero(np.frombuffer(are_new, np.uint8))
        new = documents.take(numbers)
        self._dropped["duplicate"] += len(documents) - len(new)
        self._dropped["duplicate bytes"] += documents.num_bytes - new.num_bytes
        return new, np.frombuffer(hashes, f"V{HASH_BYTES}")[numbers].tobytes()

    def _store(self, number: int, documents: Documents, hashes: bytes) -> None:
        try:
            tokens, lengths = self._tokenizer.encode_spaced(documents)
        except UnknownCharacter as error:
            which = next(k for k, text in enumerate(documents) if error.character.encode() in text)
            raise self._refusal(number, documents.offsets[which], f"cannot be encoded: {error}") from error
        self._spill("tokens.bin").write(tokens)
        self._store_columns(number, documents, hashes, lengths)
        alive(documents=len(documents), tokens=len(tokens))
        if documents.masks is None:
            return
        stop = 0
        for k, (text, length) in enumerate(zip(documents, lengths.tolist(), strict=True)):
            start, stop = stop, stop + length
            spans = documents.masks.of(k)
            places = self._tokenizer.places(text, tokens[start : stop - 1])
            self._spill("mask.bin").write(token_mask(spans, *places))
            self._spill("mask.bin").write_bytes(bytes([end_counts(spans, len(text))]))

    def _store_long(self, number: int, documents: Documents, hashes: bytes) -> None:
        """Stores one document by sections: neither all its ids nor all its mask are ever in memory."""
        text, offset, num_tokens = documents[0], documents.offsets[0], 1
        spans = None if documents.masks is None else documents.masks.of(0)
        try:
            for start, stop, ids in self._tokenizer.encode_sections(text):
                self._spill("tokens.bin").write(ids.astype(self._tokenizer.spaced_dtype))
                num_tokens += len(ids)
                if spans is not None:
                    places = self._tokenizer.places(text[start:stop], ids)
                    self._spill("mask.bin").write(token_mask(spans - start, *places))
                alive(tokens=len(ids))
        except Uncuttable as error:
            problem = f"is too long for this tokenizer: from its byte {error.offset} on {error}"
            raise self._refusal(number, offset, problem) from error
        except UnknownCharacter as error:
            raise self._refusal(number, offset, f"cannot be encoded: {error}") from error
        self._spill("tokens.bin").write(self._tokenizer.encode_spaced([b""])[0])  # the end
        if spans is not None:
            self._spill("mask.bin").write_bytes(bytes([end_counts(spans, len(text))]))
        self._store_columns(number, documents, hashes, np.array([num_tokens], np.int64))
        alive(documents=1)

    def _store_columns(self, number: int, documents: Documents, hashes: bytes, lengths: Int64s) -> None:
        """Stores everything but tokens and masks."""
        num_bytes, characters = measure(documents)
        self._spill("hash.bin").write_bytes(hashes)
        self._spill("source.bin").write(np.full(len(documents), number - self._task.part.first_source, "<i4"))
        self._spill("offset.bin").write(documents.offsets.astype("<i8", copy=False))
        self._spill("length.bin").write(lengths)
        if self._options.dedups_documents:
            self._spill("size.bin").write(np.column_stack((num_bytes, characters)))
        if self._options.cuts_documents:
            self._spill("goes_on.bin").write(np.zeros(len(documents), bool))
        self._num_documents += len(documents)
        self._num_tokens += int(lengths.sum())
        self._num_characters += int(characters.sum())
        if self._options.dedup == "near":
            from millrace.prepare.text.dedup.near import bands, signatures

            table = signatures(documents)
            if self._cut is not None:
                self._cut.add_signatures(table)
            self._spill("signatures.bin").write(bands(table))
        if self._lines is not None:
            self._spill("lines.bin").write_bytes(b"".join(self._line_hashes))
            counts = np.array([len(hashes) // HASH_BYTES for hashes in self._line_hashes], "<i8")
            self._spill("line_counts.bin").write(counts)

    def _refusal(self, number: int, offset: int, problem: str) -> SourceError:
        """The error for a document that the tokenizer does not take."""
        slices = zip(self._task.part.slices, self._task.sources, strict=True)
        source = next(source for piece, source in slices if piece.source == number)
        unit, name = source.place
        return SourceError(
            f"{source.path!r}: the document at {unit} {offset} {problem}", source=source.path, **{name: int(offset)}
        )
