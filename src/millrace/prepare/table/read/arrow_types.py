"""Arrow types by what they mean for a table (numbers, labels, times), and small functions on Arrow arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array

UNITS = ("s", "ms", "us", "ns")


def logical(kind: Any) -> Any:
    """The type of a column's values, however the file stores them."""
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if pyarrow.types.is_large_string(kind) or str(kind) == "string_view":
        return pyarrow.string()
    return kind


def type_of(text: str) -> Any:
    """A pyarrow type from its name, as far as reading needs it."""
    import pyarrow

    if text.startswith("timestamp["):
        unit, _, zone = text[10:-1].partition(", tz=")
        return pyarrow.timestamp(unit, zone or None)
    return pyarrow.float64() if text.startswith("decimal") else pyarrow.type_for_alias(text)


def without_null_types(schema: Any, types: Mapping[str, Any]) -> Any:
    """A schema in which all-null columns have the type that other files give them."""
    import pyarrow

    for k, field in enumerate(schema):
        if pyarrow.types.is_null(field.type) and field.name in types:
            schema = schema.set(k, field.with_type(types[field.name]))
    return schema


def is_number(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind))


def is_label(kind: Any) -> bool:
    """Whether values of this type can be written as a text."""
    from pyarrow import types as t

    return bool(
        is_number(kind) or t.is_string(kind) or t.is_boolean(kind) or t.is_temporal(kind) or t.is_null(kind) or t.is_binary(kind)
    )  # fmt: skip


def common_type(kinds: Sequence[Any]) -> Any:
    """A type that holds the values of all types; None where there is none."""
    import pyarrow

    t = pyarrow.types
    if len(kinds) < 2:
        return kinds[0] if kinds else pyarrow.null()
    if all(t.is_timestamp(kind) or t.is_date(kind) for kind in kinds):
        zones = [getattr(kind, "tz", None) for kind in kinds]
        if len({zone is None for zone in zones}) > 1:
            return None  # a local time and an instant cannot be put in one order
        unit = max((kind.unit if t.is_timestamp(kind) else "s" for kind in kinds), key=UNITS.index)
        return pyarrow.timestamp(unit, None if zones[0] is None else "UTC")
    if all(t.is_integer(kind) for kind in kinds):
        return None if pyarrow.uint64() in kinds else pyarrow.int64()
    if all(is_number(kind) for kind in kinds):
        small = all(t.is_floating(kind) and kind.bit_width <= 32 for kind in kinds)
        return pyarrow.float32() if small else pyarrow.float64()
    return None


def time_storage(name: str, kind: Any) -> tuple[str | None, str, str | None]:
    """Unit, storage type and zone of the times."""
    import pyarrow

    if pyarrow.types.is_timestamp(kind):
        return kind.unit, "int64", kind.tz
    if pyarrow.types.is_date(kind):
        return "D", "int64", None
    if pyarrow.types.is_integer(kind) and kind != pyarrow.uint64():
        return None, "int64", None
    if pyarrow.types.is_floating(kind):
        return None, "float64", None
    raise ConfigError(
        f"--time {name!r} is {kind}; expected timestamps, dates or numbers: name another column, the format of its texts with "
        "--time-format, such as '%d/%m/%Y %H:%M', or convert it with --transform"
    )


def is_alike(one: Any, other: Any) -> bool:
    """Whether columns of both types are read the same way: --widen may change the width or the unit."""
    from pyarrow import types as t

    families = (is_number, t.is_timestamp)
    return one == other or t.is_null(one) or t.is_null(other) or any(is_(one) and is_(other) for is_ in families)


def without_empty_texts(table: Any) -> Any:
    """The table with nulls for empty texts, which a CSV file cannot tell apart."""
    import pyarrow
    from pyarrow import compute

    for k, field in enumerate(table.schema):
        if field.type == pyarrow.string():
            texts = compute.if_else(
                compute.equal(table.column(k), ""), pyarrow.scalar(None, field.type), table.column(k)
            )
            table = table.set_column(k, field, texts)
    return table


def flatten(column: Any) -> Any:
    return column.combine_chunks() if hasattr(column, "combine_chunks") else column


def null_rows(arrays: Iterable[Any]) -> Any:
    """A mask of the rows where one of the arrays is null or not finite; None where none is."""
    import pyarrow

    masks = []
    for array in arrays:
        if pyarrow.types.is_floating(array.type):
            masks.append(~np.isfinite(array.to_numpy(zero_copy_only=False)))
        elif array.null_count:
            masks.append(array.is_null().to_numpy(zero_copy_only=False))
    missing = np.logical_or.reduce(masks) if masks else None
    return missing if missing is not None and missing.any() else None


def as_texts(array: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array if logical(array.type) == pyarrow.string() else array.cast(pyarrow.string())


def encode_texts(array: Any) -> tuple[list[str], Array]:
    """(distinct texts, code of each row, -1 for null)."""
    import pyarrow

    if not pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_encode()  # then only the distinct ones become text
    codes = array.indices
    if codes.null_count:
        codes = codes.fill_null(-1)
    return as_texts(array.dictionary).to_pylist(), codes.to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
