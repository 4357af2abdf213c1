"""One part of a corpus, in a worker: documents read, cleaned, hashed and tokenised into a folder of its own (``parts.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from millrace.errors import SourceError
from millrace.native import core
from millrace.prepare.engines import alive
from millrace.prepare.parts import make_part, part_folder
from millrace.prepare.spill import Spill, file_hash, mapped
from millrace.prepare.text.clean.cut_documents import CutDocument, Piece
from millrace.prepare.text.clean.long_documents import is_long, num_characters
from millrace.prepare.text.clean.masks import Masked, ends_counting, token_mask
from millrace.prepare.text.dedup.lines import HASH_BYTES, RepeatedLines
from millrace.prepare.text.dedup.part_repeats import Seen
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.part_files import file_of
from millrace.prepare.text.read.reader import Offsets, Reader, those_of
from millrace.prepare.text.read.sources import Part, Source, UnitId, unit_id
from millrace.prepare.text.tokens.worker_tokenizer import tokenizer_of
from millrace.ragged import Array, Int64s
from millrace.text.breaks import Uncuttable
from millrace.text.lump import for_core, num_bytes, take
from millrace.text.tokenizer import UnknownCharacter, measured

QUARANTINE = "quarantine.jsonl"  # of a part, and of the store


class PartTask(msgspec.Struct, frozen=True):
    """What a worker is told; it reads the tokenizer from the folder."""

    part: Part
    sources: tuple[Source, ...]  # of this part's units, in their order
    options: ReadOptions
    folder: str
    tokenizer: dict[str, Any]
    key: str  # the name of its folder: what it is made of, whatever its number
    engine: str = ""  # on which the run decided, by comparing them on its documents
    lines: tuple[str, int, int] | None = None  # the file of repeated lines, and where this part's stand in it

    def __str__(self) -> str:
        first = self.part.units[0]
        return f"part {self.part.number} ({self.sources[0].path!r} from {first.start}, {len(self.part.units)} ranges)"


class PartDone(msgspec.Struct, frozen=True):
    """What a finished part holds."""

    number: int  # and the first source: in the plan of this run, which may not be the one that made it
    first_source: int
    key: str
    documents: int
    tokens: int
    characters: int
    bytes_read: int
    dropped: dict[str, int]
    sizes: dict[str, int]
    pieces: int = 0  # of its documents, those that go on with the one before
    without: tuple[int, ...] = ()  # sources, from its first, in whose ranges no document begins, or none but empty ones
    hashes: dict[str, str] = {}  # of its files
    units: tuple[UnitId, ...] = ()  # by which it is found again though sources around it changed


def prepare_part(task: PartTask) -> PartDone:
    """Makes one part, unless it is there already."""

    def make(folder: Path) -> PartDone:
        with contextlib.closing(_Maker(task, folder)) as maker:
            return maker.run()

    return make_part(task.folder, task.key, PartDone, make)


def is_intact(folder: str | Path, done: PartDone) -> bool:
    """Whether the files of a part hold what was written; those that were given back are empty."""
    place = part_folder(folder, done.key)
    paths = [(place / name, expected) for name, expected in done.hashes.items()]
    return all(not path.stat().st_size or file_hash(path) == expected for path, expected in paths)


def placed(done: PartDone, part: Part) -> PartDone:
    """A part that is done, as it stands in the plan of this run."""
    return msgspec.structs.replace(done, number=part.number, first_source=part.first_source)


class _Maker:
    def __init__(self, task: PartTask, folder: Path) -> None:
        self._task, self._options, self._folder = task, task.options, folder
        self._tokenizer = tokenizer_of(task.folder, task.tokenizer, task.engine)
        self._spills: dict[str, Spill] = {}
        self._reader = Reader(task.options, lambda line: self._spill(QUARANTINE).write_bytes(line), task.folder)
        self._dropped = self._reader.dropped
        self._num_documents = self._num_tokens = self._num_characters = self._num_pieces = 0
        self._cut: CutDocument | None = None  # of which pieces were stored last
        self._seen = Seen()
        self._lines = self._repeated_lines()
        self._hashed_lines: list[bytes] = []  # of the documents in hand

    def _spill(self, name: str) -> Spill:
        if name not in self._spills:
            self._spills[name] = Spill(self._folder / name)
        return self._spills[name]

    def _repeated_lines(self) -> RepeatedLines | None:
        if self._task.lines is None:
            return None
        name, first, last = self._task.lines
        repeats = mapped(Path(self._task.folder) / name, bool)[first:last]
        return RepeatedLines(repeats, is_clean=self._options.normalize, dropped=self._dropped)

    def run(self) -> PartDone:
        for name in self._options.part_files:
            self._spill(name)
        for number, offsets, texts in self._reader.chunks(self._task.part, self._task.sources):
            self._add(number, offsets, texts)
        self._finish_cut()
        if self._lines is not None:
            self._lines.finish()
        sizes = {name: spill.finish() for name, spill in self._spills.items()}
        hashes = {name: spill.hash for name, spill in self._spills.items()}
        dropped = {reason: count for reason, count in sorted(self._dropped.items()) if count}
        part, sources = self._task.part, self._task.sources
        without = tuple(number - part.first_source for number in self._reader.without)
        units = tuple(unit_id(source, unit) for unit, source in zip(part.units, sources, strict=True))
        return PartDone(
            part.number, part.first_source, self._task.key, self._num_documents, self._num_tokens,
            self._num_characters, self._reader.bytes_read, dropped, sizes, self._num_pieces, without, hashes, units,
        )  # fmt: skip

    def close(self) -> None:
        for spill in self._spills.values():
            spill.close()

    def _add(self, number: int, offsets: Offsets, texts: Sequence[bytes]) -> None:
        if self._lines is not None:
            offsets, texts, self._hashed_lines = self._lines.remove(offsets, list(texts))
        if not texts:
            return
        if isinstance(offsets[0], Piece):
            hashes = self._cut_document(number, offsets[0].document).add(texts)
        else:
            self._finish_cut()
            hashes = self._identities(texts)
            if self._options.dedups_documents:
                offsets, texts, hashes = self._without_repeats(offsets, texts, hashes)
        if (
            isinstance(texts, list) and texts and is_long(texts[-1])
        ):  # it filled the chunk, so that nothing came after it
            last = number, offsets.pop(), texts.pop(), hashes[-HASH_BYTES:], self._hashed_lines[-1:]
            self._hashed_lines = self._hashed_lines[:-1]
            if texts:
                self._store(number, offsets, texts, hashes[:-HASH_BYTES])
            self._store_long(*last)
        elif texts:
            self._store(number, offsets, texts, hashes)

    def _identities(self, texts: Sequence[bytes]) -> bytes:
        """Their hashes, one behind the other."""
        if self._options.mask_field is not None:
            return b"".join([text.identity() for text in texts if isinstance(text, Masked)])
        if core:
            found: bytes = core.hashed(for_core(texts))
            return found
        return b"".join(map(xxhash.xxh3_128_digest, texts))

    def _cut_document(self, number: int, begin: int) -> CutDocument:
        """The document that begins there, of which pieces are about to be stored."""
        if self._cut is None or self._cut.key != (number, begin):
            self._finish_cut()
            self._cut = CutDocument((number, begin), self._num_documents)
        return self._cut

    def _finish_cut(self) -> None:
        if self._cut is not None:
            signatures = self._spill("signatures.bin") if self._options.dedup == "near" else None
            columns = self._spill(file_of("hash")), self._spill(file_of("goes_on"))
            self._num_pieces += self._cut.finish(self._num_documents, *columns, signatures)
            self._cut = None

    def _without_repeats(
        self, offsets: Offsets, texts: Sequence[bytes], hashes: bytes
    ) -> tuple[Offsets, Sequence[bytes], bytes]:
        """Drops what this part has seen: its first occurrence comes before in source order, whoever has the very first."""
        are_new = self._seen.are_new(hashes)
        if 0 not in are_new:
            return offsets, texts, hashes
        kept = np.flatnonzero(np.frombuffer(are_new, np.uint8))
        self._dropped["duplicate"] += len(texts) - len(kept)
        self._dropped["duplicate bytes"] += num_bytes(texts)
        texts = take(texts, kept)
        self._dropped["duplicate bytes"] -= num_bytes(texts)
        digests = np.frombuffer(hashes, f"V{HASH_BYTES}")[kept].tobytes()
        return those_of(offsets, kept), texts, digests

    def _store(self, number: int, offsets: Offsets, texts: Sequence[bytes], hashes: bytes) -> None:
        try:
            tokens, lengths = self._tokenizer.encode_spaced(texts)
        except UnknownCharacter as error:
            which = next(k for k, text in enumerate(texts) if error.character.encode() in text)
            raise self._refused(number, offsets[which], f"cannot be encoded: {error}") from error
        self._spill("tokens.bin").write(tokens)
        self._keep(number, np.asarray(offsets, "<i8"), hashes, lengths, *measured(texts))
        alive(documents=len(texts), tokens=len(tokens))
        self._store_extras(texts, tokens, lengths)

    def _keep(
        self, number: int, offsets: Int64s, hashes: bytes, lengths: Int64s, num_bytes: Int64s, characters: Int64s
    ) -> None:
        """What is kept of documents beside their tokens."""
        self._spill(file_of("hash")).write_bytes(hashes)
        self._spill(file_of("source")).write(np.full(len(offsets), number - self._task.part.first_source, "<i4"))
        self._spill(file_of("offset")).write(offsets)
        self._spill(file_of("length")).write(lengths)
        if self._options.dedups_documents:
            self._spill(file_of("size")).write(np.column_stack((num_bytes, characters)))
        if self._options.cuts_documents:
            self._spill(file_of("goes_on")).write(np.zeros(len(offsets), bool))
        self._num_documents += len(offsets)
        self._num_tokens += int(lengths.sum())
        self._num_characters += int(characters.sum())

    def _store_long(self, number: int, offset: int, text: bytes, found: bytes, hashed_lines: list[bytes]) -> None:
        """One document by its pieces: neither its ids nor its mask are ever in memory together."""
        dtype, num_tokens = self._tokenizer.spaced_dtype, 1
        try:
            for start, stop, ids in self._tokenizer.encode_pieces(text):
                self._spill("tokens.bin").write(ids.astype(dtype))
                num_tokens += len(ids)
                if isinstance(text, Masked):
                    places = self._tokenizer.places(text[start:stop], ids)
                    self._spill("mask.bin").write(token_mask(text.spans - start, *places))
                alive(tokens=len(ids))
        except Uncuttable as error:
            problem = f"is too long for this tokenizer: from its byte {error.offset} on {error}"
            raise self._refused(number, offset, problem) from error
        except UnknownCharacter as error:
            raise self._refused(number, offset, f"cannot be encoded: {error}") from error
        self._spill("tokens.bin").write(self._tokenizer.encode_spaced([b""])[0])  # the end
        if isinstance(text, Masked):
            self._spill("mask.bin").write_bytes(bytes([ends_counting(text)]))
        counts = (num_tokens, len(text), num_characters(text))
        self._keep(number, np.array([offset], "<i8"), found, *(np.array([count], "<i8") for count in counts))
        alive(documents=1)
        self._hashed_lines = hashed_lines
        self._store_kept([text])

    def _refused(self, number: int, offset: int, problem: str) -> SourceError:
        """Of a document that the tokenizer does not take."""
        units = zip(self._task.part.units, self._task.sources, strict=True)
        source = next(source for unit, source in units if unit.source == number)
        unit, name = source.place
        return SourceError(
            f"{source.path!r}: the document at {unit} {offset} {problem}", source=source.path, **{name: offset}
        )

    def _store_extras(self, texts: Sequence[bytes], tokens: Array, lengths: Int64s) -> None:
        """What only some options ask for."""
        self._store_kept(texts)
        if self._options.mask_field is not None:
            stop = 0
            for text, length in zip(texts, lengths.tolist(), strict=True):
                assert isinstance(text, Masked)
                start, stop = stop, stop + length
                places = self._tokenizer.places(text, tokens[start : stop - 1])
                self._spill("mask.bin").write(token_mask(text.spans, *places))
                self._spill("mask.bin").write_bytes(bytes([ends_counting(text)]))

    def _store_kept(self, texts: Sequence[bytes]) -> None:
        """What is kept of documents to compare others with."""
        if self._options.dedup == "near":
            from millrace.prepare.text.dedup.near import bands, signatures

            found = signatures(texts)
            if self._cut is not None:
                self._cut.sign(found)
            self._spill("signatures.bin").write(bands(found))
        if self._lines is not None:
            self._spill("lines.bin").write_bytes(b"".join(self._hashed_lines))
            counts = np.array([len(hashes) // HASH_BYTES for hashes in self._hashed_lines], "<i8")
            self._spill("line_counts.bin").write(counts)
