"""What characters are to GPT-2's pattern: white space, letters, numbers, or any other.

Engines know different versions of Unicode. Where they cannot differ, Python's table says it, which is quick; else tiktoken
is asked about the characters that a text has.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from millrace.ragged import Array

# GPT-2's splitting pattern, which Hugging Face's ByteLevel has built in, in the form tiktoken gives it: the
# same pieces, with possessive quantifiers, which cannot backtrack over a long run.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
NUM_KINDS = 0x110000  # as in core.h
NUM_TOLD = 0x20000  # code points of which Python is asked: the others are rare
NEWEST = (15, 1, 0)  # version of Unicode that tiktoken knows at least
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

    Those of Python are no newer than tiktoken's, up to a version. Beyond it a letter or a number must have been one in
    Unicode 3.2 already; any other character may be new: to a table that does not know it it is none of them either.
    """
    found = np.zeros(NUM_KINDS, np.uint8)
    told = found[:NUM_TOLD]
    told[:] = _told(unicodedata)
    if tuple(map(int, unicodedata.unidata_version.split("."))) > NEWEST:
        before = _told(unicodedata.ucd_3_2_0)
        told[(told != before) & ((told != OTHER) | (before != UNKNOWN))] = UNKNOWN
    told[[*range(0x09, 0x0E), 0x85]] = BLANK  # by their category they are controls
    return found


def _told(table: Any) -> Array:
    return np.fromiter(map(KINDS.__getitem__, map(table.category, map(chr, range(NUM_TOLD)))), np.uint8, NUM_TOLD)


def asked(points: Iterable[int]) -> list[int]:
    """The kinds of characters beyond ASCII by tiktoken's own table.

    Its pattern takes a character together with a letter, a number or a mark before it exactly if it is one itself; that
    shows, since of bytes that are together two are one token.
    """
    return [_asked(chr(point)) for point in points]


def _asked(character: str) -> int:
    apart = 1 + len(character.encode())
    for before, kind in (("a", LETTER), ("1", NUMBER), ("!", OTHER)):
        if len(_oracle().encode_ordinary(before + character)) < apart:
            return kind
    return BLANK


@lru_cache(maxsize=1)
def _oracle() -> Any:
    """tiktoken with GPT-2's pattern, single bytes, and pairs of what may stand before a character and its first byte."""
    tokens = [*(bytes([byte]) for byte in range(256)), *(bytes([before, lead]) for before in b"a1!" for lead in LEADS)]
    return ranks_package().CoreBPE({token: rank for rank, token in enumerate(tokens)}, {}, GPT2_PATTERN)
