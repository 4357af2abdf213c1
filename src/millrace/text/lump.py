"""Documents that lie in one text: millions of short ones as bytes of their own cost more than to tokenise them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from millrace.ragged import Array, Int64s


class Lump(Sequence[bytes]):
    """Document k is ``text[starts[k] : stops[k]]``; as a sequence it makes bytes of them. Only where there is a core."""

    def __init__(self, text: bytes, starts: Int64s, stops: Int64s) -> None:
        self.text, self.starts, self.stops = text, starts, stops

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, k: int) -> bytes: ...
    @overload
    def __getitem__(self, k: slice) -> Lump: ...
    def __getitem__(self, k: int | slice) -> bytes | Lump:
        if isinstance(k, slice):
            return Lump(self.text, self.starts[k], self.stops[k])
        return self.text[self.starts[k] : self.stops[k]]

    def __iter__(self) -> Iterator[bytes]:
        text = self.text
        return (text[start:stop] for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True))


def for_core(documents: Sequence[bytes]) -> Any:
    """Documents as the core takes them."""
    return (documents.text, documents.starts, documents.stops) if isinstance(documents, Lump) else list(documents)


def take(documents: Sequence[bytes], kept: Array) -> Sequence[bytes]:
    """Those of these numbers."""
    if isinstance(documents, Lump):
        return Lump(documents.text, documents.starts[kept], documents.stops[kept])
    return [documents[k] for k in kept.tolist()]


def num_bytes(documents: Sequence[bytes]) -> int:
    return int(lengths_of(documents).sum())


def lengths_of(documents: Sequence[bytes]) -> Int64s:
    if isinstance(documents, Lump):
        return documents.stops - documents.starts
    return np.fromiter(map(len, documents), np.int64, len(documents))
