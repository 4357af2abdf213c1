"""The kinds of characters in GPT-2's pattern: white space, letters, numbers, and others.

Encoders know different versions of Unicode. Where these cannot differ, Python's table is used, which is
quick; tiktoken is asked about the other characters of a text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from millrace.ragged import Array

# GPT-2's splitting pattern as tiktoken writes it. It gives the words of Hugging Face's ByteLevel; its
# possessive quantifiers cannot backtrack over a long run.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
NUM_KINDS = 0x110000  # as in core.h
NUM_COMMON = 0x20000  # code points looked up in Python; the others are rare
NEWEST = (15, 1, 0)  # a version of Unicode that tiktoken knows
UNKNOWN, BLANK, LETTER, NUMBER, OTHER = range(5)
KINDS = dict.fromkeys(("Zs", "Zl", "Zp"), BLANK) | dict.fromkeys(("Lu", "Ll", "Lt", "Lm", "Lo"), LETTER)
KINDS |= dict.fromkeys(("Nd", "Nl", "No"), NUMBER) | dict.fromkeys(("Cn", "Cs"), UNKNOWN)
KINDS |= dict.fromkeys(
    ["Mn", "Mc", "Me", "Cc", "Cf", "Co", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"], OTHER
)
LEADS = range(0xC2, 0xF5)  # first bytes of characters beyond ASCII


def ranks_package() -> Any:
    """tiktoken's core."""
    from tiktoken import _tiktoken  # type: ignore[attr-defined]

    return _tiktoken


@lru_cache(maxsize=1)
def kinds() -> Array:
    """The kind of every code point on which all tables of Unicode agree.

    If Python's table may be newer than tiktoken's, a letter or a number must have been one in Unicode 3.2.
    Any other character may be new: a table that does not know it gives it the same kind.
    """
    table = np.zeros(NUM_KINDS, np.uint8)
    common = table[:NUM_COMMON]
    common[:] = _python_kinds(unicodedata)
    if tuple(map(int, unicodedata.unidata_version.split("."))) > NEWEST:
        before = _python_kinds(unicodedata.ucd_3_2_0)
        common[(common != before) & ((common != OTHER) | (before != UNKNOWN))] = UNKNOWN
    common[[*range(0x09, 0x0E), 0x85]] = BLANK  # their category is that of controls
    return table


def _python_kinds(table: Any) -> Array:
    categories = map(table.category, map(chr, range(NUM_COMMON)))
    return np.fromiter(map(KINDS.__getitem__, categories), np.uint8, NUM_COMMON)


def ask_kinds(points: Iterable[int]) -> list[int]:
    """The kinds of characters beyond ASCII by tiktoken's table.

    Its pattern puts a character into one word with a letter, a number or a mark before it exactly if it
    is of that kind. Then two of their bytes become one token, which shows in their number.
    """
    return [_ask_kind(chr(point)) for point in points]


def _ask_kind(character: str) -> int:
    apart = 1 + len(character.encode())
    for before, kind in (("a", LETTER), ("1", NUMBER), ("!", OTHER)):
        if len(_oracle().encode_ordinary(before + character)) < apart:
            return kind
    return BLANK


@lru_cache(maxsize=1)
def _oracle() -> Any:
    """tiktoken with GPT-2's pattern; its tokens are single bytes, and a probe with a first byte after it."""
    tokens = [*(bytes([byte]) for byte in range(256)), *(bytes([before, lead]) for before in b"a1!" for lead in LEADS)]
    return ranks_package().CoreBPE({token: rank for rank, token in enumerate(tokens)}, {}, GPT2_PATTERN)
