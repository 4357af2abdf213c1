"""Near-duplicates by MinHash: documents whose word 5-grams overlap by about three quarters share a band.

A document goes when any of its bands was seen in an earlier document, so the outcome depends on the order of the
sources alone. Signatures are rensa's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from millrace.errors import ConfigError
from millrace.ragged import Array

BANDS, ROWS = 14, 9  # a pair of similarity 0.5 is found by 3 %, 0.7 by 43 %, 0.8 by 87 %, 0.9 by 99.9 %
WORDS = 5


def band_hashes(texts: Sequence[bytes]) -> Array:
    """(documents, BANDS) uint64: equal numbers in a column are near-duplicates."""
    try:
        from rensa import RMinHash
    except ImportError as error:
        raise ConfigError("--dedup near needs rensa; pip install millrace[text]") from error
    found = np.empty((len(texts), BANDS), "<u8")
    for place, text in enumerate(texts):
        words = text.decode().split()
        shingles = [" ".join(words[k : k + WORDS]) for k in range(max(1, len(words) - WORDS + 1))]
        signature = RMinHash(num_perm=BANDS * ROWS, seed=42)
        signature.update(shingles)
        digest = np.array(signature.digest(), "<u4").reshape(BANDS, ROWS)
        for band in range(BANDS):
            found[place, band] = xxhash.xxh3_64_intdigest(digest[band].tobytes(), seed=band)
    return found
