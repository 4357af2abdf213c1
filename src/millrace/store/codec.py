"""Codec: how the files of a compressed store are compressed, as ``store.json`` and ``--compress`` say."""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec

from millrace.distribution import install_command
from millrace.errors import ConfigError

LEVELS = {"zstd": (1, 22, 3), "lz4": (0, 16, 0)}  # lowest, highest, default
_SUFFIXES = {"zstd": ".zst", "lz4": ".lz4"}
WINDOW_LOG = 23  # 8 MiB: no block of ours needs more, and a frame that claims more is refused


class Codec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A method and its level.

    >>> str(Codec.parse("zstd")), Codec.parse("lz4").suffix
    ('zstd:3', '.lz4')
    """

    name: str
    level: int

    def __post_init__(self) -> None:
        lowest, highest, _ = LEVELS.get(self.name, (1, 0, 0))
        if not lowest <= self.level <= highest:
            known = ", ".join(f"{name}:{low} to {name}:{high}" for name, (low, high, _) in LEVELS.items())
            raise ConfigError(f"compress={self.name}:{self.level}; expected {known}")

    def __str__(self) -> str:
        return f"{self.name}:{self.level}"

    @classmethod
    def parse(cls, text: str) -> Codec:
        """A codec as users write it: ``zstd:3``, ``lz4``."""
        found = re.fullmatch(r"(\w+)(?::(\d{1,3}))?", text)
        if found is None or found[1] not in LEVELS:
            raise ConfigError(f"compress={text!r}; expected zstd:3, or another level of zstd or lz4")
        return cls(found[1], LEVELS[found[1]][2] if found[2] is None else int(found[2]))

    @property
    def suffix(self) -> str:
        """What the names of compressed files end with."""
        return _SUFFIXES[self.name]

    def library(self) -> Any:
        """The module that does the work; an error that says what to install where it is missing."""
        try:
            if self.name == "lz4":
                import lz4.frame as library
            elif sys.version_info >= (3, 14):
                from compression import zstd as library
            else:
                from backports import zstd as library
        except ImportError as error:
            raise ConfigError(f"{self.name} is not installed; {install_command('compress')}") from error
        return library

    def compress(self, data: bytes) -> bytes:
        """One frame that holds ``data``, which other tools of the codec can read."""
        if self.name == "lz4":
            frame: bytes = self.library().compress(data, compression_level=self.level, content_checksum=True)
        else:
            frame = self.library().compress(data, self.level)
        return frame

    def decompressor(self) -> Any:
        """Reads one frame: ``decompress(data, max_length)``, ``eof``, ``needs_input``, ``unused_data``."""
        library = self.library()
        if self.name == "lz4":
            return library.LZ4FrameDecompressor()
        return library.ZstdDecompressor(options={library.DecompressionParameter.window_log_max: WINDOW_LOG})

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What the library raises at bytes that it cannot read."""
        return (RuntimeError,) if self.name == "lz4" else (self.library().ZstdError,)
