"""Runs the C core under valgrind and fails on what valgrind finds in it; what it finds in CPython is left aside."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = "_core.abi3.so"

command = ["valgrind", "--leak-check=full", "--show-leak-kinds=definite", "--num-callers=40", "--error-limit=no"]
done = subprocess.run(
    [*command, sys.executable, str(ROOT / "tools" / "short_run.py")],
    env=os.environ | {"PYTHONMALLOC": "malloc", "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
)  # fmt: skip
assert done.stdout == "done\n", done.stderr[-4000:]
blocks = re.split(r"\n==\d+== \n", done.stderr)
# A type of the core lives as long as the process, which valgrind calls lost.
ours = [block for block in blocks if CORE in block and "core_add_type" not in block]
wrong = [b for b in ours if "in loss record" in b or CORE in "".join(b.splitlines()[1:4])]
print("\n\n".join(wrong))
print(f"valgrind: {len(wrong)} errors in the core ({len(blocks)} reports, those in CPython left aside)")
sys.exit(1 if wrong else 0)
