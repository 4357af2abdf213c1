"""The options of ``prepare table``, checked before any file is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import ConfigError
from millrace.prepare.table.read.table_file import check_form
from millrace.prepare.table.read.time_format import check_format

FILE_NAME = "@file"  # as ``entity``: each file is one entity, named like it
SCALES = ("standard", "minmax", "robust", "none")
DTYPES = ("float32", "float16", "bfloat16")
POLICIES = ("ffill", "drop", "interpolate", "mask", "value:NUMBER")
DUPLICATES = ("error", "first", "last", "mean")
CALENDAR = ("minute", "hour", "dayofweek", "dayofmonth", "dayofyear", "month")
# These decide which rows are read. All others may change between two attempts: the rows already read stay valid.
READING = ("entity", "time", "features", "target", "static", "categorical", "where", "transform")
# Fixed steps only: months and business days have no constant length.
STEPS_NS = {
    "ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9, "D": 86400 * 10**9, "W": 7 * 86400 * 10**9,
}  # fmt: skip


class TableOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what the store holds."""

    entity: tuple[str, ...] = (FILE_NAME,)
    time: str
    features: tuple[str, ...] | None = None  # None: every numeric column without another role
    target: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    known_future: tuple[str, ...] = ()
    where: str | None = None
    transform: str | None = None  # module:function, a pure function on Arrow tables
    nulls: dict[str, str] = {}  # policy by column; "*" is every other one
    duplicates: str = "error"
    freq: str | None = None
    min_rows: int = 1
    calendar: tuple[str, ...] = ()
    scale: str = "standard"
    per_entity: bool = False
    fit_on: str = "train"
    dtype: str = "float32"
    split_by: str = "time"
    val_from: str | None = None
    test_from: str | None = None
    val: float = 0.0
    test: float = 0.0
    val_last: float = 0.0
    test_last: float = 0.0
    val_entities: tuple[str, ...] = ()
    test_entities: tuple[str, ...] = ()
    gap: int = 0
    on_error: str = "stop"
    widen: bool = False
    delimiter: str | None = None  # of CSV files; None: found in the first line of each
    encoding: str | None = None  # of CSV files; None: UTF-8
    decimal: str = "."  # of numbers in CSV files
    time_format: str | None = None  # of times written as text, in codes of strptime; None: ISO 8601
    strict: bool = False
    shard_bytes: int = 256 << 20

    def check(self) -> None:
        _one_of("--scale", self.scale, SCALES)
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--duplicates", self.duplicates, DUPLICATES)
        _one_of("--fit-on", self.fit_on, ("train", "all"))
        _one_of("--split-by", self.split_by, ("time", "entity"))
        _one_of("--on-error", self.on_error, ("stop", "skip"))
        check_form(self.delimiter, self.encoding, self.decimal)
        if self.time_format is not None:
            check_format(self.time_format)
        for name in self.calendar:
            _one_of("--calendar", name, CALENDAR)
        if len(set(self.calendar)) != len(self.calendar):
            raise ConfigError(f"--calendar names a part twice: {','.join(self.calendar)}")
        for column, policy in self.nulls.items():
            parse_policy(policy, column)
        if self.freq is not None:
            step_ns(self.freq)
        if not self.time or not self.entity:
            raise ConfigError("entity= and time= must name columns; for one file per entity leave entity out")
        if FILE_NAME in self.entity and len(self.entity) > 1:
            raise ConfigError(f"--entity {','.join(self.entity)}: {FILE_NAME} stands alone, or give columns")
        if self.min_rows < 1 or self.gap < 0 or self.shard_bytes < 1:
            raise ConfigError(
                f"min_rows={self.min_rows}, gap={self.gap}, shard_bytes={self.shard_bytes}; expected 1, 0 and 1 or more"
            )
        self._check_parts()
        self._check_splits()

    def _check_parts(self) -> None:
        """Each column has one role; a target may also be a feature."""
        parts = {
            "entity": self.entity, "time": (self.time,), "features": self.features or (), "static": self.static,
            "categorical": self.categorical,
        }  # fmt: skip
        roles: dict[str, str] = {}
        for part, names in parts.items():
            for name in names:
                if name in roles:
                    raise ConfigError(f"column {name!r} is given as {roles[name]} and as {part}; choose one")
                roles[name] = part
        for name in self.target:
            if roles.get(name, "features") != "features":
                raise ConfigError(f"--target {name!r} is also {roles[name]}; a target is a number per row")
        for names, what in ((self.target, "target"), (self.known_future, "known-future")):
            if len(set(names)) != len(names):
                raise ConfigError(f"--{what} names a column twice: {','.join(names)}")
        if self.features is not None and not self.features and not self.target:
            raise ConfigError("--features names no column; leave it out for every numeric one")

    def _check_splits(self) -> None:
        for name in ("val", "test", "val_last", "test_last"):
            if not 0 <= (share := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={share}; expected a share from 0 to less than 1")
        if self.val + self.test >= 1 or self.val_last + self.test_last >= 1:
            raise ConfigError("the shares of val and test leave nothing for train; make them smaller")
        ways = {
            "--val-from/--test-from": self.val_from is not None or self.test_from is not None,
            "--val/--test": bool(self.val or self.test),
            "--val-last/--test-last": bool(self.val_last or self.test_last),
            "--val-entities/--test-entities": bool(self.val_entities or self.test_entities),
        }
        given = [way for way, is_given in ways.items() if is_given]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are different ways to split; give one of them")
        is_by_rows = given[:1] in (["--val-from/--test-from"], ["--val-last/--test-last"])
        if self.split_by == "entity" and (is_by_rows or self.gap):
            raise ConfigError("a split by entity has no times, shares of rows or gap; give --split entity:0.1 alone")
        if self.split_by == "time" and (self.val_entities or self.test_entities):
            raise ConfigError("--val-entities needs --split-by entity; or give --split entities:A")
        if self.gap and not self.has_time_split:
            raise ConfigError(f"--gap {self.gap} needs a cut in time; give --split time:2024-03-01 or --split tail:0.1")
        if both := sorted({*self.val_entities} & {*self.test_entities}):
            raise ConfigError(f"entity {both[0]!r} is given for val and for test; choose one")

    @property
    def entity_columns(self) -> tuple[str, ...]:
        return () if FILE_NAME in self.entity else self.entity

    @property
    def named_columns(self) -> tuple[str, ...]:
        """The columns named as features, targets, static or categorical ones, or as the entity."""
        return (*self.entity_columns, *(self.features or ()), *self.target, *self.static, *self.categorical)

    @property
    def has_time_split(self) -> bool:
        return self.split_by == "time" and bool(self.time_splits[1:])

    @property
    def time_splits(self) -> tuple[str, ...]:
        """The splits by time, in their order."""
        val = self.val_from is not None or self.val > 0 or self.val_last > 0
        test = self.test_from is not None or self.test > 0 or self.test_last > 0
        return ("train", *(["val"] * val), *(["test"] * test))

    def policy(self, column: str) -> tuple[str, float]:
        return parse_policy(self.nulls.get(column, self.nulls.get("*", "ffill")), column)


def parse_options(given: Mapping[str, Any]) -> TableOptions:
    """Options from keyword arguments: a name alone stands for a list of one."""
    unknown = set(given) - set(TableOptions.__struct_fields__)
    if unknown:
        raise ConfigError(
            f"unknown options {sorted(unknown)}; expected {', '.join(sorted(TableOptions.__struct_fields__))}"
        )
    if given.get("time") is None:
        raise ConfigError("time= must name the column with the times")
    values = dict(given)
    for name in (
        "entity", "features", "target", "static", "categorical", "known_future", "calendar", "val_entities", "test_entities",
    ):  # fmt: skip
        if values.get(name) is None:
            values.pop(name, None)
        else:
            values[name] = _names(name, values[name])
    if not values.get("entity"):
        values.pop("entity", None)
    if values.get("delimiter") in ("\\t", "tab"):
        values["delimiter"] = "\t"
    nulls = values.get("nulls") or {}
    values["nulls"] = {"*": nulls} if isinstance(nulls, str) else dict(nulls)
    for name in ("val_from", "test_from"):
        if values.get(name) is not None:
            values[name] = str(values[name])
    try:
        return msgspec.convert(values, TableOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options of prepare table: {error}") from error


def _names(option: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{option}={value!r}; expected names of columns")
    return tuple(value)


def _one_of(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{what} {value!r}; expected one of {', '.join(allowed)}")


def parse_policy(policy: str, column: str) -> tuple[str, float]:
    """``ffill`` -> (ffill, 0); ``value:-1`` -> (value, -1)."""
    kind, _, number = policy.partition(":")
    if kind == "value":
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if value - value != 0:
            raise ConfigError(f"--nulls {policy!r} of {column!r}: value needs a finite number, such as value:0")
        return kind, value
    if number or kind not in POLICIES:
        raise ConfigError(f"--nulls {policy!r} of {column!r}; expected one of {', '.join(POLICIES)}")
    return kind, 0.0


def step_ns(freq: str) -> int:
    """``15min`` -> its length in nanoseconds."""
    match = re.fullmatch(r"(\d*)([A-Za-z]+)", freq.strip())
    if match is None or match[2] not in STEPS_NS or match[1] == "0":
        raise ConfigError(f"--freq {freq!r}; expected a number and one of {', '.join(STEPS_NS)}, such as 15min or 1D")
    return int(match[1] or 1) * STEPS_NS[match[2]]
