"""``--where "volume > 0 and year >= 2015"``: a condition on columns as an expression of pyarrow.

Comparisons with a missing value (null or NaN) do not hold, so that the statistics of a row group and the rows themselves
always agree.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from millrace.condition import Compare, Condition, Joined, Name, names, parse
from millrace.errors import ConfigError

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
WHAT = "--where"
MAX_FLOATS = 64  # that are compared one by one: a chain of 10,000 overflows pyarrow's stack, which ends the process


def columns_of(text: str) -> list[str]:
    """The columns a condition names."""
    return sorted(names(parse(text, WHAT)))


def expression(text: str, types: Mapping[str, Any]) -> Any:
    """The condition as an expression of pyarrow; values are cast to the ``types`` of their columns."""
    return _Builder(text, types).build(parse(text, WHAT))


def check(text: str, schema: Any) -> None:
    """Refuses a condition that does not fit the types of the columns."""
    import pyarrow

    try:
        schema.empty_table().filter(expression(text, {field.name: field.type for field in schema}))
    except pyarrow.ArrowException as error:
        types = ", ".join(f"{name} is {schema.field(name).type}" for name in columns_of(text))
        raise ConfigError(
            f"--where {text!r} does not fit the columns: {types} ({str(error).splitlines()[0]})"
        ) from error


def _combine(parts: list[Any], is_and: bool) -> Any:
    return functools.reduce(operator.and_ if is_and else operator.or_, parts)


def _doubles(values: tuple[Any, ...]) -> Any:
    """The values that a float can be, with both zeros where there is one."""
    import pyarrow

    floats = [float(value) for value in values if isinstance(value, float) or abs(value) <= sys.float_info.max]
    return pyarrow.array([*floats, *((0.0, -0.0) if 0 in floats else ())], pyarrow.float64())


def _integers(values: tuple[Any, ...], kind: Any) -> Any:
    """The values that an integer of this type can be."""
    import pyarrow

    if not pyarrow.types.is_integer(kind):
        raise ConfigError(
            f"{WHAT} compares a column of {kind} with {len(values):,} numbers; at most {MAX_FLOATS} of them may have a point"
        )
    info = np.iinfo(kind.to_pandas_dtype())
    fitting = (value for value in values if info.min <= value <= info.max)
    return pyarrow.array([int(value) for value in fitting if value == int(value)], kind)


class _Builder:
    def __init__(self, text: str, types: Mapping[str, Any]) -> None:
        self._text, self._types = text, types

    def build(self, condition: Condition) -> Any:
        if isinstance(condition, Joined):
            return _combine([self.build(part) for part in condition.parts], condition.word == "and")
        name, value = condition.column, condition.value
        if isinstance(value, tuple):
            return self._inside(condition)
        if isinstance(value, Name):
            return self._compare(condition.sign, self._field(name), self._field(value.column), name, value.column)
        return self._compare(condition.sign, self._field(name), self._value(name, value), name)

    def _inside(self, condition: Compare) -> Any:
        name, is_in = condition.column, condition.sign == "in"
        field, values = self._field(name), condition.value
        is_float = self._is_float(name)
        if is_float or any(isinstance(value, float) for value in values):
            # Value by value: a set of floats tells -0.0 from 0.0, and the statistics of row groups rule out none of it.
            if len(values) <= MAX_FLOATS:
                sign = "==" if is_in else "!="
                return _combine(
                    [self._compare(sign, field, self._value(name, value), name) for value in values], not is_in
                )
            field = field.cast("float64") if is_float else field
            inside = field.isin(_doubles(values) if is_float else _integers(values, self._types[name]))
        else:
            inside = field.isin([self._value(name, value) for value in values])
        return inside if is_in else ~inside & ~field.is_null(nan_is_null=True)

    def _is_float(self, name: str) -> bool:
        import pyarrow

        return bool(pyarrow.types.is_floating(self._types[name]))

    def _compare(self, sign: str, left: Any, right: Any, *columns: str) -> Any:
        if sign == "!=" and any(map(self._is_float, columns)):
            return (left < right) | (left > right)  # NaN differs from every number
        return _COMPARE[sign](left, right)

    def _field(self, name: str) -> Any:
        from pyarrow import compute

        make: Any = compute.field
        if name not in self._types:
            raise ConfigError(f"--where {self._text!r}: column {name!r} is unknown; there are {', '.join(self._types)}")
        return make(name)

    def _value(self, name: str, value: Any) -> Any:
        import pyarrow

        self._field(name)
        wanted = self._types[name]
        if pyarrow.types.is_dictionary(wanted):
            wanted = wanted.value_type
        is_time = pyarrow.types.is_temporal(wanted)
        try:
            if is_time and not isinstance(value, str):
                raise pyarrow.ArrowInvalid(f"{value!r} is no time")
            if is_time and pyarrow.types.is_timestamp(wanted) and wanted.tz is not None:
                return pyarrow.scalar(value).cast(pyarrow.timestamp(wanted.unit)).cast(wanted)
            return pyarrow.scalar(value).cast(wanted) if is_time or isinstance(value, str) else pyarrow.scalar(value)
        except (pyarrow.ArrowException, OverflowError) as error:
            raise ConfigError(
                f"--where {self._text!r}: {name} is {wanted}, compared with {value!r} ({error})"
            ) from error
