"""What the files of a table hold, looked at before any work: all footers are read, columns found, types agreed.

Columns are compared by what they mean here: a dictionary is its values, a large string a string, an all-null column
anything. Files that differ in the type of a column that is used are reported, grouped, with their names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import ConfigError, SourceError
from millrace.prepare.table.options import FILE_NAME, TableOptions
from millrace.prepare.table.read.time_format import time_type
from millrace.prepare.table.read.where import columns_of

UNITS = ("s", "ms", "us", "ns")
PANDAS_INDEX = re.compile(
    r"__index_level_\d+__"
)  # row numbers that pandas writes along: nobody means them as a feature
MAX_NAMED = 10  # files shown of each group


class Role(msgspec.Struct, frozen=True):
    """What the preparation does with the columns it reads."""

    features: tuple[str, ...]  # the columns of ``values`` that come from the files, in order
    inputs: tuple[str, ...]  # those a model is given
    target: tuple[str, ...]
    static: tuple[str, ...]  # numbers
    static_categorical: tuple[str, ...]
    categorical: tuple[str, ...]
    known_future: tuple[str, ...]
    needed: tuple[str, ...]  # every column that is read


class Schema(msgspec.Struct, frozen=True):
    """The agreed types, as pyarrow writes them, and what each column is for."""

    role: Role
    types: dict[str, str]
    time_unit: str | None  # s, ms, us, ns, D; None: the times are plain numbers
    time_dtype: str  # of the stored times
    time_zone: str | None
    raw_dtype: str  # in which values wait between the passes


def logical(kind: Any) -> Any:
    """The type a column has, whatever way it is stored in the file."""
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
    plain = {
        "date32[day]": pyarrow.date32(),
        "date64[ms]": pyarrow.date64(),
        "double": pyarrow.float64(),
        "null": pyarrow.null(),
    }
    if text in plain:
        return plain[text]
    return pyarrow.float64() if text.startswith("decimal") else pyarrow.type_for_alias(text)


def without_null_types(schema: Any, types: Mapping[str, Any]) -> Any:
    """A schema whose columns without any value have the type that other files give them."""
    import pyarrow

    for k, field in enumerate(schema):
        if pyarrow.types.is_null(field.type) and field.name in types:
            schema = schema.set(k, field.with_type(types[field.name]))
    return schema


def is_number(kind: Any) -> bool:
    import pyarrow

    return bool(
        pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind)
    )  # fmt: skip


def _is_label(kind: Any) -> bool:
    """Whether values of this type can be told apart by a text."""
    from pyarrow import types as t

    return bool(
        is_number(kind) or t.is_string(kind) or t.is_boolean(kind) or t.is_temporal(kind) or t.is_null(kind) or t.is_binary(kind)
    )  # fmt: skip


def agree(files: Sequence[tuple[str, Any]], options: TableOptions, partitions: Iterable[str]) -> Schema:
    """One schema for all files, each given as (name, pyarrow schema); refused where they do not fit together."""
    import pyarrow

    found = _types_by_column(files)
    role = _roles(found, options, partitions)
    _refuse_missing(files, role)
    types: dict[str, Any] = {}
    for name in role.needed:
        kinds = [kind for kind in found[name] if not pyarrow.types.is_null(kind)]
        types[name] = kinds[0] if len(kinds) == 1 else _widened(kinds) if kinds else pyarrow.null()
    drifted = [name for name in role.needed if len([k for k in found[name] if not pyarrow.types.is_null(k)]) > 1]
    impossible = [name for name in drifted if types[name] is None]
    if impossible or (drifted and not options.widen):
        raise _drift(files, drifted, impossible, types)
    for name in (*role.features, *role.static):
        if not (is_number(types[name]) or pyarrow.types.is_boolean(types[name]) or pyarrow.types.is_null(types[name])):
            what = "--target" if name in options.target else "column"
            numbers = [column for column in role.features if column not in options.target and is_number(types[column])]
            another = f"choose another ({', '.join(numbers)}), " if numbers else ""
            raise ConfigError(
                f"{what} {name!r} is {types[name]}; a {what.removeprefix('--').replace('column', 'feature')} is a number: "
                + (f"{another}give --decimal ',' if that is its decimal sign, or make it a number with --transform"
                   if what == "--target" else "leave it out, or give it as --categorical")
            )  # fmt: skip
    entity = () if FILE_NAME in options.entity else options.entity
    for what, names in (("entity", entity), ("categorical", role.categorical), ("static", role.static_categorical)):
        for name in names:
            if not _is_label(types[name]):
                raise ConfigError(
                    f"--{what} {name!r} is {types[name]}; expected texts or numbers: make one with --transform"
                )
    when = types[options.time]
    if options.time_format is not None and (pyarrow.types.is_string(when) or pyarrow.types.is_integer(when)):
        when = time_type(options.time_format)
    unit, dtype, zone = _time(options.time, when)
    raw = "float32" if all(str(types[name]) in ("float", "halffloat", "null") for name in role.features) else "float64"
    return Schema(role, {name: str(kind) for name, kind in types.items()}, unit, dtype, zone, raw)


def _types_by_column(files: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    seen: set[Any] = set()
    for name, schema in files:
        if schema in seen:
            continue
        seen.add(schema)
        for field in schema:
            if schema.names.count(field.name) > 1:
                raise SourceError(f"{name!r} has two columns named {field.name!r}; rename one", source=name)
            kinds = found.setdefault(field.name, [])
            if (kind := logical(field.type)) not in kinds:
                kinds.append(kind)
    return found


def _roles(found: Mapping[str, list[Any]], options: TableOptions, partitions: Iterable[str]) -> Role:
    import pyarrow

    def check(names: Iterable[str], what: str) -> None:
        for name in names:
            if name not in found:
                raise ConfigError(f"--{what} {name!r} is no column; {_meant(name, found)}there are {', '.join(found)}")

    entity = () if FILE_NAME in options.entity else options.entity
    where = columns_of(options.where) if options.where else []
    check(entity, "entity")
    check([options.time], "time")
    for what in ("features", "target", "static", "categorical"):
        check(getattr(options, what) or (), what.replace("_", "-"))
    check(where, "where")
    taken = {*entity, options.time, *options.static, *options.categorical, *partitions}
    if options.features is not None:
        inputs = options.features
    else:
        numeric = [name for name, kinds in found.items() if any(is_number(kind) for kind in kinds)]
        inputs = tuple(name for name in numeric if name not in taken and not PANDAS_INDEX.fullmatch(name))
    features = (*inputs, *(name for name in options.target if name not in inputs))
    if not features:
        raise ConfigError(f"no numeric columns are left for --features; there are {', '.join(found)}")

    def is_text(name: str) -> bool:
        return any(not is_number(kind) and not pyarrow.types.is_null(kind) for kind in found[name])

    static = tuple(name for name in options.static if not is_text(name))
    for name in options.nulls:
        if name not in (*features, "*"):
            raise ConfigError(f"--nulls names {name!r}, which is no feature; there are {', '.join(features)}")
    for part in options.calendar:
        if both := sorted({f"{part}_sin", f"{part}_cos"} & set(features)):
            raise ConfigError(f"--calendar {part} makes {both[0]!r}, which is a column already; leave one of them out")
    known = set(features) | set(options.categorical)
    for name in options.known_future:
        if name not in known:
            raise ConfigError(f"--known-future {name!r} is neither a feature nor categorical; it has {sorted(known)}")
    needed = dict.fromkeys((*entity, options.time, *features, *options.static, *options.categorical, *where))
    return Role(
        features, inputs, options.target, static, tuple(name for name in options.static if name not in static),
        options.categorical, options.known_future, tuple(needed),
    )  # fmt: skip


def _meant(name: str, known: Iterable[str]) -> str:
    """The column that may have been meant."""
    plain = {column.casefold().strip(): column for column in known}
    near = difflib.get_close_matches(name.casefold().strip(), plain, n=1, cutoff=0.7)
    return f"did you mean {plain[near[0]]!r}? " if near else ""


def _refuse_missing(files: Sequence[tuple[str, Any]], role: Role) -> None:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, schema in files:
        missing = tuple(column for column in role.needed if column not in schema.names)
        if missing:
            groups.setdefault(missing, []).append(name)
    if groups:
        told = " | ".join(
            f"{_named(names)} {'lacks' if len(names) == 1 else 'lack'} {', '.join(missing)}"
            for missing, names in groups.items()
        )
        raise SourceError(
            f"columns are missing in {sum(map(len, groups.values()))} of {len(files)} files: {told}; "
            "leave those columns out, or those files: --exclude, or --on-error skip where the column was named"
        )


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} file{'s' * (len(names) > 1)} ({shown}{more})"


def _drift(
    files: Sequence[tuple[str, Any]], drifted: Sequence[str], impossible: Sequence[str], types: Mapping[str, Any]
) -> SourceError:
    """The difference between files, grouped by schema, with what could be done about it."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, schema in files:
        groups.setdefault(tuple(str(logical(schema.field(column).type)) for column in drifted), []).append(name)
    told = " | ".join(
        f"{_named(names)}: {', '.join(f'{c} {k}' for c, k in zip(drifted, kinds, strict=True))}"
        for kinds, names in sorted(groups.items(), key=lambda item: -len(item[1]))
    )
    if impossible:
        remedy = f"{', '.join(impossible)} cannot be one type: fix those files, or leave the column out"
    else:
        safe = ", ".join(f"{name} as {types[name]}" for name in drifted)
        remedy = f"--widen takes {safe}, which loses nothing"
    return SourceError(f"the files differ in the types of {', '.join(drifted)}: {told}; {remedy}")


def _widened(kinds: Sequence[Any]) -> Any:
    """A type that holds the values of all of them; None where there is none."""
    import pyarrow

    t = pyarrow.types
    if all(t.is_timestamp(kind) for kind in kinds):
        if len({kind.tz is None for kind in kinds}) > 1:
            return None  # a local time and an instant cannot be put in one order
        unit = max((kind.unit for kind in kinds), key=UNITS.index)
        return pyarrow.timestamp(unit, None if kinds[0].tz is None else "UTC")
    if all(t.is_integer(kind) for kind in kinds):
        return None if pyarrow.uint64() in kinds else pyarrow.int64()
    if all(is_number(kind) for kind in kinds):
        small = all(t.is_floating(kind) and kind.bit_width <= 32 for kind in kinds)
        return pyarrow.float32() if small else pyarrow.float64()
    return None


def _time(name: str, kind: Any) -> tuple[str | None, str, str | None]:
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
