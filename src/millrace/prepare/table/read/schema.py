"""One schema for all files of a table: columns found, types agreed, roles given, before any work.

Types are compared by what they mean: a dictionary is its values, a large string a string, an all-null column anything.
Files whose types do not fit together are reported in groups, with their names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import ConfigError, SourceError, did_you_mean
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.arrow_types import common_type, is_label, is_number, logical, time_storage
from millrace.prepare.table.read.time_format import time_type
from millrace.prepare.table.read.where import columns_of

# Row numbers that pandas writes along: nobody means them as a feature. In CSV files they have no name.
PANDAS_INDEX = re.compile(r"__index_level_\d+__")
CSV_INDEX = ("", "Unnamed: 0")
MAX_NAMED = 10  # files shown of each group


class Role(msgspec.Struct, frozen=True):
    """The columns that are read, by what they are for."""

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


def agree(
    files: Sequence[tuple[str, Any]], options: TableOptions, partitions: Iterable[str], guessed: Collection[str] = ()
) -> Schema:
    """One schema for all files, each given as (name, pyarrow schema); refused where they do not fit together.

    Types of the ``guessed`` files, which are CSV, give way to a wider type. Those of other files do so with ``--widen``.
    """
    import pyarrow

    kinds = _types_by_column(files)
    everywhere = set.intersection(*(set(schema.names) for _, schema in files))
    role = _roles(kinds, options, partitions, everywhere)
    _refuse_missing(files, role)
    stated = _types_by_column([file for file in files if file[0] not in guessed])
    types = {
        name: common_type(_one_form(name, kinds[name], stated.get(name, ()), options, role)) for name in role.needed
    }
    drifted = [name for name in role.needed if len(stated.get(name, ())) > 1]
    impossible = [name for name in role.needed if types[name] is None]
    if impossible or (drifted and not options.widen):
        raise _drift(files, list(dict.fromkeys((*drifted, *impossible))), impossible, types, guessed)
    _check_types(types, role, options)
    when = types[options.time]
    if options.time_format is not None and (pyarrow.types.is_string(when) or pyarrow.types.is_integer(when)):
        when = time_type(options.time_format)
    unit, dtype, zone = time_storage(options.time, when)
    raw = "float32" if all(str(types[name]) in ("float", "halffloat", "null") for name in role.features) else "float64"
    return Schema(role, {name: str(kind) for name, kind in types.items()}, unit, dtype, zone, raw)


def _one_form(
    name: str, kinds: Sequence[Any], stated: Sequence[Any], options: TableOptions, role: Role
) -> Sequence[Any]:
    """The types of a column as it is read: times parsed by ``--time-format``, labels of CSV files as text."""
    import pyarrow

    t = pyarrow.types
    if len(kinds) < 2:
        return kinds
    if name == options.time and options.time_format is not None:
        form = time_type(options.time_format)
        return list(dict.fromkeys(form if t.is_string(kind) or t.is_integer(kind) else kind for kind in kinds))
    is_label = name in (*options.entity, *role.categorical, *role.static_categorical)
    if is_label and len(stated) == 1 and (t.is_string(stated[0]) or t.is_integer(stated[0])):
        return [pyarrow.string()]
    return kinds


def _check_types(types: Mapping[str, Any], role: Role, options: TableOptions) -> None:
    """Refuses columns whose type does not fit their role."""
    import pyarrow

    for name in (*role.features, *role.static):
        if is_number(types[name]) or pyarrow.types.is_boolean(types[name]) or pyarrow.types.is_null(types[name]):
            continue
        if name in options.target:
            numbers = [column for column in role.features if column not in options.target and is_number(types[column])]
            another = f"choose another ({', '.join(numbers)}), " if numbers else ""
            raise ConfigError(
                f"--target {name!r} is {types[name]}; a target is a number: {another}give --decimal ',' if that is its decimal "
                "sign, or make it a number with --transform"
            )
        raise ConfigError(
            f"column {name!r} is {types[name]}; a feature is a number: leave it out, or give it as --categorical"
        )
    labels = {"entity": options.entity_columns, "categorical": role.categorical, "static": role.static_categorical}
    for what, names in labels.items():
        for name in names:
            if not is_label(types[name]):
                raise ConfigError(
                    f"--{what} {name!r} is {types[name]}; expected texts or numbers: make one with --transform"
                )


def _types_by_column(files: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    """The types that each column has in some file, all-null ones aside; without a type it is null in all."""
    import pyarrow

    first: dict[Any, str] = {}
    for name, schema in files:
        first.setdefault(schema, name)
    found: dict[str, list[Any]] = {}
    for schema, name in first.items():
        counts = Counter(schema.names)
        for field in schema:
            if counts[field.name] > 1:
                raise SourceError(f"{name!r} has two columns named {field.name!r}; rename one", source=name)
            kinds, kind = found.setdefault(field.name, []), logical(field.type)
            if kind not in kinds and not pyarrow.types.is_null(kind):
                kinds.append(kind)
    return found


def _roles(
    found: Mapping[str, list[Any]], options: TableOptions, partitions: Iterable[str], everywhere: Collection[str]
) -> Role:
    """What each column is for; ``everywhere`` are the columns that all files have."""
    entity, where = options.entity_columns, columns_of(options.where) if options.where else []
    named = {
        "entity": entity, "time": [options.time], "features": options.features or (), "target": options.target,
        "static": options.static, "categorical": options.categorical, "where": where,
    }  # fmt: skip
    for what, names in named.items():
        for name in names:
            if name not in found:
                raise ConfigError(
                    f"--{what} {name!r} is no column{did_you_mean(name, found)}; there are {', '.join(found)}"
                )
    taken = {*entity, options.time, *options.static, *options.categorical, *partitions}
    if options.features is not None:
        inputs = options.features
    else:
        numeric = [name for name, kinds in found.items() if any(is_number(kind) for kind in kinds)]
        indexes = {name for name in numeric if PANDAS_INDEX.fullmatch(name)} | {*CSV_INDEX}.difference(everywhere)
        inputs = tuple(name for name in numeric if name not in taken | indexes)
    features = (*inputs, *(name for name in options.target if name not in inputs))
    if not features:
        raise ConfigError(
            f"no numeric columns are left for --features; there are {', '.join(found)}: give --decimal ',' if that is the "
            "decimal sign of the numbers"
        )
    static = tuple(name for name in options.static if all(is_number(kind) for kind in found[name]))
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


def _refuse_missing(files: Sequence[tuple[str, Any]], role: Role) -> None:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, schema in files:
        missing = tuple(column for column in role.needed if column not in schema.names)
        if missing:
            groups.setdefault(missing, []).append(name)
    if groups:
        missing_in = " | ".join(
            f"{_list_files(names)} {'lacks' if len(names) == 1 else 'lack'} {', '.join(missing)}"
            for missing, names in groups.items()
        )
        raise SourceError(
            f"columns are missing in {sum(map(len, groups.values()))} of {len(files)} files: {missing_in}; "
            "leave those columns out, or those files: --exclude, or --on-error skip where the column was named"
        )


def _list_files(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} file{'s' * (len(names) > 1)} ({shown}{more})"


def _drift(
    files: Sequence[tuple[str, Any]],
    drifted: Sequence[str],
    impossible: Sequence[str],
    types: Mapping[str, Any],
    guessed: Collection[str],
) -> SourceError:
    """The error for types that differ between files, grouped by type, with the remedy."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, schema in files:
        groups.setdefault(tuple(str(logical(schema.field(column).type)) for column in drifted), []).append(name)
    shown = " | ".join(
        f"{_list_files(names)}: {', '.join(f'{c} {k}' for c, k in zip(drifted, kinds, strict=True))}"
        for kinds, names in sorted(groups.items(), key=lambda item: -len(item[1]))
    )
    if impossible:
        remedy = f"{', '.join(impossible)} cannot be one type: fix those files, or leave the column out"
        if guessed:
            remedy += "; if CSV files are written differently, prepare one kind and add the others with --append"
    else:
        safe = ", ".join(f"{name} as {types[name]}" for name in drifted)
        remedy = f"--widen takes {safe}, which loses nothing"
    return SourceError(f"the files differ in the types of {', '.join(drifted)}: {shown}; {remedy}")
