"""Near-duplicates by MinHash: documents whose shingles overlap by about three quarters share a band.

A shingle is five words. In text with few spaces, such as Chinese, Japanese or Thai, it is 30 bytes from
the start of any character: as long as five words of English or ten characters of Chinese.

A document goes if an earlier one has one of its bands, so the result depends on the order of the sources
alone. rensa makes the signatures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.prepare.text.clean.long_documents import blocks, num_characters
from millrace.ragged import Array
from millrace.text.breaks import is_long
from millrace.text.words import character_start

BANDS, ROWS = 14, 9  # finds 3 % of pairs of similarity 0.5, 43 % of 0.7, 87 % of 0.8, 99.9 % of 0.9
WORDS = 5
LONGEST_WORDS = 20  # characters per word on average; above that, words are not separated by spaces
SHINGLE_BYTES = 30
BATCH = 1 << 13  # shingles in memory at once


def signatures(texts: Sequence[bytes]) -> Array:
    """(documents, BANDS * ROWS) uint32: the least hashes of the shingles of each."""
    try:
        from rensa import RMinHash
    except ImportError as error:
        raise ConfigError(f"--dedup near needs rensa; {install_command('text')}") from error
    table = np.empty((len(texts), BANDS * ROWS), "<u4")
    for place, text in enumerate(texts):
        signature = RMinHash(num_perm=BANDS * ROWS, seed=42)
        for some in shingles(text):
            signature.update(some)
        table[place] = signature.digest()
    return table


def bands(table: Array) -> Array:
    """(documents, BANDS) uint64, the hashes of the bands of signatures: equal ones in a column are near-duplicates."""
    hashes = [
        xxhash.xxh3_64_intdigest(band.tobytes(), seed=k)
        for digest in table.reshape(-1, BANDS, ROWS)
        for k, band in enumerate(digest)
    ]
    return np.array(hashes, "<u8").reshape(-1, BANDS)


def shingles(text: bytes) -> Iterator[list[Any]]:
    """The shingles of a document, some at a time; a document shorter than a shingle is one."""
    words = list(_words(text)) if not is_long(len(text)) else None  # those of a long one are split twice
    num_words = sum(map(len, words or _words(text)))
    if num_characters(text) <= LONGEST_WORDS * num_words or len(text) <= SHINGLE_BYTES:
        yield from _word_shingles(words or _words(text))
    else:
        yield from _byte_shingles(text)


def _words(text: bytes) -> Iterator[list[str]]:
    """The words of each block; no block ends within a word, unless the word is a megabyte long."""
    for block, _ in blocks(text):
        yield block.decode().split()


def _word_shingles(some: Iterable[list[str]]) -> Iterator[list[str]]:
    last: list[str] = []
    is_first = True
    for more in some:
        words = last + more
        for start in range(0, max(0, len(words) - WORDS + 1), BATCH):
            stop = min(start + BATCH, len(words) - WORDS + 1)
            yield [" ".join(words[k : k + WORDS]) for k in range(start, stop)]
            is_first = False
        last = words[max(0, len(words) - WORDS + 1) :]
    if is_first:
        yield [" ".join(last)]


def _byte_shingles(text: bytes) -> Iterator[list[bytes]]:
    start = 0
    while start < len(text) - SHINGLE_BYTES + 1:
        stop = min(character_start(text, start + 4 * BATCH), len(text) - SHINGLE_BYTES + 1)
        yield [text[k : k + SHINGLE_BYTES] for k in range(start, stop) if text[k] & 0xC0 != 0x80]
        start = stop
