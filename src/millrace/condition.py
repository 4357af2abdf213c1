"""Conditions on columns, such as ``label == 3 and n_hits > 10``: read as expressions, never run as code.

``store.where`` and ``prepare table --where`` share this. A comparison with a missing value (null or NaN) does not hold, and
neither does its opposite: ``not`` is moved down to the comparisons. So nothing but the comparisons has to know of it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, TypeAlias

from millrace.errors import ConfigError

_SIGNS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_OPPOSITE = {
    "<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in",
}  # fmt: skip
_SWAPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
MAX_PARTS = 500  # 20,000 comparisons overflowed pyarrow's stack, which ended the process
MAX_TEXT = 1 << 20  # characters, 150,000 numbers: Python's parser takes 400 bytes for each of them
HELP = "expected comparisons of columns with values, joined by and, or, not: volume > 0 and exchange in ('A', 'B')"


@dataclass(frozen=True)
class Name:
    """A column on the right side of a comparison."""

    column: str

    def __str__(self) -> str:
        return self.column


@dataclass(frozen=True)
class Compare:
    """``column sign value``: the value is a number, a text, a column, or for ``in`` and ``not in`` a tuple of values."""

    column: str
    sign: str
    value: Any

    def __str__(self) -> str:
        return f"{self.column} {self.sign} {_spelled(self.value)}"


@dataclass(frozen=True)
class Joined:
    """Conditions of which all must hold, or any."""

    word: str  # "and" or "or"
    parts: tuple[Condition, ...]

    def __str__(self) -> str:
        return "(" + f" {self.word} ".join(map(str, self.parts)) + ")"


Condition: TypeAlias = Compare | Joined


def parse(text: str, what: str = "where") -> Condition:
    """The condition, each of which has one spelling as ``str``; ``what`` names it in errors."""
    return _Reader(text, what).read(_tree(text, what).body)


def names(condition: Condition) -> set[str]:
    """The columns a condition names."""
    if isinstance(condition, Joined):
        return {name for part in condition.parts for name in names(part)}
    other = {condition.value.column} if isinstance(condition.value, Name) else set()
    return {condition.column} | other


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_spelled, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "1e999" if value > 0 else "-1e999"
    return str(value) if isinstance(value, Name) else repr(value)


def _tree(text: str, what: str) -> ast.Expression:
    if len(text) > MAX_TEXT:
        raise ConfigError(
            f"{what} {text[:60]!r}... has {len(text):,} characters; at most {MAX_TEXT:,}: choose in Python, as in "
            "mr.Subset(mr.Records(store), np.isin(store.columns['label'][:], values))"
        )
    try:
        parsed = ast.parse(text.strip(), mode="eval")
        size = sum(isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)) for node in ast.walk(parsed))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = str(error) or "it nests too deeply"
        raise ConfigError(f"{what} {text[:200]!r} cannot be read ({problem}); {HELP}") from error
    if size > MAX_PARTS:
        raise ConfigError(
            f"{what} {text[:60]!r}... has {size} parts; at most {MAX_PARTS}: write x in (1, 2, 3), or choose in Python"
        )
    return parsed


class _Reader:
    def __init__(self, text: str, what: str) -> None:
        self._text, self._what = text, what

    def _refuse(self, node: ast.AST) -> ConfigError:
        part = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        return ConfigError(f"{self._what} {self._text[:200]!r}: {part[:200]!r} is not understood; {HELP}")

    def read(self, node: ast.expr, negated: bool = False) -> Condition:
        if isinstance(node, ast.BoolOp):
            is_and = isinstance(node.op, ast.And) != negated
            return _joined("and" if is_and else "or", [self.read(value, negated) for value in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.read(node.operand, not negated)
        if isinstance(node, ast.Compare):
            return self._comparison(node, negated)
        if isinstance(node, ast.Name):
            return Compare(node.id, "==", not negated)
        raise self._refuse(node)

    def _comparison(self, node: ast.Compare, negated: bool) -> Condition:
        sides = [node.left, *node.comparators]
        parts: list[Condition] = []
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            if type(op) not in _SIGNS:
                raise self._refuse(op)
            sign = _SIGNS[type(op)]
            parts.append(self._pair(left, _OPPOSITE[sign] if negated else sign, right))
        return _joined("or" if negated else "and", parts)

    def _pair(self, left: ast.expr, sign: str, right: ast.expr) -> Compare:
        if sign in ("in", "not in"):
            if not isinstance(left, ast.Name) or not isinstance(right, (ast.Tuple, ast.List)) or not right.elts:
                raise self._refuse(left if isinstance(right, (ast.Tuple, ast.List)) else right)
            return Compare(left.id, sign, tuple(self._constant(item) for item in right.elts))
        if isinstance(left, ast.Name):
            value = Name(right.id) if isinstance(right, ast.Name) else self._constant(right)
            return Compare(left.id, sign, value)
        if isinstance(right, ast.Name):
            return Compare(right.id, _SWAPPED.get(sign, sign), self._constant(left))
        raise self._refuse(left)

    def _constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._constant(node.operand)
            if isinstance(value, (int, float)):
                return -value
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
            return node.value
        raise self._refuse(node)


def _joined(word: str, parts: list[Condition]) -> Condition:
    """Joined, without brackets in brackets of the same word."""
    flat: list[Condition] = []
    for part in parts:
        flat += part.parts if isinstance(part, Joined) and part.word == word else [part]
    return flat[0] if len(flat) == 1 else Joined(word, tuple(flat))
