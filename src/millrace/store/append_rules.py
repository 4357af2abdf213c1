"""What an append may change of a store, and what it may not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.store import manifest as manifests
from millrace.store.manifest import Manifest


def append_fields(given: Mapping[str, Any], old: Manifest, out: Path) -> dict[str, Any]:
    """The fields of a snapshot that continues ``old``: its identity stays, meta and splits may gain."""
    columns = {name: manifests.as_column(entry) for name, entry in old.columns.items()}
    # A dictionary that is appended to may grow: codes that exist keep their meaning.
    grown = {name: column if column.values is None else column.with_values(None) for name, column in columns.items()}
    for name, column in (given["columns"] or {}).items():
        if name not in grown or grown[name] != column.with_values(None):
            raise ConfigError(f"{out} has column {name!r} as {columns.get(name)}; {column} cannot be appended")
        if column.values is not None:
            if column.values[: len(columns[name].values or ())] != columns[name].values:
                raise ConfigError(f"values of {name!r} must begin with those {out} has, so that codes stay")
            grown[name] = column
    if given["columns"] is not None and given["columns"].keys() != grown.keys():
        raise ConfigError(f"{out} has columns {list(grown)}; got {list(given['columns'])}")
    identity = {key: getattr(old, key) for key in ("kind", "tokenizer", "scaling", "cuts")}
    splits = tuple(dict.fromkeys((*old.splits, *given["splits"])))
    return {**identity, "columns": grown, "splits": tuple(splits), "meta": {**old.meta, **given["meta"]}}
