"""One part of a corpus: documents read, cleaned, hashed and tokenised into a folder of its own.

Runs in a worker. The folder is renamed into place when it is whole; ``done.json`` in it says what it holds, and a
restart keeps it only if the sizes agree.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from millrace.errors import ConfigError, SourceError
from millrace.prepare.text.clean import clean, clean_many
from millrace.prepare.text.documents import Bad, Stretch, read_documents, read_stretches
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.sources import Part, Source, Unit, check_unchanged
from millrace.ragged import Array
from millrace.store import platform
from millrace.text.bpe import HuggingFaceTokenizer
from millrace.text.load import load_tokenizer
from millrace.text.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 20  # documents are cleaned and tokenised this many bytes at a time
MAX_SEEN = 1 << 20  # hashes of a part kept in memory (100 MB); later repeats are found when all parts are there
# Of every document that stays: the two halves of its hash, its source, its place there, and what it counts (tokens with the end).
DOCUMENT = np.dtype(
    [
        ("hash", "<u8", 2),
        ("source", "<i4"),
        ("offset", "<i8"),
        ("tokens", "<i8"),
        ("bytes", "<i8"),
        ("characters", "<i8"),
    ]
)

Texts = tuple[list[int], list[bytes]]  # where documents stand, and what they say


class PartTask(msgspec.Struct, frozen=True):
    """What a worker is told; it reads the tokenizer from the folder."""

    part: Part
    sources: tuple[Source, ...]  # of this part's units, in their order
    options: ReadOptions
    folder: str
    tokenizer: dict[str, Any]
    engine: str = ""  # on which the run decided, by comparing them on its documents

    def __str__(self) -> str:
        first = self.part.units[0]
        return f"part {self.part.number} ({self.sources[0].path!r} from {first.start}, {len(self.part.units)} ranges)"


class PartDone(msgspec.Struct, frozen=True):
    """What a finished part holds."""

    number: int
    documents: int
    tokens: int
    bytes_read: int
    dropped: dict[str, int]
    sizes: dict[str, int]


def part_folder(folder: str | Path, number: int) -> Path:
    return Path(folder) / "parts" / f"{number:06d}"


def read_done(folder: str | Path, number: int) -> PartDone | None:
    """The report of a part that is whole on disk."""
    path = part_folder(folder, number)
    try:
        done = msgspec.json.decode((path / "done.json").read_bytes(), type=PartDone)
        intact = all((path / name).stat().st_size == size for name, size in done.sizes.items())
    except (OSError, msgspec.DecodeError):
        return None
    return done if intact else None


def prepare_part(task: PartTask) -> PartDone:
    """Makes one part, unless it is there already."""
    known = read_done(task.folder, task.part.number)
    if known is not None:
        return known
    final = part_folder(task.folder, task.part.number)
    aside = final.with_name(final.name + ".tmp")
    with platform.writing(aside):
        platform.remove(aside)
        platform.remove(final)
        platform.make_dir(aside)
        with contextlib.closing(_Maker(task, aside)) as maker:
            done = maker.run()
        platform.write_file(aside / "done.json", msgspec.json.encode(done), mode=0o644)
        platform.sync_dir(aside)
        platform.rename(aside, final)
    return done


class _Maker:
    def __init__(self, task: PartTask, folder: Path) -> None:
        self._task, self._options = task, task.options
        self._tokenizer = tokenizer_of(task.folder, json.dumps(task.tokenizer), task.engine)
        self._filter = _function(task.options.filter)
        self._looks_at_each = self._filter is not None or task.options.min_chars > 1
        self._tokens = _Spill(folder / "tokens.bin")
        self._documents = _Spill(folder / "documents.bin")
        self._signatures = _Spill(folder / "signatures.bin") if task.options.dedup == "near" else None
        self._quarantine: list[bytes] = []
        self._num_documents = self._num_tokens = self._bytes = 0
        self._seen: set[bytes] = set()
        self._dropped: Counter[str] = Counter()
        self._folder = folder

    def run(self) -> PartDone:
        for unit, source in zip(self._task.part.units, self._task.sources, strict=True):
            check_unchanged(source)
            for offsets, texts in _gathered(self._read(source, unit)):
                self._add(unit.source, offsets, texts)
            check_unchanged(source)
        sizes = {"tokens.bin": self._tokens.finish(), "documents.bin": self._documents.finish()}
        if self._signatures is not None:
            sizes["signatures.bin"] = self._signatures.finish()
        if self._quarantine:
            sizes["quarantine.jsonl"] = _write(self._folder / "quarantine.jsonl", b"".join(self._quarantine))
        return PartDone(
            self._task.part.number, self._num_documents, self._num_tokens, self._bytes,
            dict(sorted(self._dropped.items())), sizes,
        )  # fmt: skip

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
                f"{source.path!r} cannot be read: {error.strerror or error}; mend that, then run again",
                source=source.path,
            ) from error

    def close(self) -> None:
        for spill in (self._tokens, self._documents, self._signatures):
            if spill is not None:
                spill.close()

    def _add(self, number: int, offsets: list[int], texts: list[bytes]) -> None:
        hashes = list(map(xxhash.xxh3_128_digest, texts))
        if self._options.dedup != "none":
            offsets, texts, hashes = self._without_repeats(offsets, texts, hashes)
        if texts:
            self._store(number, offsets, texts, hashes)

    def _usable_stretch(self, source: Source, stretch: Stretch) -> Texts:
        """Of documents that lie together, looked at together where all are valid and nothing asks for them one by one."""
        offsets = (stretch.base + stretch.starts).tolist()
        texts = None if self._looks_at_each or len(offsets) == 1 else self._together(stretch)
        if texts is None:
            return self._usable_ones(source, zip(offsets, stretch.documents(), strict=True))
        self._bytes += int((stretch.ends - stretch.starts).sum())
        if all(texts):
            return offsets, texts
        kept = [k for k, text in enumerate(texts) if text]
        self._dropped["empty"] += len(texts) - len(kept)
        return [offsets[k] for k in kept], [texts[k] for k in kept]

    def _together(self, stretch: Stretch) -> list[bytes] | None:
        """The documents as they are tokenised; None where one is not utf-8: then it is looked for."""
        try:
            if self._options.normalize:
                return clean_many(stretch.data, stretch.starts, stretch.ends)
            stretch.data[stretch.starts[0] : stretch.ends[-1]].decode()
        except UnicodeDecodeError:
            return None
        return stretch.documents()

    def _usable_ones(self, source: Source, chunk: Iterable[tuple[int, bytes | Bad]]) -> Texts:
        offsets, texts = [], []
        for offset, document in chunk:
            self._bytes += len(document.data if isinstance(document, Bad) else document)
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
            text = self._decoded(source, offset, document)
        except Bad as bad:
            self._set_aside(source, bad)
            return None
        if self._options.normalize:
            text = clean(text)
        if len(text) < max(self._options.min_chars, 1):
            self._dropped["empty" if not text.strip() else "too short"] += 1
            return None
        if self._filter is not None and not self._stays(source, offset, text):
            self._dropped["filter"] += 1
            return None
        return text.encode()

    def _stays(self, source: Source, offset: int, text: str) -> bool:
        assert self._filter is not None
        try:
            return bool(self._filter(text))
        except Exception as error:
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
                self._dropped["invalid characters replaced"] += 1
                return document.decode(errors="replace")
            bad = document[error.start : error.start + 8]
            place = offset if source.has_rows else offset + error.start
            raise Bad(place, f"invalid utf-8 ({bad.hex(' ')})", document) from None

    def _set_aside(self, source: Source, bad: Bad) -> None:
        if self._options.on_error == "stop":
            unit, name = ("row", "row") if source.has_rows else ("byte", "offset")
            raise SourceError(
                f"{source.path!r}, {unit} {bad.offset}: {bad.reason}; mend it, or go on with --on-error skip",
                source=source.path, **{name: bad.offset},
            )  # fmt: skip
        self._dropped[f"unreadable: {bad.reason.split(';')[0].split('(')[0].split(':')[0].strip()}"] += 1
        line = {
            "source": source.path,
            "offset": bad.offset,
            "reason": bad.reason,
            "start": base64.b64encode(bad.data[:1024]).decode(),
        }
        self._quarantine.append(json.dumps(line).encode() + b"\n")

    def _without_repeats(
        self, offsets: list[int], texts: list[bytes], hashes: list[bytes]
    ) -> tuple[list[int], list[bytes], list[bytes]]:
        """Drops what this part has seen: its first occurrence comes before in source order, whoever has the very first."""
        new = set(hashes)
        if len(new) == len(hashes) and len(new) + len(self._seen) <= MAX_SEEN and self._seen.isdisjoint(new):
            self._seen |= new
            return offsets, texts, hashes
        kept = []
        for place, found in enumerate(hashes):
            if found in self._seen:
                self._dropped["duplicate"] += 1
                self._dropped["duplicate bytes"] += len(texts[place])
            else:
                kept.append(place)
                if len(self._seen) < MAX_SEEN:
                    self._seen.add(found)
        return [offsets[k] for k in kept], [texts[k] for k in kept], [hashes[k] for k in kept]

    def _store(self, number: int, offsets: list[int], texts: list[bytes], hashes: list[bytes]) -> None:
        tokens, lengths = self._tokenizer.encode_with_ends(texts)
        self._tokens.write(tokens)
        documents = np.zeros(len(texts), DOCUMENT)
        documents["hash"] = np.frombuffer(b"".join(hashes), "<u8").reshape(-1, 2)
        documents["source"], documents["offset"], documents["tokens"] = number, offsets, lengths
        documents["bytes"] = documents["characters"] = np.fromiter(map(len, texts), np.int64, len(texts))
        for place in [k for k, is_ascii in enumerate(map(bytes.isascii, texts)) if not is_ascii]:
            documents["characters"][place] = len(texts[place].decode())
        self._documents.write(documents)
        self._num_documents += len(documents)
        self._num_tokens += len(tokens)
        if self._signatures is not None:
            from millrace.prepare.text.near import band_hashes

            self._signatures.write(band_hashes(texts))


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


def _gathered(some: Iterable[Texts]) -> Iterator[Texts]:
    """The same, about a chunk at a time: every call of a tokenizer and of write has its price."""
    offsets: list[int] = []
    texts: list[bytes] = []
    size = 0
    for more_offsets, more_texts in some:
        offsets += more_offsets
        texts += more_texts
        size += sum(map(len, more_texts)) + 64 * len(more_texts)
        if size >= CHUNK_BYTES:
            yield offsets, texts
            offsets, texts, size = [], [], 0
    if texts:
        yield offsets, texts


class _Spill:
    """A file of tokens or of what is known of documents, written as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd, self._size = path, -1, 0

    def write(self, array: Array) -> None:
        if self._fd < 0:
            self._fd = platform.create(self._path)
        platform.write(self._fd, array.reshape(-1).view(np.uint8).data, self._path)
        self._size += array.nbytes

    def finish(self) -> int:
        self.write(np.zeros(0, np.uint8))
        platform.sync(self._fd, self._path)
        self.close()
        return self._size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write(path: Path, data: bytes) -> int:
    platform.write_file(path, data, mode=0o644)
    return len(data)


@lru_cache(maxsize=2)
def tokenizer_of(folder: str, described: str, engine: str) -> Tokenizer:
    """The tokenizer of a preparation, loaded once per worker, on the engine the run decided on."""
    path = Path(folder) / "vocabulary.json"
    tokenizer = load_tokenizer(json.loads(described), path.read_bytes(), str(path))
    if isinstance(tokenizer, HuggingFaceTokenizer) and engine == "tokenizers":
        tokenizer.give_up_fast()
    return tokenizer


def _function(name: str | None) -> Callable[[str], bool] | None:
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        found: Callable[[str], bool] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--filter {name}: {error}; expected module:function that takes a text and says whether it stays"
        ) from error
    return found
