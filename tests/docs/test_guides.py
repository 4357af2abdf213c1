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
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    DOCS / "quickstart.md",
    DOCS / "how-the-order-works.md",
    *sorted((DOCS / "guide").glob("*.md")),
]
ALL_PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOLLOWED = ("export QUEUE", "queue status")  # blocks of queue.md that test_queue_guide.py follows
SHOWN = ("README", "quickstart")  # whose commands are shown with what they print
COMMAND = re.compile(r"(\w*\$ |srun .*|torchrun .*)?millrace [a-z-]+ ")
VERDICT = re.compile(r" \((compute-bound|balanced|input-bound: [a-z ]+)\)")
NUMBER = re.compile(r"\d[\d,.]*( (s|ms|min|kB|MB|GB)\b)?")


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


def arguments(block: str, starts: list[str]) -> list[list[str]]:
    """The commands of a block. A preset that a page trains as it is takes two steps at each start; ``starts`` counts them."""
    found = [shlex.split(command)[1:] for command in commands(block) if command.startswith("millrace ")]
    for words in found:
        if words[:2] == ["train", "nano"] and "--set" not in words:
            starts.append("nano")
            words += ["--set", f"train.max_steps={2 * len(starts)}", "--set", "train.log_every=1"]
    return found


def masked(text: str) -> list[str]:
    """Its lines without numbers, verdicts and spaces: times, speeds and last digits of losses are those of a machine."""
    return ["".join(NUMBER.sub("#", VERDICT.sub("", line)).split()) for line in text.splitlines()]


def transcripts(page: Path) -> list[str]:
    """What commands of a page are shown to print; ``...`` stands for any lines."""
    blocks = [block.replace("\\\n", "") for kind, block in BLOCK.findall(page.read_text()) if kind == "console"]
    lines = [line for block in blocks for line in block.splitlines()]
    return [
        line for line in lines if line.strip() not in ("", "...") and not line.startswith("$ ") and page.stem in SHOWN
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, run_page: Callable[..., int]) -> None:
    """A page is one program: its Python as it stands, its millrace commands in between, all in one process."""
    program = ["from millrace.cli import run as millrace_command"]
    starts: list[str] = []
    for kind, block in BLOCK.findall(page.read_text()):
        if kind == "python":
            program.append(block)
        else:
            program += [f"assert millrace_command({words!r}) == 0" for words in arguments(block, starts)]
    assert len(program) > 3, f"{page} has hardly any code"
    if "books/" in page.read_text() and page.stem == "README":  # the reader's own
        (tmp_path / "books").mkdir()
        (tmp_path / "books/tale.txt").write_text(
            "\n\n".join(f"Tale {k}. " + "The wheel turns. " * (k % 50) for k in range(1000))
        )
    script = tmp_path / "page.py"
    script.write_text("\n".join(program))
    warnings = "ignore" if page.stem == "frameworks" else "error"  # what other libraries warn of is theirs
    said = tmp_path.with_name(f"{tmp_path.name}-said")
    status = run_page(folder=str(tmp_path), script=str(script), said=str(said), warnings=warnings)
    assert status == 0, f"{page}\n{said.read_text()}"
    printed = iter(masked(said.read_text().replace(f"{tmp_path}/", "")))
    for line in transcripts(page):
        assert masked(line)[0] in printed, f"{page} shows a line that is not printed, or not in this order: {line}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_command_that_is_not_run_says_what_it_needs(page: Path) -> None:
    """Commands are in console blocks, which run, or the block has a title such as "needs a cluster"."""
    for info, block in ANY_BLOCK.findall(page.read_text()):
        lines = [line for line in block.replace("\\\n", "").splitlines() if COMMAND.match(line)]
        is_run = info == "console" and page in PAGES and all(line.startswith("$ ") for line in lines)
        is_followed = page.name == "queue.md" and any(words in block for words in FOLLOWED)
        is_reference = page.parent.name == "reference" and info == "text"
        assert not lines or is_run or is_followed or is_reference or 'title="needs ' in info, f"{page}: {lines[0]}"
