"""The code and commands of README and guides run as they stand, each page in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    return [line.removeprefix("$ ").split("   #")[0] for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Python blocks share one program up to each command; commands run where their files are."""
    program: list[str] = []
    found = BLOCK.findall(page.read_text())
    assert found, f"{page} has no code"
    ran = 0
    for kind, block in found:
        if kind == "python":
            program.append(block)
            continue
        for command in commands(block):
            if command.startswith("millrace "):
                program = run_python(program, tmp_path)
                run([sys.executable, "-m", *command.split()], tmp_path)
                ran += 1
    run_python(program, tmp_path)
    assert ran or page.stem not in ("README", "feeding", "stores")


def run_python(blocks: list[str], folder: Path) -> list[str]:
    """Runs what has gathered so far; later blocks see its names, so it is kept but for the stores it wrote."""
    if blocks and not (folder / f"done-{len(blocks)}").exists():
        script = "\n".join(blocks)
        marker = folder / f"done-{len(blocks)}"
        clean = "import shutil; [shutil.rmtree(d, ignore_errors=True) for d in ('sensors', 'events', 'corpus')]\n"
        run([sys.executable, "-W", "error", "-c", clean + script], folder)
        marker.touch()
    return blocks


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
