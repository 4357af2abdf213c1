"""``Tokenizer``: many documents in, one array of ids out, and back again.

Fast encoders are fast because they take many documents at once. Preparation stores what ``encode_with_ends`` gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError, SourceError
from millrace.identity import digest
from millrace.ragged import Array, Int64s


class UnknownCharacter(SourceError):
    """A text has a ``character`` that the vocabulary does not have."""

    character: str


class SectionIds(NamedTuple):
    """The ids of bytes [start, stop) of a document."""

    start: int
    stop: int
    ids: Array


class Encoder(Protocol):
    """Documents in; out come their ids one after the other, and how many each has. ValueError: it gives up."""

    name: str

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]: ...

    def encode_word(self, word: bytes) -> Iterator[tuple[int, Array]]:
        """The ids of one long word, some at a time, each with the number of bytes they stand for."""


class Tokenizer(ABC):
    """A vocabulary of ``vocab_size`` ids. One of them, ``end``, ends a document."""

    kind: str
    name: str
    vocab_size: int
    end: int

    @abstractmethod
    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """The ids of utf-8 documents, one after the other, and how many each has."""

    def encode_with_ends(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """The same with the end-of-document id after each, in the dtype of a store; lengths count it."""
        return add_ends(*self.encode_documents(documents), self.dtype, self.end)

    def encode_spaced(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """Ids in as few bytes as they need, with the end after each document: what a part stores.

        Where ids have fewer bytes than in a store, a 0 holds the place of the end. The next call may overwrite the ids.
        """
        return self.encode_with_ends(documents)

    @property
    def spaced_dtype(self) -> np.dtype[Any]:
        """The dtype of ``encode_spaced``."""
        return self.dtype

    def encode_sections(self, document: bytes) -> Iterator[SectionIds]:
        """The ids of one document. A long one is cut into sections, so that memory is that of a section."""
        yield SectionIds(0, len(document), self.encode_documents([document])[0])

    def _encode_long(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """The same ids as ``encode_documents``, by sections."""
        each = [np.concatenate([part.ids for part in self.encode_sections(document)]) for document in documents]
        return np.concatenate(each), np.array(list(map(len, each)), np.int64)

    def places(self, document: bytes, ids: Array) -> tuple[Int64s, Int64s]:
        """The bytes [start, stop) of a document that each of its ids stands for."""
        sizes = self._sizes(ids)
        if int(sizes.sum()) != len(document):
            raise ConfigError(f"tokenizer {self.name} does not say where its tokens are in the text, which masks need")
        stops = np.cumsum(sizes)
        return stops - sizes, stops

    def _sizes(self, ids: Array) -> Int64s:
        """How many bytes each id stands for."""
        distinct, which = np.unique(ids, return_inverse=True)
        sizes = np.fromiter((len(self.decode_bytes([i])) for i in distinct.tolist()), np.int64, len(distinct))
        return sizes[which]

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes the ids stand for."""

    @abstractmethod
    def to_file(self) -> bytes:
        """The contents of ``tokenizer.json``; ``load_tokenizer`` reads it."""

    def encode(self, text: str) -> Array:
        """The ids of one text, in the dtype of a store."""
        return self.encode_documents([text.encode()])[0].astype(self.dtype)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids; the end-of-document token shows as ``<|endoftext|>``."""
        parts: list[bytes] = []
        run: list[int] = []
        for token in np.asarray(ids).reshape(-1).tolist():
            if not 0 <= token < self.vocab_size:
                raise ConfigError(f"id {token} is not in the vocabulary of {self.vocab_size}")
            if token == self.end:
                parts += [self.decode_bytes(run), b"<|endoftext|>"]
                run = []
            else:
                run.append(token)
        parts.append(self.decode_bytes(run))
        return b"".join(parts).decode(errors="replace")

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16 where every id fits, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def describe(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        fields = {name: getattr(self, name) for name in ("kind", "name", "vocab_size", "end")}
        return {**fields, "file": "tokenizer.json", "hash": digest(self.to_file())}


def join_ids(parts: Sequence[tuple[Array, Int64s]]) -> tuple[Array, Int64s]:
    """Ids and lengths of several groups of documents as those of one."""
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])


def pack_ids(lists: Sequence[Sequence[int]]) -> tuple[Array, Int64s]:
    """The ids of each document as one array, and how many each has."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    arrays = [np.array(ids, np.uint32) for ids in lists]
    return (np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)), lengths


def add_ends(ids: Array, lengths: Int64s, dtype: np.dtype[Any], end: int) -> tuple[Array, Int64s]:
    """Ids of documents with ``end`` after each; the lengths count it."""
    tokens = np.empty(len(ids) + len(lengths), dtype)
    ends = np.cumsum(lengths) + np.arange(len(lengths))
    is_end = np.zeros(len(tokens), bool)
    is_end[ends] = True
    tokens[ends] = end
    tokens[~is_end] = ids
    return tokens, lengths + 1


def byte_places(text: str, places: Int64s) -> tuple[Int64s, Int64s]:
    """Pairs of places in characters, as starts and stops in bytes."""
    if not text.isascii():
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        sizes = 1 + (points >= 0x80).astype(np.int8) + (points >= 0x800) + (points >= 0x10000)
        places = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))[places]
    return places[:, 0], places[:, 1]
