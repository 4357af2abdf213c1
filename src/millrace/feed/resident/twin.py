"""The twin of a view whose samples are places: where their rows begin on the device, not the rows themselves.

The core makes its batches as it makes any other, in threads and many at a time; a GPU then gathers the rows. Rows that are
not on the device travel beside the places, as they are stored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from millrace.feed.resident.columns import Table
from millrace.gather.gather import Field
from millrace.view.compose import Concat, Subset
from millrace.view.view import View

ANY_LENGTH = 1 << 62


def start_name(number: int) -> str:
    return f"start {number}"


def length_name(number: int) -> str:
    return f"length {number}"


def rest_name(number: int) -> str:
    return f"rest {number}"


def twin_of(view: View, tables: Sequence[Table]) -> View:
    """The same samples of the same stores, with other fields."""
    return _twin(view, tables, [0])


def _twin(view: View, tables: Sequence[Table], leaf: list[int]) -> View:
    found = copy.copy(view)  # without what is computed: see View.__getstate__
    if isinstance(found, Subset):
        found.view = _twin(found.view, tables, leaf)
        found.fields = found.view.fields
    elif isinstance(found, Concat):
        found.views = tuple(_twin(own, tables, leaf) for own in found.views)
        found.fields = found.views[0].fields
    else:
        found.fields = _fields(view, tables, leaf[0])
        leaf[0] += 1
    return found


def _fields(leaf: View, tables: Sequence[Table], number: int) -> tuple[Field, ...]:
    """What the places of a leaf are; fields that the host makes stay as they are."""
    found: list[Field] = []
    where = np.dtype(np.int64)
    for k, table in enumerate(tables):
        mine, column = leaf.fields[table.position], table.columns[table.which[number]]
        name, axis = mine.column, mine.axis
        found.append(Field(start_name(k), name, axis, where, first=table.bases[number], pad=1, measure="start"))
        if any(field.length is None for field in table.fields):
            found.append(Field(length_name(k), name, axis, where, pad=ANY_LENGTH, measure="lengths"))
        if not table.is_whole:
            stored = column.stored
            found.append(Field(rest_name(k), name, axis, stored.dtype, tuple(stored.shape[1:]), first=column.num_held))
    return (*found, *(field for field in leaf.fields if field.axis is None or field.measure is not None))
