"""The code and commands of README and guides run as they stand, each page in an empty folder."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


# A process that has imported what most pages do, and forks for each: a new one imports for longer than most pages run.
WARM = """
import json, os, runpy, sys, warnings
import pandas, torch, torch._dynamo
import millrace.cli.app

for line in sys.stdin:
    page = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
for stream, path in enumerate((os.devnull, page["said"], page["said"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
os.chdir(page["folder"])
sys.path[0], sys.argv, sys.warnoptions[:] = page["folder"], [page["script"]], [page["warnings"]]
warnings.resetwarnings()
warnings.simplefilter(page["warnings"])
runpy.run_path(page["script"], run_name="__main__")
"""


@pytest.fixture(scope="module")
def run_page() -> Iterator[Callable[..., int]]:
    """Runs a script as a program of its own, to its exit status."""
    # One thread: tests run side by side, and torch's threads would wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WARM], text=True, env=environment, **pipes) as warm:

        def run(**page: str) -> int:
            warm.stdin.write(json.dumps(page) + "\n")
            warm.stdin.flush()
            return int(warm.stdout.readline())

        yield run
        warm.stdin.close()


def commands(block: str) -> list[str]:
    lines = block.replace("\\\n", "").splitlines()  # a command may go on in the next line
    return [line.removeprefix("$ ").split("   #")[0] for line in lines if line.startswith("$ ")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, run_page: Callable[..., int]) -> None:
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
    warnings = "ignore" if page.stem == "frameworks" else "error"  # what other libraries warn of is theirs
    said = tmp_path.with_name(f"{tmp_path.name}-said")
    status = run_page(folder=str(tmp_path), script=str(script), said=str(said), warnings=warnings)
    assert status == 0, f"{page}\n{said.read_text()}"
