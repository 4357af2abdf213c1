"""Lists and dicts as LitData packs them, back as JSON: a tag, counts of 4 bytes, and values one after the other."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array

PLAIN = 0x20  # a value whose first byte is above is JSON as it is: versions before 0.2.76
JSON, TEXTS, INTS, FLOATS, BOOLS, DICT, ROWS, TEXT, INT, FLOAT, BOOL, NONE = range(12)
OF_ROWS = {0x10: NONE, 0x11: TEXT, 0x12: INT, 0x13: FLOAT, 0x14: BOOL}
NUMBERS = {INTS: "<i8", FLOATS: "<f8", BOOLS: "?"}


def as_json(data: Array, _: object) -> Array:
    """The bytes of JSON for the bytes of one packed value."""
    raw = data.tobytes()
    if raw[:1] > bytes([PLAIN]):
        return data
    try:
        reader = _Reader(raw)
        text = json.dumps(reader.value(), ensure_ascii=False, separators=(",", ":"))
        if reader.at != len(raw):
            raise ValueError(f"{len(raw) - reader.at} bytes are left behind it")
        return np.frombuffer(text.encode(), np.uint8)
    except (ValueError, LookupError, struct.error, RecursionError) as error:
        raise ConfigError(f"a list or dict cannot be read: {error}") from error


class _Reader:
    """Reads values one after the other."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self.at = raw, 0

    def value(self) -> Any:
        tag = self._take(1)[0]
        if tag == DICT:
            return {self._text(): self.value() for _ in range(self._count())}
        if tag == ROWS:
            return self._rows()
        if tag == TEXTS:
            return [self._text() for _ in range(self._count())]
        if tag in NUMBERS:
            dtype = np.dtype(NUMBERS[tag])
            return np.frombuffer(self._take(self._count() * dtype.itemsize), dtype).tolist()
        return json.loads(self._text()) if tag == JSON else self._single(tag)

    def _single(self, tag: int) -> Any:
        if tag == TEXT:
            return self._text()
        if tag in (INT, FLOAT):
            return struct.unpack("<q" if tag == INT else "<d", self._take(8))[0]
        if tag == BOOL:
            return bool(self._take(1)[0])
        if tag == NONE:
            return None
        raise ValueError(f"{tag} is no known tag")

    def _rows(self) -> list[dict[str, Any]]:
        """Dicts with the same keys, which come once."""
        count, num_keys = self._count(), self._count()
        keys = [self._text() for _ in range(num_keys)]
        if not keys and count:
            raise ValueError("dicts without keys")
        return [{key: self._single(OF_ROWS[self._take(1)[0]]) for key in keys} for _ in range(count)]

    def _count(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _text(self) -> str:
        return self._take(self._count()).decode()

    def _take(self, size: int) -> bytes:
        data = self._raw[self.at : self.at + size]
        if len(data) < size:
            raise ValueError("it ends too early")
        self.at += size
        return data
