"""What a user asks of the preparation of text, as one value that goes to workers and into the plan."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.errors import ConfigError
from millrace.prepare.text.part_files import file_of

MIN_CUT = 4  # bytes of a piece: those of the longest character
EARLIER = {"encoding": "utf-8", "html": "raw"}  # what stores mean that were made before there were these options


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How sources become documents: with these unchanged, finished parts of an interrupted run are kept."""

    tokenizer: str = "gpt2"
    format: str | None = None
    document: str | None = None
    text_field: str = "text"
    mask_field: str | None = None
    normalize: bool = True
    min_chars: int = 1
    max_document: int = 64 << 20
    long_documents: str = "stop"
    filter: str | None = None
    on_error: str = "stop"
    max_ratio: int = 1000
    encoding: str = "utf-8"
    html: str = "raw"
    dedup: str = "exact"
    dedup_unit: str = "document"
    part_bytes: int = 16 << 20

    def check(self) -> None:
        _one_of("format", self.format, (None, "text", "jsonl", "csv", "parquet"))
        _one_of("document", self.document, (None, "line", "blank-line", "file", "record"))
        _one_of("long_documents", self.long_documents, ("stop", "split"))
        _one_of("on_error", self.on_error, ("stop", "skip", "replace"))
        _one_of("html", self.html, ("raw", "text"))
        _one_of("dedup", self.dedup, ("exact", "near", "none"))
        _one_of("dedup_unit", self.dedup_unit, ("document", "line"))
        if self.dedup_unit == "line" and self.dedup != "exact":
            raise ConfigError(
                f"--dedup-unit line with --dedup {self.dedup}; lines are compared exactly: leave one of them out"
            )
        for name in ("min_chars", "max_document", "max_ratio", "part_bytes"):
            if getattr(self, name) < (0 if name == "min_chars" else 1):
                raise ConfigError(f"{name}={getattr(self, name)}; expected a positive number")
        if self.max_document < MIN_CUT and self.long_documents == "split":
            raise ConfigError(
                f"--max-document {self.max_document} with --long-documents split; a character may have {MIN_CUT} bytes: give "
                f"{MIN_CUT} or more"
            )
        if self.filter is not None and ":" not in self.filter:
            raise ConfigError(f"filter={self.filter!r}; expected module:function")

        if self.mask_field is not None:
            self._check_mask()
        self.codec  # noqa: B018 - refuses a name that is none

    @property
    def codec(self) -> str | None:
        """The codec that files are decoded by; None: they are UTF-8, and read as they are."""
        try:
            found = codecs.lookup(self.encoding)
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"encoding={self.encoding!r} is no encoding that Python knows; expected one such as utf-8, latin-1 or utf-16"
            ) from error
        if not getattr(found, "_is_text_encoding", True) or found.incrementaldecoder is None:
            raise ConfigError(f"encoding={self.encoding!r} is not one of text; expected one such as utf-8 or latin-1")
        return None if found.name == "utf-8" else found.name

    def _check_mask(self) -> None:
        """What changes the text would move what its mask speaks of."""
        if self.normalize:
            raise ConfigError("--mask-field needs --no-normalize: cleaning would move the characters its spans count")
        if self.on_error == "replace":
            raise ConfigError(
                "--mask-field with --on-error replace: spans count characters as they were; give skip or stop"
            )
        if self.dedup_unit == "line":
            raise ConfigError("--mask-field with --dedup-unit line: masked documents stay whole; leave one of them out")
        if self.mask_field == self.text_field:
            raise ConfigError(f"--mask-field {self.mask_field} is the text field itself; name the field with the spans")

    @property
    def dedups_documents(self) -> bool:
        """Whether whole documents are compared; where lines are, no two documents stay alike anyway."""
        return self.dedup != "none" and self.dedup_unit == "document"

    @property
    def cuts_documents(self) -> bool:
        return self.long_documents == "split"

    @property
    def part_files(self) -> tuple[str, ...]:
        """The files of every part."""
        found = ["tokens.bin", *map(file_of, ("hash", "source", "offset", "length"))]
        found += [file_of("size")] if self.dedups_documents else []
        found += [file_of("goes_on")] if self.cuts_documents else []
        found += ["signatures.bin"] if self.dedup == "near" else []
        found += ["lines.bin", "line_counts.bin"] if self.dedup_unit == "line" else []
        return (*found, *(["mask.bin"] if self.mask_field is not None else []))


def loosened(old: Mapping[str, Any], new: Mapping[str, Any], *, has_records: bool) -> dict[str, Any]:
    """The old options with those changes to the new ones that only stop at less: what was read stays as it is.

    Records that were too long may have been set aside, where documents of plain text stopped the run.
    """
    kept = {**EARLIER, **old}
    if old["on_error"] == "stop":
        kept["on_error"] = new["on_error"]
    if old["long_documents"] == "stop" and new["max_document"] >= old["max_document"]:
        kept["long_documents"] = new["long_documents"]
        if old["on_error"] == "stop" or not has_records:
            kept["max_document"] = new["max_document"]
    kept["max_ratio"] = max(old["max_ratio"], new["max_ratio"])
    return kept


class ShardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How documents become shards and splits; may change between runs without reading the sources again."""

    shard_tokens: int = 10_000_000
    val: float = 0.01
    test: float = 0.0
    val_tail: bool = False

    def check(self) -> None:
        if self.shard_tokens < 1:
            raise ConfigError(f"shard_tokens={self.shard_tokens}; expected 1 or more tokens")
        if not (0 <= self.val < 1 and 0 <= self.test < 1 and self.val + self.test < 1):
            raise ConfigError(f"val={self.val}, test={self.test}; expected shares from 0 that leave some for train")


def parted(given: Mapping[str, Any]) -> tuple[ReadOptions, ShardOptions]:
    """Options by name as those of reading and those of shards, checked."""
    kinds = (ReadOptions, ShardOptions)
    names = [set(kind.__struct_fields__) for kind in kinds]
    unknown = set(given) - names[0] - names[1]
    if unknown:
        raise ConfigError(f"unknown options {sorted(unknown)}; expected {', '.join(sorted(names[0] | names[1]))}")
    reading = ReadOptions(**{key: value for key, value in given.items() if key in names[0]})
    cutting = ShardOptions(**{key: value for key, value in given.items() if key in names[1]})
    reading.check()
    cutting.check()
    return reading, cutting


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}; expected one of {', '.join(str(a) for a in allowed if a is not None)}")
