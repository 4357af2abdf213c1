"""What a thing is, in 32 hex digits: fingerprints of stores, views and orders are made here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any


def digest(*parts: bytes | str) -> str:
    """32 hex digits that identify these parts; each is framed by its length."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def digest_chunks(num_bytes: int, chunks: Iterable[bytes]) -> str:
    """``digest`` of one part that comes in chunks."""
    state = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=16)
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def canonical(value: Any) -> str:
    """JSON with one spelling: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
