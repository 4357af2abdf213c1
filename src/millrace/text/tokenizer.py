"""What a tokenizer is to millrace: many documents in, one array of ids out, and back again.

``encode_documents`` takes many documents at once because joining them is what makes the fast engines fast.
``encode_with_ends`` is what preparation stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError, SourceError
from millrace.identity import digest
from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.lump import Lump, for_core, lengths_of


class UnknownCharacter(SourceError):
    """A text has a ``character`` that the vocabulary has not."""

    character: str


class Encoded(NamedTuple):
    """The ids of bytes [start, stop) of a document."""

    start: int
    stop: int
    ids: Array


class Tokenizer(ABC):
    """A vocabulary of ``vocab_size`` ids, ``end`` among them as the end of a document."""

    kind: str
    name: str
    vocab_size: int
    end: int

    @abstractmethod
    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """The ids of utf-8 documents one after the other, and how many each has."""

    def encode_with_ends(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """The same with the end-of-document id behind each, in the dtype of a store; lengths count it."""
        return with_ends(*self.encode_documents(documents), self.dtype, self.end)

    def encode_spaced(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """Ids with the end behind each document, in as few bytes as they need: what preparation keeps meanwhile.

        Where these are fewer than in a store, there is only room for the end. The next call may write over them.
        """
        return self.encode_with_ends(documents)

    @property
    def spaced_dtype(self) -> np.dtype[Any]:
        """Of the ids of ``encode_spaced``."""
        return self.dtype

    def encode_pieces(self, document: bytes) -> Iterator[Encoded]:
        """The ids of one document, of a long one piece by piece: memory is that of a piece, wherever it can be cut."""
        yield Encoded(0, len(document), self.encode_documents([document])[0])

    def _whole(self, document: bytes) -> tuple[Array, Int64s]:
        """The ids of one long document together."""
        ids = np.concatenate([piece.ids for piece in self.encode_pieces(document)])
        return ids, np.array([len(ids)], np.int64)

    def places(self, document: bytes, ids: Array) -> tuple[Int64s, Int64s]:
        """Which bytes of a document, [start, stop), each of its ids stands for."""
        sizes = self._sizes(ids)
        if int(sizes.sum()) != len(document):
            raise ConfigError(f"tokenizer {self.name} does not say where its tokens stand in the text, as masks need")
        stops = np.cumsum(sizes)
        return stops - sizes, stops

    def _sizes(self, ids: Array) -> Int64s:
        """How many bytes each id stands for."""
        different, which = np.unique(ids, return_inverse=True)
        sizes = np.fromiter((len(self.decode_bytes([i])) for i in different.tolist()), np.int64, len(different))
        return sizes[which]

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes the ids stand for."""

    @abstractmethod
    def to_file(self) -> bytes:
        """The contents of ``tokenizer.json``, from which ``load_tokenizer`` makes it again."""

    def encode(self, text: str) -> Array:
        """The ids of one text, in the dtype they are stored in."""
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
        """What the manifest says of it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "vocab_size": self.vocab_size,
            "end": self.end,
            "file": "tokenizer.json",
            "hash": digest(self.to_file()),
        }


def with_ends(ids: Array, lengths: Int64s, dtype: np.dtype[Any], end: int) -> tuple[Array, Int64s]:
    """Ids of documents with ``end`` behind each; the lengths count it."""
    tokens = np.empty(len(ids) + len(lengths), dtype)
    ends = np.cumsum(lengths) + np.arange(len(lengths))
    is_end = np.zeros(len(tokens), bool)
    is_end[ends] = True
    tokens[ends] = end
    tokens[~is_end] = ids
    return tokens, lengths + 1


def measured(documents: Sequence[bytes]) -> tuple[Int64s, Int64s]:
    """How many bytes, and how many characters, each document has."""
    if isinstance(documents, Lump) and documents.text.isascii():
        return lengths_of(documents), lengths_of(documents)
    if core:
        found = core.measured(for_core(documents))
        return np.frombuffer(found[0], np.int64), np.frombuffer(found[1], np.int64)
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    characters = lengths.copy()
    for k, document in enumerate(documents):
        if not document.isascii():
            characters[k] = len(document.decode())
    return lengths, characters


def byte_places(text: str, places: Int64s) -> tuple[Int64s, Int64s]:
    """Pairs of places counted in characters, as starts and stops counted in bytes."""
    if not text.isascii():
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        sizes = 1 + (points >= 0x80).astype(np.int8) + (points >= 0x800) + (points >= 0x10000)
        places = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))[places]
    return places[:, 0], places[:, 1]
