"""Small functions on Arrow arrays, for the reader of tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from millrace.prepare.table.read.arrow_types import is_number, logical
from millrace.ragged import Array


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
