"""The options of ``prepare_text``, as two values that go to workers and into the plan."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.errors import ConfigError

MIN_CUT = 4  # bytes of a piece: the longest character has as many
EARLIER = {"encoding": "utf-8", "html": "raw"}  # in stores that are older than these options


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How sources become documents. While these stay the same, finished parts of an interrupted run stay."""

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
        self.codec  # noqa: B018 - refuses an unknown name

    @property
    def codec(self) -> str | None:
        """The codec that decodes files; None for UTF-8, which is read as it is."""
        try:
            codec = codecs.lookup(self.encoding)
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"encoding={self.encoding!r} is not an encoding that Python knows; expected one such as utf-8, latin-1 or utf-16"
            ) from error
        if not getattr(codec, "_is_text_encoding", True) or codec.incrementaldecoder is None:
            raise ConfigError(f"encoding={self.encoding!r} is not one of text; expected one such as utf-8 or latin-1")
        return None if codec.name == "utf-8" else codec.name

    def _check_mask(self) -> None:
        """Refuses options that change the text: they would move the characters that a mask counts."""
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
        """Whether whole documents are compared; with ``--dedup-unit line`` no two stay alike anyway."""
        return self.dedup != "none" and self.dedup_unit == "document"

    @property
    def cuts_documents(self) -> bool:
        return self.long_documents == "split"

    @property
    def part_files(self) -> tuple[str, ...]:
        """The files of every part."""
        names = ["tokens.bin", "hash.bin", "source.bin", "offset.bin", "length.bin"]
        names += ["size.bin"] if self.dedups_documents else []
        names += ["goes_on.bin"] if self.cuts_documents else []
        names += ["signatures.bin"] if self.dedup == "near" else []
        names += ["lines.bin", "line_counts.bin"] if self.dedup_unit == "line" else []
        return (*names, *(["mask.bin"] if self.mask_field is not None else []))


def relax_options(old: Mapping[str, Any], new: Mapping[str, Any], *, has_records: bool) -> dict[str, Any]:
    """The old options with the changes that only allow more: with these, finished parts stay as they are.

    A long document of plain text stops a run, but long records may have been set aside.
    """
    options = {**EARLIER, **old}
    if old["on_error"] == "stop":
        options["on_error"] = new["on_error"]
    if old["long_documents"] == "stop" and new["max_document"] >= old["max_document"]:
        options["long_documents"] = new["long_documents"]
        if old["on_error"] == "stop" or not has_records:
            options["max_document"] = new["max_document"]
    options["max_ratio"] = max(old["max_ratio"], new["max_ratio"])
    return options


class ShardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How documents become shards and splits. They may change between runs without reading sources again."""

    shard_tokens: int = 10_000_000
    val: float = 0.01
    test: float = 0.0
    val_tail: bool = False

    def check(self) -> None:
        if self.shard_tokens < 1:
            raise ConfigError(f"shard_tokens={self.shard_tokens}; expected 1 or more tokens")
        if not (0 <= self.val < 1 and 0 <= self.test < 1 and self.val + self.test < 1):
            raise ConfigError(f"val={self.val}, test={self.test}; expected shares from 0 that leave some for train")


def split_options(given: Mapping[str, Any]) -> tuple[ReadOptions, ShardOptions]:
    """Options by name, checked, as those for reading and those for shards."""
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
