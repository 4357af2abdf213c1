"""The reference pages are those of the code, and name every command and public name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import millrace as mr

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("reference", ROOT / "tools/reference.py")
assert SPEC is not None
assert SPEC.loader is not None
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_a_reference_page_is_current(name: str) -> None:
    written = (reference.FOLDER / name).read_text()
    assert written == reference.PAGES[name](), f"run: python tools/reference.py (docs/reference/{name} is old)"


def test_every_public_name_has_an_entry() -> None:
    page = (reference.FOLDER / "api.md").read_text()
    entries = re.findall(r"^### (mr\.[\w.]+)$", page, re.MULTILINE) + re.findall(
        r"^\| `(mr\.\w+)` \|", page, re.MULTILINE
    )
    assert len(entries) == len(set(entries))
    assert {f"mr.{name}" for name in mr.__all__ if name != "__version__"} <= set(entries)


def test_every_command_that_pages_show_exists() -> None:
    known = {" ".join(words) for words in reference.commands()}
    groups = {name.split()[0] for name in known if " " in name}
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for line in re.findall(
            r"^(?:\w*\$ )?millrace +([a-z][\w-]*(?: +[a-z][\w-]*)?)", page.read_text(), re.MULTILINE
        ):
            words = line.split()
            shown = " ".join(words) if words[0] in groups else words[0]
            assert shown in known, f"{page.relative_to(ROOT)} shows millrace {line}"
