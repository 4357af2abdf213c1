"""``--where "volume > 0 and year >= 2015"``: a condition on columns, read as an expression, never run as code.

A comparison with a missing value (null or NaN) does not hold, and neither does its opposite: ``not`` is moved down to
the comparisons. So the statistics of a row group and the rows themselves always agree.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from millrace.errors import ConfigError

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_SWAPPED = {operator.lt: operator.gt, operator.le: operator.ge, operator.gt: operator.lt, operator.ge: operator.le}
MAX_PARTS = 500  # 20,000 comparisons overflowed pyarrow's stack, which ended the process
HELP = "expected comparisons of columns with values, joined by and, or, not: volume > 0 and exchange in ('A', 'B')"


def columns_of(text: str) -> list[str]:
    """The columns a condition names."""
    return sorted({node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name)})


def expression(text: str, types: Mapping[str, Any]) -> Any:
    """The condition as an expression of pyarrow; values are cast to the ``types`` of their columns."""
    return _Reader(text, types).read(_parse(text).body)


def _parse(text: str) -> ast.Expression:
    try:
        parsed = ast.parse(text.strip(), mode="eval")
        size = sum(isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)) for node in ast.walk(parsed))
        if size > MAX_PARTS:
            raise ConfigError(
                f"--where {text[:60]!r}... has {size} parts; at most {MAX_PARTS}: take rows with --transform, or x in (1, 2, 3)"
            )
        return parsed
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"--where {text[:200]!r} cannot be read ({error}); {HELP}") from error


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


class _Reader:
    def __init__(self, text: str, types: Mapping[str, Any]) -> None:
        self._text, self._types = text, types

    def _refuse(self, node: ast.AST) -> ConfigError:
        part = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        return ConfigError(f"--where {self._text!r}: {part!r} is not understood; {HELP}")

    def read(self, node: ast.expr, negated: bool = False) -> Any:
        if isinstance(node, ast.BoolOp):
            parts = [self.read(value, negated) for value in node.values]
            return _combine(parts, isinstance(node.op, ast.And) != negated)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.read(node.operand, not negated)
        if isinstance(node, ast.Compare):
            return self._comparison(node, negated)
        if isinstance(node, ast.Name):
            return self._field(node) == self._value(node, not negated)
        raise self._refuse(node)

    def _comparison(self, node: ast.Compare, negated: bool) -> Any:
        sides = [node.left, *node.comparators]
        parts = [
            self._pair(left, _OPPOSITE.get(type(op), type(op))() if negated else op, right)
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False)
        ]
        return _combine(parts, not negated)

    def _pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        if (
            isinstance(op, (ast.In, ast.NotIn))
            and isinstance(left, ast.Name)
            and isinstance(right, (ast.Tuple, ast.List))
        ):
            return self._inside(left, right.elts, isinstance(op, ast.In))
        compare = _COMPARE.get(type(op))
        if compare is None:
            raise self._refuse(op)
        if isinstance(left, ast.Name) and isinstance(right, ast.Name):
            return self._compare(compare, self._field(left), self._field(right), left, right)
        if isinstance(left, ast.Name):
            return self._compare(compare, self._field(left), self._value(left, self._constant(right)), left)
        if isinstance(right, ast.Name):
            swapped = _SWAPPED.get(compare, compare)
            return self._compare(swapped, self._field(right), self._value(right, self._constant(left)), right)
        raise self._refuse(left)

    def _inside(self, name: ast.Name, items: list[ast.expr], is_in: bool) -> Any:
        field, values = self._field(name), [self._constant(item) for item in items]
        if not values:
            raise self._refuse(name)
        if any(isinstance(value, float) for value in values) or self._is_float(name):
            # Value by value: a set of floats tells -0.0 from 0.0.
            compare = operator.eq if is_in else operator.ne
            return _combine(
                [self._compare(compare, field, self._value(name, value), name) for value in values], not is_in
            )
        inside = field.isin([self._value(name, value) for value in values])
        return inside if is_in else ~inside & ~field.is_null()

    def _is_float(self, name: ast.Name) -> bool:
        import pyarrow

        return bool(pyarrow.types.is_floating(self._types[name.id]))

    def _compare(self, compare: Callable[[Any, Any], Any], left: Any, right: Any, *names: ast.Name) -> Any:
        if compare is operator.ne and any(map(self._is_float, names)):
            return (left < right) | (left > right)  # NaN differs from every number
        return compare(left, right)

    def _constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._constant(node.operand)
            if isinstance(value, (int, float)):
                return -value
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
            return node.value
        raise self._refuse(node)

    def _field(self, node: ast.Name) -> Any:
        from pyarrow import compute

        make: Any = compute.field
        if node.id not in self._types:
            raise ConfigError(
                f"--where {self._text!r}: column {node.id!r} is unknown; there are {', '.join(self._types)}"
            )
        return make(node.id)

    def _value(self, node: ast.Name, value: Any) -> Any:
        import pyarrow

        self._field(node)
        wanted = self._types[node.id]
        if pyarrow.types.is_dictionary(wanted):
            wanted = wanted.value_type
        is_time = pyarrow.types.is_temporal(wanted)
        try:
            if is_time and not isinstance(value, str):
                raise pyarrow.ArrowInvalid(f"{value!r} is no time")
            if is_time and pyarrow.types.is_timestamp(wanted) and wanted.tz is not None:
                return pyarrow.scalar(value).cast(pyarrow.timestamp(wanted.unit)).cast(wanted)
            return pyarrow.scalar(value).cast(wanted) if is_time or isinstance(value, str) else pyarrow.scalar(value)
        except pyarrow.ArrowException as error:
            raise ConfigError(
                f"--where {self._text!r}: {node.id} is {wanted}, compared with {value!r} ({error})"
            ) from error
