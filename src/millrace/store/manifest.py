"""The manifest: what ``store.json`` says, checked before anything it names is touched.

``Manifest`` is written by publish.py and read by reader.py and verify.py. The shard table (``shards.bin``)
and the block hashes (``hashes.bin``) are plain uint64 arrays beside it, so that a store of 100,000 shards
opens without parsing 100,000 JSON objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from millrace.errors import ConfigError, StoreTooNew, corrupt
from millrace.identity import canonical as canonical
from millrace.identity import digest as digest
from millrace.ragged import Array, Int64s
from millrace.store.codec import Codec
from millrace.store.layout import DTYPES, MAX_ITEMS, MAX_RECORDS, Column, Layout, check_name, num_blocks
from millrace.store.strict_json import load_json

VERSION = 1
KINDS = ("records", "series", "text")
MAX_TOKENIZER_BYTES = 256 << 20
MAX_SHARDS = 1 << 24
MAX_TABLE_BYTES = 1 << 30
MAX_NUMBER = (1 << 32) - 1
TOKENIZER_FILE = "tokenizer.json"
FINGERPRINT = re.compile(r"[0-9a-f]{32}")


class ColumnEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    dtype: str
    shape: tuple[int, ...] = ()
    per: str = "row"
    axis: str | None = None
    values: tuple[str, ...] | None = None


class TableFile(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    bytes: int
    hash: str


class TokenizerEntry(msgspec.Struct):
    """What a manifest must say of a tokenizer; it may say more."""

    kind: str
    name: str
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    end: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    hash: str


class Totals(msgspec.Struct, forbid_unknown_fields=True):
    shards: int
    records: int
    rows: dict[str, int]  # by axis
    bytes: int


class Cuts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Splits by time: the int64 record column that holds, per record, the row at which each later split begins.

    With ``splits = ("train", "val", "test")`` the column has shape (2,); ``gap`` rows after a cut hold no horizon.
    """

    splits: tuple[str, ...]
    column: str = "cuts"
    gap: int = 0


class Manifest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    version: int
    kind: str
    columns: dict[str, ColumnEntry]
    axes: tuple[str, ...]
    splits: tuple[str, ...]
    totals: Totals
    shards: TableFile
    hashes: TableFile
    tokenizer: dict[str, Any] | None = None
    scaling: dict[str, Any] | None = None
    cuts: Cuts | None = None
    codec: Codec | None = None
    meta: dict[str, Any] = {}
    parent: str | None = None
    fingerprint: str
    checksum: str = ""

    @property
    def layout(self) -> Layout:
        return Layout({name: as_column(entry) for name, entry in self.columns.items()})


def as_column(entry: ColumnEntry) -> Column:
    if entry.dtype not in DTYPES:
        raise ConfigError(f"dtype {entry.dtype!r}; expected one of {', '.join(DTYPES)}")
    return Column(entry.dtype, entry.shape, per=entry.per, axis=entry.axis, values=entry.values)


def as_entry(column: Column) -> ColumnEntry:
    return ColumnEntry(column.dtype, column.shape, column.per, column.axis, column.values)


def fingerprint(manifest: Manifest, table: Array) -> str:
    """What a store is: version, kind, columns, shards and their block hashes, scaling, cuts, tokenizer.

    Shard numbers are names, so they are left out, as are paths, times, codec and meta.
    """
    identity = msgspec.to_builtins(manifest)
    keys = ("version", "kind", "columns", "axes", "splits", "scaling", "cuts", "tokenizer")
    logical = np.delete(table, 1, axis=1).astype("<u8").tobytes()
    return digest(canonical({key: identity.get(key) for key in keys}), logical, manifest.hashes.hash)


def encode(manifest: Manifest) -> bytes:
    """The bytes of ``store.json``; the checksum in it covers everything else in it."""
    body = msgspec.to_builtins(manifest)
    body["checksum"] = _checksum(body)
    return (json.dumps(body, indent=1, allow_nan=False) + "\n").encode()


def _checksum(body: Mapping[str, Any]) -> str:
    return digest(canonical({key: value for key, value in body.items() if key != "checksum"}))[:16]


def decode(data: bytes, path: str) -> Manifest:
    """A manifest whose every field was checked; one error per defect, with its place in the JSON."""
    body = load_json(data, path)
    version = body.get("version")
    if isinstance(version, int) and version > VERSION:
        raise StoreTooNew(f"{path}: format version {version}; this millrace reads up to {VERSION}: upgrade", path=path)
    _check_codec(body.get("codec"), path)
    try:
        manifest = msgspec.convert(body, Manifest)
        _check(manifest)
    except (msgspec.ValidationError, ValueError) as error:  # a ConfigError, or text that is no unicode
        raise corrupt(path, str(error)) from error
    if manifest.checksum != (expected := _checksum(body)):
        problem = f"was changed after it was written: checksum {manifest.checksum!r}, expected {expected!r}"
        raise corrupt(path, problem, expected=expected, found=manifest.checksum)
    return manifest


def _check_codec(codec: Any, path: str) -> None:
    try:
        msgspec.convert(codec, Codec | None)
    except (msgspec.ValidationError, ConfigError) as error:
        raise StoreTooNew(
            f"{path}: $.codec is {codec!r:.80}; this millrace reads zstd and lz4: upgrade", path=path
        ) from error


def _check(manifest: Manifest) -> None:
    if manifest.version != VERSION:
        raise ConfigError(f"$.version is {manifest.version}; expected {VERSION}")
    if manifest.kind not in KINDS:
        raise ConfigError(f"$.kind is {manifest.kind!r}; expected one of {', '.join(KINDS)}")
    for name, entry in manifest.columns.items():
        try:
            as_column(entry)
        except ConfigError as error:
            raise ConfigError(f"$.columns.{name}: {error}") from error
    if manifest.axes != (axes := manifest.layout.axes):
        raise ConfigError(f"$.axes is {list(manifest.axes)}; the columns make {list(axes)}")
    for name in manifest.splits:
        check_name(name, "$.splits")
    if len(set(manifest.splits)) != len(manifest.splits) or not manifest.splits:
        raise ConfigError(f"$.splits is {list(manifest.splits)}; expected one or more different names")
    for key in ("shards", "hashes"):
        table: TableFile = getattr(manifest, key)
        check_name(table.name, f"$.{key}.name")
        if not 0 <= table.bytes <= MAX_ITEMS or table.bytes % 8:
            raise ConfigError(f"$.{key}.bytes is {table.bytes}; expected a multiple of 8")
    _check_totals(manifest)
    for key, value in (("fingerprint", manifest.fingerprint), ("parent", manifest.parent)):
        if value is not None and not FINGERPRINT.fullmatch(value):
            raise ConfigError(f"$.{key} is {value!r}; expected 32 hex digits")
    if manifest.cuts is not None:
        check_cuts(manifest.cuts, manifest.layout)
    if manifest.tokenizer is not None:
        try:
            msgspec.convert(manifest.tokenizer, TokenizerEntry)
        except msgspec.ValidationError as error:
            raise ConfigError(f"$.tokenizer: {error}") from error
    features = manifest.meta.get("features")
    if manifest.kind == "series" and manifest.scaling is not None and not _are_names(features):
        raise ConfigError(f"$.meta.features is {features!r:.60}; expected a list of different names")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value) and len(set(value)) == len(value)


def _check_totals(manifest: Manifest) -> None:
    """Counts within the format's limits, and a shard table of the size they make, before that is read."""
    totals = manifest.totals
    if totals.rows.keys() != set(manifest.axes):
        raise ConfigError(f"$.totals.rows is for {list(totals.rows)}; the axes are {list(manifest.axes)}")
    counts = {"shards": totals.shards, "records": totals.records, "bytes": totals.bytes}
    counts |= {f"rows.{axis}": rows for axis, rows in totals.rows.items()}
    for key, count in counts.items():
        limit = {"shards": MAX_SHARDS, "records": MAX_RECORDS}.get(key, MAX_ITEMS)
        if not 0 <= count <= limit:
            raise ConfigError(f"$.totals.{key} is {count}; expected 0 to {limit}")
    expected = 8 * (3 + len(manifest.axes)) * totals.shards
    if manifest.shards.bytes != expected or expected > MAX_TABLE_BYTES:
        raise ConfigError(f"$.shards.bytes is {manifest.shards.bytes}; {totals.shards} shards make {expected}")


def check_cuts(cuts: Cuts, layout: Layout) -> None:
    expected = Column("int64", (len(cuts.splits) - 1,), per="record") if len(cuts.splits) > 1 else None
    if expected is None or len(set(cuts.splits)) != len(cuts.splits):
        raise ConfigError(f"$.cuts.splits is {list(cuts.splits)}; expected two or more different names")
    for name in cuts.splits:
        check_name(name, "$.cuts.splits")
    if layout.columns.get(cuts.column) != expected:
        raise ConfigError(f"$.cuts.column is {cuts.column!r}; expected a record column int64 of shape {expected.shape}")
    if not 0 <= cuts.gap < MAX_ITEMS:
        raise ConfigError(f"$.cuts.gap is {cuts.gap}; expected 0 or more rows")


# The shard table: one row of uint64 per shard: split, number, records, rows of each axis.


def check_table(manifest: Manifest, data: bytes, path: str) -> Array:
    """The shard table of a manifest, checked against it and against overflow."""
    layout = manifest.layout
    width, shards = 3 + len(layout.axes), manifest.totals.shards
    if not 0 <= shards <= MAX_SHARDS or len(data) != 8 * width * shards:
        problem = f"{len(data)} bytes for {shards} shards of {width} numbers"
        raise corrupt(path, problem, expected=8 * width * shards, found=len(data))
    if (actual := digest(data)) != manifest.shards.hash:
        raise corrupt(path, "its hash is not the one in the manifest", expected=manifest.shards.hash, found=actual)
    table = np.frombuffer(data, "<u8").reshape(shards, width)
    if shards and int(table[:, 0].max()) >= len(manifest.splits):
        raise corrupt(path, f"a shard of split {int(table[:, 0].max())}, but there are {len(manifest.splits)} splits")
    if shards and int(table[:, 1].max()) > MAX_NUMBER:
        raise corrupt(path, f"shard number {int(table[:, 1].max())}; expected at most {MAX_NUMBER}")
    if len(np.unique((table[:, 0] << np.uint64(32)) | table[:, 1])) != shards:
        raise corrupt(path, "two shards have one name")
    if shards and int(table[:, 2:].max()) > MAX_ITEMS // int(layout.item_bytes.sum()):
        raise corrupt(path, f"a shard counts {int(table[:, 2:].max())} items; that is beyond any file")
    totals = [sum(column) for column in table[:, 2:].T.tolist()]
    stated = [manifest.totals.records, *(manifest.totals.rows.get(axis) for axis in layout.axes)]
    if totals != stated or len(manifest.totals.rows) != len(layout.axes):
        raise corrupt(path, f"shards add up to {totals}, the manifest says {stated}", expected=stated, found=totals)
    if max(totals) > MAX_ITEMS:
        raise corrupt(path, f"{max(totals)} items in all; at most {MAX_ITEMS}")
    num_bytes = layout.file_bytes(table_counts(table))
    if sum(num_bytes.sum(axis=1).tolist()) != manifest.totals.bytes:
        raise corrupt(path, f"shards hold {num_bytes.sum()} bytes, the manifest says {manifest.totals.bytes}")
    if 8 * int(num_blocks(num_bytes).sum()) != manifest.hashes.bytes:
        raise corrupt(path, f"{manifest.hashes.bytes} bytes of block hashes do not match the shards")
    if (found := fingerprint(manifest, table)) != manifest.fingerprint:
        raise corrupt(path, "the fingerprint is not that of the contents", expected=manifest.fingerprint, found=found)
    return table


def table_counts(table: Array) -> Int64s:
    """(shards, 1 + axes): records, then rows of each axis."""
    return table[:, 2:].astype(np.int64)
