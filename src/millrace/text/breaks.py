"""Where a long text may be cut so that its pieces, encoded one by one, give the ids of the whole.

Hugging Face's engine needs 140 bytes of memory for every byte of a text. A cut is tried between words and proven by
the engine itself: the text around it has the same ids cut and uncut. Tokenizers look no further than that: they split
text into words before they encode it, or merge over short distances.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice

PIECE_CHARS = 1 << 20
AROUND = 512  # characters on either side on which a cut is proven
TRIES = 64  # in each stretch
# Between words, before or at a space or a line end: whichever the tokenizer splits at.
PLACES = re.compile(r"(?<=\w) (?=\w)|(?<=\S)\n(?=\S)|(?<=[^\W_])(?=[.,;:!?。、，！？])")

Encode = Callable[[list[str]], Sequence[Sequence[int]]]


def cut(text: str, encode: Encode) -> list[tuple[int, int]]:
    """[start, stop) of pieces of about a million characters; what stands between two pieces makes no token.

    A stretch without a place where it can be cut stays whole.
    """
    found, start = [], 0
    while len(text) - start > PIECE_CHARS + PIECE_CHARS // 4:
        place = _next(text, start + PIECE_CHARS, encode)
        if place is None:
            break
        found.append((start, place[0]))
        start = place[1]
    return [*found, (start, len(text))]


def _next(text: str, at: int, encode: Encode) -> tuple[int, int] | None:
    """The end of one piece and the start of the next, the first that is proven from ``at`` on."""
    for stretch in range(at, len(text), PIECE_CHARS):
        for match in islice(PLACES.finditer(text, stretch, min(len(text), stretch + PIECE_CHARS)), TRIES):
            begin, end = match.span()
            for stop, start in ((begin, begin), (end, end), (begin, end)):
                if _is_cut(text, stop, start, encode):
                    return stop, start
    return None


def _is_cut(text: str, stop: int, start: int, encode: Encode) -> bool:
    before, after = text[max(0, stop - AROUND) : stop], text[start : start + AROUND]
    whole, left, right = encode([text[max(0, stop - AROUND) : start + AROUND], before, after])
    return list(whole) == [*left, *right]
