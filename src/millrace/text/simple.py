"""Tokenizers without a model: one id for each byte, or for each character."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from millrace.errors import ConfigError
from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.breaks import SECTION_BYTES
from millrace.text.documents import Documents
from millrace.text.tokenizer import SectionIds, Tokenizer, UnknownCharacter
from millrace.text.words import character_start


def space_core(documents: Documents) -> tuple[Array, Int64s]:
    text, lengths = core.join_with_zeros(documents.arrays)
    return np.frombuffer(text, np.uint8), np.frombuffer(lengths, np.int64)


def space_python(documents: Documents) -> tuple[Array, Int64s]:
    return np.frombuffer(b"\0".join((*documents, b"")), np.uint8), documents.lengths + 1


_space = space_core if core else space_python  # the bytes of documents with a 0 after each, and their lengths


def _sections(document: bytes) -> Iterator[tuple[int, int]]:
    """[start, stop) of stretches of whole characters."""
    stop = 0
    while stop < len(document):
        start, stop = stop, character_start(document, stop + SECTION_BYTES)
        yield start, stop


class BytesTokenizer(Tokenizer):
    """One id per byte, 0 to 255; 256 ends a document."""

    kind = name = "bytes"
    vocab_size = 257
    end = 256

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        return np.frombuffer(b"".join(documents), np.uint8), Documents.of(documents).lengths

    spaced_dtype = np.dtype(np.uint8)

    def encode_spaced(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        return _space(Documents.of(documents))

    def encode_sections(self, document: bytes) -> Iterator[SectionIds]:
        for start, stop in _sections(document):
            yield SectionIds(start, stop, np.frombuffer(document[start:stop], np.uint8))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(ids)

    def to_file(self) -> bytes:
        return json.dumps({"millrace_tokenizer": "bytes"}).encode()


class CharTokenizer(Tokenizer):
    """One id per character of its corpus, in the order of code points; the last id ends a document."""

    kind = name = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        if not self.characters:
            raise ConfigError("a character tokenizer of no characters; is the corpus empty?")
        self.end = len(self.characters)
        self.vocab_size = self.end + 1
        points = np.array([ord(c) for c in self.characters], np.uint32)
        # The id of every code point: 4 bytes each, at most 4.5 MB.
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

    def encode_sections(self, document: bytes) -> Iterator[SectionIds]:
        for start, stop in _sections(document):
            yield SectionIds(start, stop, self.encode_documents([document[start:stop]])[0])

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return "".join(self.characters[token] for token in ids).encode()

    def to_file(self) -> bytes:
        return json.dumps({"millrace_tokenizer": "char", "characters": "".join(self.characters)}).encode()
