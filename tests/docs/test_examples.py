"""The examples: started without arguments they say how they are used, and a wrong store is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
# All in one process: most of the time goes into importing the libraries that they use.
SCRIPT = """
import json, runpy, sys
*starts, out = sys.argv[1:]
said = []
for start in starts:
    sys.argv = json.loads(start)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        said.append(end.code)
open(out, "w").write(json.dumps(said))
"""


def test_a_wrong_start_is_answered_in_one_line(tmp_path: Path) -> None:
    starts = [[str(path)] for path in EXAMPLES]
    wrong = {"plain_ddp": "start it with: ", "stateful_dataloader": f"{tmp_path}/none is not"}
    for name in wrong:
        path = next(path for path in EXAMPLES if path.stem == name)
        starts.append([str(path), str(tmp_path / "none"), str(tmp_path / "run")])
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *map(json.dumps, starts), str(tmp_path / "said")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "said").read_text())
    assert len(said) == len(starts)
    for path, usage in zip(EXAMPLES, said, strict=False):
        assert usage.startswith("usage: "), path
        assert f"examples/{path.name} STORE RUN" in usage
    assert [line.startswith(start) for line, start in zip(said[-2:], wrong.values(), strict=True)] == [True, True], said
    assert not any("\n" in line for line in said)
