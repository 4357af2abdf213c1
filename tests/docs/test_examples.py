"""The examples: started without arguments they say how they are used, and a wrong store is one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_without_arguments_an_example_prints_its_usage(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("usage: ")
    assert f"examples/{path.name} STORE RUN" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["plain_ddp", "stateful_dataloader"])
def test_a_wrong_start_is_answered_in_one_line(name: str, tmp_path: Path) -> None:
    path = next(path for path in EXAMPLES if path.stem == name)
    command = [sys.executable, "-W", "ignore", str(path), str(tmp_path / "none"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "start it with: " if name == "plain_ddp" else f"{tmp_path}/none is not"
    )
    assert "Traceback" not in done.stderr
