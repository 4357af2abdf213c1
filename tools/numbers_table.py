"""Prints the table of docs/guide/performance.md that says what each number of the meter means, from its docstring."""

import ast
import inspect
import itertools
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from millrace.meter.interval import Interval
from millrace.meter.usage import GpuUsage, Usage

KINDS = (Interval, Usage, GpuUsage)


def meanings(kind: type) -> dict[str, str]:
    """Each field with the string that stands below it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    found = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = " ".join(below.value.value.split()).replace("``", "`")
    return found


def table() -> str:
    rows = [f"| `{name}` | {text} |" for kind in KINDS for name, text in meanings(kind).items()]
    return "\n".join(["| number | means |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table())
