"""The words of a byte-level tokenizer's splitting pattern, and the ids of very long words.

Used only where a long document has no space to cut it at: a language without spaces, a run of one character.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from millrace.ragged import Array

LONG_WORD = 64 << 10  # characters; a longer word is encoded in windows
WINDOW, MAX_WINDOW = 64 << 10, 4 << 20  # bytes
OVERLAP = 8  # two windows share at least one part in 8
TRIES = 64
UNSURE = 3  # last words of a text that may change when it goes on
# Each alternative of these patterns is at most one character, a run of one class, and a short end. It
# looks at most two words ahead. So all words but the last three are those of the whole text.
LETTERS_AND_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",  # gpt2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    ENGLISH % r"\p{N}{1,3}",  # cl100k, Llama 3
    ENGLISH % r"\p{N}",  # Qwen 2
    LETTERS_AND_CASE,  # o200k
}


class Words:
    """The words of a known pattern."""

    def __init__(self, pattern: str) -> None:
        import regex

        self._pattern = regex.compile(pattern)

    def next(self, document: bytes, start: int, num_bytes: int) -> tuple[int, bool] | None:
        """Where some words from ``start`` on end, and whether they are one word to encode alone.

        None where the end of a word is not certain.
        """
        while True:
            last = character_start(document, start + num_bytes)
            text = document[start:last].decode()
            ends = self.ends(text, is_all=last == len(document))
            if ends is None:
                return None
            if ends:
                break
            num_bytes *= 2  # the word is longer than this
        is_long = np.diff([0, *ends]) > LONG_WORD
        count = int(np.argmax(is_long)) if is_long.any() else len(ends)
        for end in ends[max(0, count - TRIES) : count][::-1]:
            # Not after white space, which makes other words at the end of a text.
            if not text[end - 1].isspace() and is_stable(text[max(0, end - 2) : end + 2]):
                return start + len(text[:end].encode()), False
        return (start + len(text[: ends[0]].encode()), True) if is_stable(text[: ends[0] + 2]) else None

    def ends(self, text: str, *, is_all: bool = False) -> list[int] | None:
        """The ends of words that stay the same when the text goes on; None where the pattern skips text."""
        ends, at = [], 0
        for match in self._pattern.finditer(text):
            if match.start() != at:
                return None
            at = match.end()
            ends.append(at)
        return ends if is_all else ends[:-UNSURE]


@lru_cache(maxsize=8)
def words_of(pattern: str | None) -> Words | None:
    """The words of a pattern; None where it is not known, or regex is not installed."""
    if pattern not in KNOWN:
        return None
    try:
        return Words(pattern)
    except ImportError:
        return None


def is_stable(text: str) -> bool:
    """Whether Python knows all characters: encoders know different versions of Unicode."""
    return all(unicodedata.category(character) != "Cn" for character in set(text))


def character_start(document: bytes, at: int) -> int:
    """The start of the character that this byte of valid utf-8 belongs to."""
    for start in range(min(at, len(document)), max(0, at - 4), -1):
        if start == len(document) or document[start] & 0xC0 != 0x80:
            return start
    return max(0, min(at, len(document)))


def word_ids(word: bytes, encode: Callable[[bytes], Sequence[int]], sizes: Array) -> Iterator[Array]:
    """The ids of one long word by windows that overlap; ``sizes`` has the number of bytes of every id.

    An encoder needs about 50 bytes for every byte of a word, so a long one is not encoded at once.

    Tokens are the encoding of their bytes exactly if that holds for every two neighbours: merges go by
    lowest rank, then leftmost, so the first merge across a border of two tokens would also happen in these
    two alone. So two windows with the same token at the same place may be joined there.
    """
    # Every window is longer than any token: a window that is a token would not be encoded by merges.
    start, size = 0, max(WINDOW, 2 * OVERLAP * int(sizes.max()))
    ids = _encode(word[:size], encode)
    stop = size
    while stop < len(word):
        ends = start + np.cumsum(sizes[ids])
        num_sure = max(1, int(np.searchsorted(ends, stop - size // OVERLAP, side="right")))
        after = int(ends[num_sure - 1])
        more = _encode(word[after : after + size], encode)
        mine, theirs = _first_common(ids[num_sure:], more, sizes)
        if mine < 0:  # merges reach further than the overlap
            size *= 2
            again = _encode(word[start : start + size], encode)
            if size > MAX_WINDOW or (start and again[0] != ids[0]):
                raise ValueError("its windows have no token in common")
            stop, ids = start + size, again
            continue
        yield ids[: num_sure + mine]
        start = after + int(sizes[more[:theirs]].sum())
        stop, ids = after + size, more[theirs:]
    yield ids


def _encode(data: bytes, encode: Callable[[bytes], Sequence[int]]) -> Array:
    return np.array(encode(data), np.uint32)


def _first_common(ids: Array, others: Array, sizes: Array) -> tuple[int, int]:
    """The places of the first token that two encodings of the same bytes share; -1 where they share none."""
    ends, other_ends = np.cumsum(sizes[ids]), np.cumsum(sizes[others])
    keys = ends << 20 | sizes[ids], other_ends << 20 | sizes[others]
    _, mine, theirs = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    return (int(mine[0]), int(theirs[0])) if len(mine) else (-1, -1)
