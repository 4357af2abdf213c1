"""Tokenizers without a model: bytes, and single characters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from millrace.errors import ConfigError
from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.breaks import PIECE_BYTES
from millrace.text.lump import for_core, lengths_of
from millrace.text.tokenizer import Encoded, Tokenizer, UnknownCharacter
from millrace.text.words import character


def _blocks(document: bytes) -> Iterator[tuple[int, int]]:
    """[start, stop) of pieces of whole characters."""
    stop = 0
    while stop < len(document):
        start, stop = stop, character(document, stop + PIECE_BYTES)
        yield start, stop


class BytesTokenizer(Tokenizer):
    """One id per byte, 0 to 255; 256 ends a document."""

    kind = name = "bytes"
    vocab_size = 257
    end = 256

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        joined = np.frombuffer(b"".join(documents), np.uint8)
        return joined, lengths_of(documents)

    spaced_dtype = np.dtype(np.uint8)

    def encode_spaced(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        if core:
            found = core.spaced(for_core(documents))
            return np.frombuffer(found[0], np.uint8), np.frombuffer(found[1], np.int64)
        joined = np.frombuffer(b"\0".join((*documents, b"")), np.uint8)
        return joined, lengths_of(documents) + 1

    def encode_with_ends(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        spaced, lengths = self.encode_spaced(documents)
        tokens = spaced.astype(self.dtype)
        tokens[np.cumsum(lengths) - 1] = self.end
        return tokens, lengths

    def encode_pieces(self, document: bytes) -> Iterator[Encoded]:
        for start, stop in _blocks(document):
            yield Encoded(start, stop, np.frombuffer(document[start:stop], np.uint8))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(ids)

    def to_file(self) -> bytes:
        return json.dumps({"millrace_tokenizer": "bytes"}).encode()


class CharTokenizer(Tokenizer):
    """One id per character of the corpus it was made for, in the order of code points; the last id ends a document."""

    kind = name = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        if not self.characters:
            raise ConfigError("a character tokenizer of no characters; is the corpus empty?")
        self.end = len(self.characters)
        self.vocab_size = self.end + 1
        points = np.array([ord(c) for c in self.characters], np.uint32)
        # A table over code points: 4 bytes each, at most 4.5 MB.
        self._table = np.full(int(points[-1]) + 2, -1, np.int32)
        self._table[points] = np.arange(len(points))

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        texts = [document.decode() for document in documents]
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        points = np.frombuffer("".join(texts).encode("utf-32-le"), "<u4")
        ids = self._table[np.minimum(points, len(self._table) - 1)]
        if len(ids) and ids.min() < 0:
            unknown = chr(int(points[np.argmin(ids)]))
            raise UnknownCharacter(
                f"character {unknown!r} is not in the vocabulary of {self.end} characters; prepare again with all files",
                character=unknown,
            )
        return ids.astype(np.uint32), lengths

    def encode_pieces(self, document: bytes) -> Iterator[Encoded]:
        for start, stop in _blocks(document):
            yield Encoded(start, stop, self.encode_documents([document[start:stop]])[0])

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return "".join(self.characters[token] for token in ids).encode()

    def to_file(self) -> bytes:
        return json.dumps({"millrace_tokenizer": "char", "characters": "".join(self.characters)}).encode()
