"""The core's own engine for byte-level BPE, which needs no other package and starts at once.

It splits text as GPT-2's pattern does and merges as a ``tokenizer.json`` says. What keeps it exact: of characters on which
tables of Unicode may differ tiktoken is asked what they are (``kinds.py``). Documents with a word of more than 4,096 bytes go
to the next engine, which is made when the first of them comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple

import numpy as np

from millrace.lazy import cached_property
from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.giga import MAX_DOCUMENT, Engine
from millrace.text.kinds import UNKNOWN, asked, kinds
from millrace.text.lump import for_core, num_bytes
from millrace.text.tokenizer import with_ends

BEYOND = 384  # as in bpe.c


class Merges(NamedTuple):
    """What the engine is made of: (left, right, made) of every merge by its rank, and the ids of the bytes."""

    merges: Array
    byte_ids: Array

    def to_bytes(self) -> bytes:
        return self.byte_ids.tobytes() + self.merges.tobytes()


def merges_from(data: bytes) -> Merges:
    """What ``to_bytes`` gave."""
    numbers = np.frombuffer(data, np.uint32)
    return Merges(numbers[256:].reshape(-1, 3), numbers[:256])


class MergeEngine:
    """The merges of a byte-level ``tokenizer.json``; ``others`` makes the engine for what is left.

    ValueError where the vocabulary is larger than the core takes.
    """

    name = "millrace"

    def __init__(self, merges: Merges, end: int, dtype: np.dtype[Any], others: Callable[[], Engine]) -> None:
        self._dtype, self._end, self._make_others = dtype, end, others
        self._core = core.Bpe(merges.byte_ids, merges.merges, end, dtype.itemsize)
        self._kinds: Array | None = None  # of characters, as the core knows them
        self._space = np.empty(1 << 20, dtype)

    @cached_property
    def _others(self) -> Engine:
        return self._make_others()

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        room = np.empty(_room(documents), self._dtype)  # of its own: threads may encode at once
        tokens, counts = self._encode(documents, room)
        return np.delete(tokens, np.cumsum(counts) - 1).astype(np.uint32), counts - 1

    def encode_spaced(self, documents: Sequence[bytes]) -> tuple[Array, Int64s]:
        """The ids of documents with the end behind each, and how many each has with it; the next call writes over them."""
        if (needed := _room(documents)) > len(self._space):
            self._space = np.empty(needed, self._dtype)
        return self._encode(documents, self._space)

    def encode_word(self, word: bytes) -> Iterator[tuple[int, Array]]:
        return self._others.encode_word(word)

    def _encode(self, documents: Sequence[bytes], room: Array) -> tuple[Array, Int64s]:
        counts = np.empty(len(documents), np.int64)
        used = self._core.encode(for_core(documents), room, counts)
        assert used >= 0, "there is room for all"
        tokens, left = room[:used], np.flatnonzero(counts < 0)
        if len(left) and self._learn(documents[k] for k in left.tolist()):
            return self._encode(documents, room)
        return self._with_others(documents, tokens, counts, left) if len(left) else (tokens, counts)

    def _learn(self, documents: Iterable[bytes]) -> bool:
        """Learns what the characters of these are; False where that was known."""
        if self._kinds is None:
            self._kinds = kinds().copy()
        else:
            texts = "".join(document.decode() for document in documents)
            points = np.unique(np.frombuffer(texts.encode("utf-32-le"), "<u4"))
            unknown = points[self._kinds[points] == UNKNOWN]
            if not len(unknown):
                return False
            self._kinds[unknown] = asked(unknown.tolist())
        self._core.learn(self._kinds)
        return True

    def _with_others(
        self, documents: Sequence[bytes], tokens: Array, counts: Int64s, left: Int64s
    ) -> tuple[Array, Int64s]:
        """The same with the documents that the core has left, each in its place."""
        others = [documents[k] for k in left.tolist()]
        if max(map(len, others)) > MAX_DOCUMENT:
            raise ValueError("a document is too long to be encoded at once")
        ids, lengths = self._others.encode_documents(others)
        more, counts[left] = with_ends(ids, lengths, self._dtype, self._end)
        is_left = np.zeros(len(counts), bool)
        is_left[left] = True
        is_more = np.repeat(is_left, counts)
        whole = np.empty(len(is_more), self._dtype)
        whole[is_more], whole[~is_more] = more, tokens
        return whole, counts


def _room(documents: Sequence[bytes]) -> int:
    """Ids for which the core wants room: one for each byte and end, and some for what it writes beyond."""
    return num_bytes(documents) + len(documents) + BEYOND


def merges_of(model: Mapping[str, Any], byte_letters: Mapping[str, int]) -> Merges | None:
    """The merges of a model by their ids; None where one is not in the vocabulary."""
    merges = [merge if isinstance(merge, (list, tuple)) else merge.split(" ") for merge in model["merges"]]
    try:
        lefts, rights = zip(*merges, strict=True) if merges else ((), ())
    except ValueError:
        return None
    return by_ids(model["vocab"], lefts, rights, byte_letters)


def by_ids(
    vocabulary: Mapping[str, int], lefts: Sequence[str], rights: Sequence[str], byte_letters: Mapping[str, int]
) -> Merges | None:
    of, count = vocabulary.__getitem__, len(lefts)
    try:
        found = [np.fromiter(map(of, tokens), np.uint32, count) for tokens in (lefts, rights, map(add, lefts, rights))]
        byte_ids = list(map(of, sorted(byte_letters, key=byte_letters.__getitem__)))
    except (KeyError, ValueError):
        return None
    return Merges(np.stack(found, axis=1), np.array(byte_ids, np.uint32))
