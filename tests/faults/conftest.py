"""The job that the fault tests disturb, and what an undisturbed run of it makes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import millrace as mr
from millrace.testing import tree_digest

SCRIPTS = Path(__file__).parent / "scripts"


def moments(total: int) -> list[int]:
    """Where to strike: at every step in a soak, else at every fifth, and at all of the last ones, which publish."""
    each = 1 if os.environ.get("MILLRACE_SOAK") else 5
    return [at for at in range(1, total + 1) if at % each == 1 % each or at > total - 12]


@pytest.fixture(scope="session")
def scripts() -> Path:
    return SCRIPTS


@pytest.fixture(scope="session")
def job() -> ModuleType:
    """``scripts/write_store.py``: ``write(path)``, ``append(path)``, ``record(number)``."""
    spec = importlib.util.spec_from_file_location("write_store", SCRIPTS / "write_store.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Undisturbed:
    """What the job makes when nobody disturbs it."""

    def __init__(self, folder: Path, job: ModuleType) -> None:
        self.fresh, self.appended = folder / "fresh", folder / "appended"
        job.write(self.fresh)
        shutil.copytree(self.fresh, self.appended)
        job.append(self.appended)
        self.fresh_tree, self.appended_tree = tree_digest(self.fresh), tree_digest(self.appended)
        self.old, self.new = mr.open_store(self.fresh).fingerprint, mr.open_store(self.appended).fingerprint


@pytest.fixture(scope="session")
def undisturbed(memory_folder: Path, job: ModuleType) -> Undisturbed:
    return Undisturbed(memory_folder / "undisturbed", job)


@pytest.fixture
def tmp_path(memory_folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory_folder) as folder:
        yield Path(folder)


@pytest.fixture
def fresh_copy(tmp_path: Path, undisturbed: Undisturbed) -> Callable[[], Path]:
    """Makes ``tmp_path/out`` a copy of the store that the job wrote, to be appended to."""

    def copy() -> Path:
        for leftover in tmp_path.iterdir():
            shutil.rmtree(leftover)
        shutil.copytree(undisturbed.fresh, tmp_path / "out")
        return tmp_path / "out"

    return copy
