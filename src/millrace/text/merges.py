"""The core's own engine for byte-level BPE, which needs no other package and starts at once.

It splits text as GPT-2's pattern does and merges as a ``tokenizer.json`` says. What keeps it exact: a document is its own
only if all tables of Unicode agree on its characters; all others, and those with a word of more than 4,096 bytes, go to the
next engine, which is made when the first of them comes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import add
from typing import Any

import numpy as np

from millrace.lazy import cached_property
from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.text.giga import MAX_DOCUMENT, Engine
from millrace.text.lump import for_core, num_bytes
from millrace.text.tokenizer import with_ends

NUM_KINDS = 0x20000  # code points that are looked at: the others are rare
NEWEST = (15, 1, 0)  # version of Unicode that the engines behind this one know
BEYOND = 384  # as in bpe.c
UNKNOWN, BLANK, LETTER, NUMBER, OTHER = range(5)
KINDS = dict.fromkeys(("Zs", "Zl", "Zp"), BLANK) | dict.fromkeys(("Lu", "Ll", "Lt", "Lm", "Lo"), LETTER)
KINDS |= dict.fromkeys(("Nd", "Nl", "No"), NUMBER) | dict.fromkeys(("Cn", "Cs"), UNKNOWN)
KINDS |= dict.fromkeys(
    ["Mn", "Mc", "Me", "Cc", "Cf", "Co", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"], OTHER
)


class MergeEngine:
    """The merges of a byte-level ``tokenizer.json``; ``others`` makes the engine for what is left."""

    name = "millrace"

    def __init__(
        self, merges: Array, byte_ids: Array, end: int, dtype: np.dtype[Any], others: Callable[[], Engine]
    ) -> None:
        self._dtype, self._end, self._make_others = dtype, end, others
        self._core = core.Bpe(byte_ids, merges, end, dtype.itemsize)
        self._knows_kinds = False
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
        if len(left) and not self._knows_kinds:
            self._core.learn(kinds())
            self._knows_kinds = True
            return self._encode(documents, room)
        return self._with_others(documents, tokens, counts, left) if len(left) else (tokens, counts)

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


def merges_of(model: Mapping[str, Any], byte_letters: Mapping[str, int]) -> tuple[Array, Array] | None:
    """(left, right, made) of every merge by its rank, and the ids of the bytes; None where one is not in the vocabulary."""
    merges = [merge if isinstance(merge, (list, tuple)) else merge.split(" ") for merge in model["merges"]]
    of = model["vocab"].__getitem__
    try:
        lefts, rights = zip(*merges, strict=True) if merges else ((), ())
        found = [list(map(of, lefts)), list(map(of, rights)), list(map(of, map(add, lefts, rights)))]
        byte_ids = list(map(of, sorted(byte_letters, key=byte_letters.__getitem__)))
    except (KeyError, ValueError):
        return None
    return np.array(found, np.uint32).T.copy(), np.array(byte_ids, np.uint32)


@lru_cache(maxsize=1)
def kinds() -> Array:
    """What characters are to the pattern, of those on which all tables of Unicode agree.

    Those of Python are no newer than tiktoken's, up to a version. Beyond it a letter or a number must have been one in
    Unicode 3.2 already; any other character may be new: to a table that does not know it it is none of them either.
    """
    points = list(map(chr, range(NUM_KINDS)))
    found, before = (
        np.fromiter(map(KINDS.__getitem__, map(table.category, points)), np.uint8, NUM_KINDS)
        for table in (unicodedata, unicodedata.ucd_3_2_0)
    )
    if tuple(map(int, unicodedata.unidata_version.split("."))) > NEWEST:
        found[(found != before) & ((found != OTHER) | (before != UNKNOWN))] = UNKNOWN
    found[[*range(0x09, 0x0E), 0x85]] = BLANK  # by their category they are controls
    return found
