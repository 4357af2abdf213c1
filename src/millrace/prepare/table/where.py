"""``--where "volume > 0 and year >= 2015"``: a condition on columns, read as an expression, never run as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from millrace.errors import ConfigError

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_SWAPPED = {operator.lt: operator.gt, operator.le: operator.ge, operator.gt: operator.lt, operator.ge: operator.le}
HELP = "expected comparisons of columns with values, joined by and, or, not: volume > 0 and exchange in ('A', 'B')"


def columns_of(text: str) -> list[str]:
    """The columns a condition names."""
    return sorted({node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name)})


def expression(text: str, types: Mapping[str, Any]) -> Any:
    """The condition as an expression of pyarrow; ``types`` are the columns' types, to which values are cast."""
    return _Reader(text, types).read(_parse(text).body)


def _parse(text: str) -> ast.Expression:
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"--where {text!r} cannot be read ({error}); {HELP}") from error


class _Reader:
    def __init__(self, text: str, types: Mapping[str, Any]) -> None:
        self._text, self._types = text, types

    def _refuse(self, node: ast.AST) -> ConfigError:
        part = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        return ConfigError(f"--where {self._text!r}: {part!r} is not understood; {HELP}")

    def read(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BoolOp):
            parts = [self.read(value) for value in node.values]
            whole = parts[0]
            for part in parts[1:]:
                whole = whole & part if isinstance(node.op, ast.And) else whole | part
            return whole
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.read(node.operand)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.Name):
            return self._field(node) == self._value(node, True)
        raise self._refuse(node)

    def _comparison(self, node: ast.Compare) -> Any:
        whole = None
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            part = self._pair(left, op, right)
            whole = part if whole is None else whole & part
        return whole

    def _pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        if (
            isinstance(op, (ast.In, ast.NotIn))
            and isinstance(left, ast.Name)
            and isinstance(right, (ast.Tuple, ast.List))
        ):
            inside = self._field(left).isin([self._value(left, self._constant(item)) for item in right.elts])
            return inside if isinstance(op, ast.In) else ~inside
        compare: Any = _COMPARE.get(type(op))
        if compare is None:
            raise self._refuse(op)
        if isinstance(left, ast.Name) and isinstance(right, ast.Name):
            return compare(self._field(left), self._field(right))
        if isinstance(left, ast.Name):
            return compare(self._field(left), self._value(left, self._constant(right)))
        if isinstance(right, ast.Name):
            turned: Any = _SWAPPED.get(compare, compare)
            return turned(self._field(right), self._value(right, self._constant(left)))
        raise self._refuse(left)

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

        if node.id not in self._types:
            raise ConfigError(
                f"--where {self._text!r}: column {node.id!r} is unknown; there are {', '.join(self._types)}"
            )
        return compute.field(node.id)

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
