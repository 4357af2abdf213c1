"""``Documents``: a chunk of documents in one text, with what readers know about them.

Millions of short documents as ``bytes`` of their own would cost more than their tokens. Readers make
chunks, cleaning and tokenizers take them. The functions here that measure and hash a chunk exist twice:
in the C core, and as a twin in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import xxhash

from millrace.native import core
from millrace.ragged import Array, Int64s

BLOCK = 1 << 20  # bytes of a long document that are counted at once


class Masks(NamedTuple):
    """The bytes of documents that count for the loss: those of document k are ``of(k)``."""

    spans: Int64s  # (n, 2): [start, stop) within the document, in order and apart
    offsets: Int64s  # document k has spans[offsets[k] : offsets[k + 1]]

    def of(self, k: int) -> Int64s:
        return self.spans[self.offsets[k] : self.offsets[k + 1]]


class Documents(Sequence[bytes]):
    """Document k is ``text[starts[k] : stops[k]]``; as a sequence, a chunk makes ``bytes`` of them.

    ``offsets`` says where each begins in its source. ``masks`` is there where masks are asked for. The
    documents of a chunk with ``piece_of`` are pieces of one document, which begins there in its source.
    """

    __slots__ = ("masks", "offsets", "piece_of", "starts", "stops", "text")

    def __init__(
        self,
        text: bytes,
        starts: Int64s,
        stops: Int64s,
        offsets: Int64s | None = None,
        masks: Masks | None = None,
        piece_of: int | None = None,
    ) -> None:
        self.text, self.starts, self.stops = text, starts, stops
        self.offsets = starts if offsets is None else offsets
        self.masks, self.piece_of = masks, piece_of

    @classmethod
    def of(
        cls,
        texts: Sequence[bytes],
        offsets: npt.ArrayLike | None = None,
        spans: Sequence[Int64s] | None = None,
        piece_of: int | None = None,
    ) -> Documents:
        """Documents that lie apart as a chunk. A single one is not copied; a chunk is returned as it is."""
        if isinstance(texts, Documents):
            return texts
        stops = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1) - 1  # a newline between two
        starts = np.concatenate(([0], stops[:-1] + 1)) if len(stops) else stops
        masks = None
        if spans is not None:
            counts = np.cumsum([0, *map(len, spans)])
            masks = Masks(np.concatenate([np.zeros((0, 2), np.int64), *spans]), counts)
        places = None if offsets is None else np.asarray(offsets, np.int64)
        return cls(b"\n".join(texts), starts, stops, places, masks, piece_of)

    @classmethod
    def join(cls, chunks: Sequence[Documents]) -> Documents:
        """Several chunks as one; all are of whole documents, or pieces of the same one."""
        if len(chunks) == 1:
            return chunks[0]
        texts = [text for chunk in chunks for text in chunk]
        spans = [c.masks.of(k) for c in chunks if c.masks is not None for k in range(len(c))]
        has_masks = any(chunk.masks is not None for chunk in chunks)
        offsets = np.concatenate([chunk.offsets for chunk in chunks])
        return cls.of(texts, offsets, spans if has_masks else None, chunks[0].piece_of)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, k: int) -> bytes: ...
    @overload
    def __getitem__(self, k: slice) -> Documents: ...
    def __getitem__(self, k: int | slice) -> bytes | Documents:
        if isinstance(k, slice):
            return self.take(np.arange(len(self))[k])
        return self.text[self.starts[k] : self.stops[k]]

    def __iter__(self) -> Iterator[bytes]:
        text = self.text
        return (text[start:stop] for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True))

    def take(self, numbers: Array) -> Documents:
        """The documents with these numbers, over the same text."""
        masks = None
        if self.masks is not None:
            counts = np.diff(self.masks.offsets)
            is_taken = np.zeros(len(self), bool)
            is_taken[numbers] = True
            offsets = np.concatenate(([0], np.cumsum(counts[numbers])))
            masks = Masks(self.masks.spans[np.repeat(is_taken, counts)], offsets)
        return Documents(
            self.text, self.starts[numbers], self.stops[numbers], self.offsets[numbers], masks, self.piece_of
        )

    @property
    def lengths(self) -> Int64s:
        """Bytes of each."""
        return self.stops - self.starts

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def arrays(self) -> tuple[bytes, Int64s, Int64s]:
        """What the core takes."""
        return self.text, self.starts, self.stops


def measure_core(documents: Documents) -> tuple[Int64s, Int64s]:
    if documents.text.isascii():
        return documents.lengths, documents.lengths
    lengths, characters = core.measure(documents.arrays)
    return np.frombuffer(lengths, np.int64), np.frombuffer(characters, np.int64)


def measure_python(documents: Documents) -> tuple[Int64s, Int64s]:
    characters = (len(document) if document.isascii() else _count(document) for document in documents)
    return documents.lengths, np.fromiter(characters, np.int64, len(documents))


def _count(document: bytes) -> int:
    """Characters of valid utf-8: every byte but those that continue one."""
    data = np.frombuffer(document, np.int8)
    return sum(int((data[start : start + BLOCK] >= -64).sum()) for start in range(0, len(data), BLOCK))


def hash_core(documents: Documents) -> bytes:
    hashes: bytes = core.hash_documents(documents.arrays)
    return hashes


def hash_python(documents: Iterable[bytes]) -> bytes:
    return b"".join(map(xxhash.xxh3_128_digest, documents))


measure = measure_core if core else measure_python  # bytes and characters of each document
hash_documents = hash_core if core else hash_python  # their xxh3_128 digests, one after the other
