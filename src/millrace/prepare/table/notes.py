"""Notes on what a user may not expect: columns that are left out, or mostly empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millrace.prepare.table.read.arrow_types import is_number, logical
from millrace.prepare.table.read.schema import Role

MAX_NAMES = 8
SPARSE = 0.5  # a note names columns with a larger share of missing values


def unused_note(schemas: Iterable[Any], role: Role) -> str | None:
    """Columns without numbers and without a role, where every numeric column is a feature."""
    from pyarrow import types

    kinds = {field.name: logical(field.type) for schema in set(schemas) for field in schema}
    unused = {
        name: kind
        for name, kind in sorted(kinds.items())
        if name not in role.needed and not is_number(kind) and not types.is_null(kind)
    }
    if not unused:
        return None
    texts = [name for name, kind in unused.items() if types.is_string(kind) or types.is_boolean(kind)]
    how = f"; --categorical {','.join(texts[:MAX_NAMES])} takes them as categories" if texts else ""
    names = list_names([f"{name} ({kind})" for name, kind in unused.items()])
    return f"columns left out, since they hold no numbers: {names}{how}"


def sparse_note(missing: Mapping[str, float]) -> str | None:
    """Features that are mostly missing, with the share of missing values."""
    sparse = [f"{name} ({share:.0%})" for name, share in missing.items() if share > SPARSE]
    how = "they are filled: leave them out with --features, or mark them: --nulls COLUMN=mask"
    return f"mostly missing: {list_names(sparse)}; {how}" if sparse else None


def list_names(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
