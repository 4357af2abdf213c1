"""What Windows delivers beside x and y when asked: times, masks, categories, static features, what is known ahead.

Each is a column of the store under a fixed name; windows.py calls ``extra_fields`` with the names of ``include``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.errors import ConfigError, did_you_mean
from millrace.gather.gather import Field
from millrace.view.view import StoreLike, column_field

# In the order they are delivered: row columns first.
EXTRAS = ("time", "mask", "categorical", "known_future", "static", "static_categorical")


@dataclass(frozen=True)
class Places:
    """Which rows of a window are lookback and horizon, and which features of a row are inputs and target."""

    x: Field
    y: Field
    features: Sequence[str] | None


def as_include(include: str | Sequence[str]) -> tuple[str, ...]:
    """The extras asked for, each once, in the order they are delivered."""
    names = (include,) if isinstance(include, str) else tuple(include)
    for name in names:
        if name not in EXTRAS:
            near, known = did_you_mean(name, EXTRAS), ", ".join(EXTRAS)
            raise ConfigError(f"include={name!r} is unknown{near}; expected some of {known}")
    return tuple(name for name in EXTRAS if name in names)


def meta_names(store: StoreLike, key: str) -> list[str]:
    """Names that the store keeps under a key of its meta; none where it does not."""
    names = store.meta.get(key)
    names = [names] if isinstance(names, str) else names
    return [str(name) for name in names] if isinstance(names, (list, tuple, dict)) else []


def picked(field: Field, numbers: tuple[int, ...] | None) -> Field:
    """Only some features of a row; all of them in order need no picking."""
    if numbers is None or (field.is_single and numbers == (0,)):
        return field
    return replace(field, tail=(len(numbers),), items=numbers)


def extra_fields(store: StoreLike, include: Sequence[str], places: Places) -> dict[str, tuple[Field, Sequence[str]]]:
    """The fields of the extras asked for, and the names of what stands on their last axis where it has any."""
    found: dict[str, tuple[Field, Sequence[str]]] = {}
    for name in include:
        if name == "known_future":
            found.update(_known_future(store, places))
        elif name == "time":
            for key, part in (("time", places.x), ("y_time", places.y)):
                found[key] = (_of_rows(store, "time", key, part, tail=0), ())
        elif name == "mask":
            for key, part in (("mask", places.x), ("y_mask", places.y)):
                found[key] = (_mask(store, key, part), ())
        elif name == "categorical":
            field = _of_rows(store, name, name, places.x, tail=1)
            found[name] = (field, meta_names(store, name))
        else:
            _check_there(store, name, per_row=False)
            found[name] = (column_field(store, name), meta_names(store, name))
    return found


def _of_rows(store: StoreLike, column: str, key: str, part: Field, *, tail: int) -> Field:
    """The rows of a part of the window (lookback or horizon) of another row column."""
    _check_there(store, column, per_row=True)
    field = column_field(store, column, key=key, first=part.first, length=part.length)
    if field.axis != part.axis:
        raise ConfigError(
            f"column {column!r} has axis {field.axis!r}, {part.column!r} has {part.axis!r}; both need one"
        )
    if tail == 1 and not field.tail:
        field = replace(field, tail=(1,), is_single=True)  # a single number per row is a row of one
    if len(field.tail) != tail:
        raise ConfigError(f"column {column!r} has shape {field.tail} per row; expected {tail} dimensions")
    return field


def _mask(store: StoreLike, key: str, part: Field) -> Field:
    """Of the same features as x or y."""
    field = _of_rows(store, "mask", key, part, tail=1)
    values = store.layout.columns[part.column].shape
    if (store.layout.columns["mask"].shape or (1,)) != (values or (1,)):
        raise ConfigError(f"column 'mask' has shape {field.tail} per row, {part.column!r} {values}; both need the same")
    return replace(field, tail=part.tail, items=part.items)


def _known_future(store: StoreLike, places: Places) -> dict[str, tuple[Field, Sequence[str]]]:
    """Of the horizon: the features and the categories that are known before it."""
    known, categories = meta_names(store, "known_future"), meta_names(store, "categorical")
    features = places.features or ()
    if not known:
        raise ConfigError("include='known_future', but meta['known_future'] names nothing; name it when preparing")
    if unknown := [name for name in known if name not in features and name not in categories]:
        raise ConfigError(
            f"known_future names {unknown[0]!r}; the store has features {', '.join(features) or 'without names'} and "
            f"categorical {', '.join(categories) or 'nothing'}"
        )
    found: dict[str, tuple[Field, Sequence[str]]] = {}
    if numeric := [name for name in known if name in features]:
        items = tuple(features.index(name) for name in numeric)
        whole = replace(places.y, name="known_future", tail=(len(features),), items=None)
        field = picked(whole, items)
        found["known_future"] = (field, numeric)
    if coded := [name for name in known if name not in features]:
        items = tuple(categories.index(name) for name in coded)
        field = _of_rows(store, "categorical", "known_categorical", places.y, tail=1)
        if max(items) >= field.tail[0]:
            raise ConfigError(
                f"meta['categorical'] has {len(categories)} names for {field.tail[0]} columns: give one each"
            )
        found["known_categorical"] = (picked(field, items), coded)
    return found


def _check_there(store: StoreLike, column: str, *, per_row: bool) -> None:
    known = store.layout.columns
    if column not in known or (known[column].axis is not None) != per_row:
        there = [name for name, found in known.items() if (found.axis is not None) == per_row]
        kind = "row" if per_row else "record"
        raise ConfigError(
            f"include={column!r} needs a {kind} column {column!r}; the store has {', '.join(there) or f'no {kind} columns'}"
        )
