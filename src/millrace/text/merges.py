"""The C core's encoder of byte-level BPE, which starts at once.

It splits text by GPT-2's pattern and merges as a ``tokenizer.json`` says. Where tables of Unicode may
differ, tiktoken decides what a character is (``kinds.py``). A document with a word of more than 4,096
bytes goes to tiktoken, which is loaded for the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple

import numpy as np

from millrace.lazy import cached_property
from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.documents import Documents
from millrace.text.kinds import UNKNOWN, ask_kinds, kinds
from millrace.text.tokenizer import Encoder, add_ends

MARGIN = 384  # ids that bpe.c may write past the last one
MAX_DOCUMENT = 2 << 20  # bytes that tiktoken is given at once: it needs 50 times their memory


class Merges(NamedTuple):
    """The ids (left, right, result) of every merge by rank, and the ids of the 256 bytes."""

    merges: Array
    byte_ids: Array

    def to_bytes(self) -> bytes:
        return self.byte_ids.tobytes() + self.merges.tobytes()


def merges_from(data: bytes) -> Merges:
    """Reads what ``to_bytes`` wrote."""
    numbers = np.frombuffer(data, np.uint32)
    return Merges(numbers[256:].reshape(-1, 3), numbers[:256])


class MergeEncoder:
    """The merges of a byte-level ``tokenizer.json``; ``make_fallback`` makes the encoder for the rest.

    ValueError where the vocabulary is too large for the core.
    """

    name = "millrace"

    def __init__(
        self, merges: Merges, end: int, dtype: np.dtype[Any], make_fallback: Callable[[], Encoder | None]
    ) -> None:
        self._dtype, self._end, self._make_fallback = dtype, end, make_fallback
        self._core = core.Bpe(merges.byte_ids, merges.merges, end, dtype.itemsize)
        self._kinds: Array | None = None  # of all characters, once the core has them
        self._buffer = np.empty(1 << 20, dtype)

    @cached_property
    def _fallback(self) -> Encoder:
        encoder = self._make_fallback()
        if encoder is None:
            raise ValueError("tiktoken does not take this vocabulary")
        return encoder

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        documents = Documents.of(documents)
        buffer = np.empty(_num_places(documents), self._dtype)  # a new one: threads may encode at once
        tokens, counts = self._encode(documents, buffer)
        return np.delete(tokens, np.cumsum(counts) - 1).astype(np.uint32), counts - 1

    def encode_spaced(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """Ids with the end after each document, and their counts with it; the next call overwrites them."""
        documents = Documents.of(documents)
        if (needed := _num_places(documents)) > len(self._buffer):
            self._buffer = np.empty(needed, self._dtype)
        return self._encode(documents, self._buffer)

    def encode_word(self, word: bytes) -> Iterator[tuple[int, Array]]:
        return self._fallback.encode_word(word)

    def _encode(self, documents: Documents, buffer: Array) -> tuple[Array, Int64s]:
        counts = np.empty(len(documents), np.int64)
        used = self._core.encode(documents.arrays, buffer, counts)
        assert used >= 0, "there is room for all"
        tokens, skipped = buffer[:used], np.flatnonzero(counts < 0)
        if not len(skipped):
            return tokens, counts
        if self._learn(documents.take(skipped)):
            return self._encode(documents, buffer)
        return self._insert_skipped(documents, tokens, counts, skipped)

    def _learn(self, documents: Iterable[bytes]) -> bool:
        """Tells the core the kinds of the characters in these documents; False where it knew them."""
        if self._kinds is None:
            self._kinds = kinds().copy()
        else:
            texts = "".join(document.decode() for document in documents)
            points = np.unique(np.frombuffer(texts.encode("utf-32-le"), "<u4"))
            unknown = points[self._kinds[points] == UNKNOWN]
            if not len(unknown):
                return False
            self._kinds[unknown] = ask_kinds(unknown.tolist())
        self._core.learn(self._kinds)
        return True

    def _insert_skipped(
        self, documents: Documents, tokens: Array, counts: Int64s, skipped: Int64s
    ) -> tuple[Array, Int64s]:
        """Adds the ids of the documents that the core skipped, each in its place."""
        others = documents.take(skipped)
        if others.lengths.max() > MAX_DOCUMENT:
            raise ValueError("a document is too long to be encoded at once")
        more, counts[skipped] = add_ends(*self._fallback.encode_documents(others), self._dtype, self._end)
        was_skipped = np.zeros(len(counts), bool)
        was_skipped[skipped] = True
        is_more = np.repeat(was_skipped, counts)
        whole = np.empty(len(is_more), self._dtype)
        whole[is_more], whole[~is_more] = more, tokens
        return whole, counts


def _num_places(documents: Documents) -> int:
    """Size of the buffer that the core needs: an id for each byte and each end, and a margin."""
    return documents.num_bytes + len(documents) + MARGIN


def merges_of(model: Mapping[str, Any], byte_letters: Mapping[str, int]) -> Merges | None:
    """The merges of a model; None where the vocabulary lacks one."""
    merges = [merge if isinstance(merge, (list, tuple)) else merge.split(" ") for merge in model["merges"]]
    try:
        lefts, rights = zip(*merges, strict=True) if merges else ((), ())
    except ValueError:
        return None
    return merges_by_name(model["vocab"], lefts, rights, byte_letters)


def merges_by_name(
    vocabulary: Mapping[str, int], lefts: Sequence[str], rights: Sequence[str], byte_letters: Mapping[str, int]
) -> Merges | None:
    """Merges from the names of their tokens; None where the vocabulary lacks one."""
    look_up, count = vocabulary.__getitem__, len(lefts)
    names = (lefts, rights, map(add, lefts, rights))
    try:
        ids = [np.fromiter(map(look_up, tokens), np.uint32, count) for tokens in names]
        byte_ids = list(map(look_up, sorted(byte_letters, key=byte_letters.__getitem__)))
    except (KeyError, ValueError):
        return None
    return Merges(np.stack(ids, axis=1), np.array(byte_ids, np.uint32))
