"""The code and commands of README and guides run as they stand, each page in an empty folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    lines = block.replace("\\\n", "").splitlines()  # a command may go on in the next line
    return [line.removeprefix("$ ").split("   #")[0] for line in lines if line.startswith("$ ")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """A page is one program: its Python as it stands, its millrace commands in between, all in one process."""
    program = ["from millrace.cli import run as millrace_command"]
    found = BLOCK.findall(page.read_text())
    for kind, block in found:
        if kind == "python":
            program.append(block)
        else:
            ours = [shlex.split(command) for command in commands(block) if command.startswith("millrace ")]
            program += [f"assert millrace_command({command[1:]!r}) == 0" for command in ours]
    assert len(program) > 3, f"{page} has hardly any code"
    script = tmp_path / "page.py"
    script.write_text("\n".join(program))
    # One thread: tests run side by side, and torch's threads would wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    warnings = "ignore" if page.stem == "frameworks" else "error"  # what other libraries warn of is theirs
    done = subprocess.run(
        [sys.executable, "-W", warnings, str(script)], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"
