"""Pages stay true: READMEs name every file of their package, links lead somewhere, lines are short."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/millrace"
# Folders whose files the README above them describes.
INNER = (
    "prepare/text/",
    "prepare/table/",
    "prepare/records/",
    "store/remote",
    "feed/make",
    "feed/ahead",
    "feed/place",
    "train/models",
    "train/configs",
)
PACKAGES = sorted(
    folder
    for folder in {path.parent for path in SOURCE.rglob("*.py")} - {SOURCE}
    if not folder.relative_to(SOURCE).as_posix().startswith(INNER)
)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *SOURCE.rglob("README.md")])
WIDTH = 100


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_a_readme_names_every_module_of_its_package(package: Path) -> None:
    text = (package / "README.md").read_text()
    below = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    modules = [path.name for path in below if next(over for over in path.parents if over in PACKAGES) == package]
    missing = [module for module in modules if not re.search(rf"(?<![\w/]){re.escape(module)}\b", text)]
    assert not missing, f"{name(package)}/README.md does not name {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), f"{name(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_fit_on_a_screen(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > WIDTH and not line.startswith("|")]
    assert not long, f"{name(page)} has lines over {WIDTH} characters: {long[0]}"


def test_the_guide_says_what_every_number_means() -> None:
    made = runpy.run_path(str(ROOT / "tools/numbers_table.py"))["table"]()
    page = (ROOT / "docs/guide/performance.md").read_text()
    assert made in page, "put it there: python tools/numbers_table.py"


def test_pages_of_the_site_link_to_each_other(tmp_path: Path) -> None:
    """`make docs` gathers them from the whole project; every link leads to a page, a heading or a picture."""
    site = runpy.run_path(str(ROOT / "tools/site.py"))
    site["gather"](tmp_path)
    named = (ROOT / "docs/zensical.toml").read_text()
    shown = re.findall(r'= "([\w/-]+\.md)"', named)
    assert len(shown) > 20
    assert all((tmp_path / name).exists() for name in shown)
    for page in (ROOT / "docs/guide").glob("*.md"):
        assert f"guide/{page.name}" in shown, f"put {page.name} into docs/zensical.toml"
    count = 0
    for page in tmp_path.rglob("*.md"):
        for link in re.findall(
            r"\]\(([^)#:\s]+)\)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        ):
            count += 1
            assert (page.parent / link).exists(), f"{page.relative_to(tmp_path)} links to {link}"
    assert count > 100


def test_what_a_site_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    site = runpy.run_path(str(ROOT / "tools/site.py"))
    (tmp_path / "a.html").write_text(
        '<a href="https://a.example">ours</a><link rel="canonical" href="https://b.example">'
    )
    assert site["fetched_from_elsewhere"](tmp_path) == []
    (tmp_path / "b.html").write_text(
        '<link rel="stylesheet" href="https://c.example/x.css"><img src=//d.example/x.png>'
    )
    (tmp_path / "c.css").write_text("@import 'https://e.example/x'; a { background: url(https://f.example/x) }")
    assert len(site["fetched_from_elsewhere"](tmp_path)) == 4
