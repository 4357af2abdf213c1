"""Makes the site of all pages in ``build/site``: ``make docs``, or python tools/site.py BUILDER.

Pages lie all over the project and link to each other and to source files. They are copied into one folder, and links follow:
README.md becomes index.md, that of a package code/NAME.md. A link to a file that is no page stays as plain words.
BUILDER is the program that turns the folder into HTML (zensical). Then it checks that the site loads nothing from elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILD, SITE = ROOT / "build/docs", ROOT / "build/site"
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
# What a browser would fetch. Links that a reader may click (<a href>) are no such thing.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|link(?![^>]*rel=\"?canonical))[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)"
)
IN_STYLE = re.compile(r"url\([\"']?((?:https?:)?//[^)\"']+)|@import\s+[\"']((?:https?:)?//[^\"']+)")


def pages() -> dict[Path, str]:
    """Every page of the project, and its name in the site."""
    found = {path: path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md")}
    found |= {path: path.name.lower() for path in ROOT.glob("*.md")}
    found[ROOT / "README.md"] = "index.md"
    for path in (ROOT / "src/millrace").glob("**/README.md"):
        found[path] = f"code/{'-'.join(path.parent.relative_to(ROOT / 'src/millrace').parts)}.md"
    return found


def gather(folder: Path) -> None:
    """Copies pages and pictures, with links that fit their new places."""
    names = pages()
    for path, name in names.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        parts = FENCE.split(path.read_text())
        parts[::2] = [LINK.sub(lambda link, page=path: _moved(link, page, names), part) for part in parts[::2]]  # type: ignore[misc]
        target.write_text("".join(parts))
    shutil.copy(DOCS / "style.css", folder)
    shutil.copytree(DOCS / "pictures", folder / "pictures", dirs_exist_ok=True)


def _moved(link: re.Match[str], page: Path, names: dict[Path, str]) -> str:
    is_picture, words, target, place = link[1], link[2], link[3], link[4] or ""
    if not target or "://" in target or target.startswith("mailto:"):
        return link[0]
    path = Path(os.path.normpath(page.parent / target))
    name = names.get(path)
    if name is None and path.is_relative_to(DOCS / "pictures"):
        name = path.relative_to(DOCS).as_posix()
    if name is None:
        return words if not is_picture else ""
    here = os.path.dirname(names[page])
    return f"{is_picture}[{words}]({os.path.relpath(name, here or '.')}{place})"


def fetched_from_elsewhere(site: Path) -> list[str]:
    """What a reader's browser would load from another site."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            pattern = FETCHED if path.suffix == ".html" else IN_STYLE
            found += [f"{path.relative_to(site)}: {match[0][-120:]}" for match in pattern.finditer(path.read_text())]
    return found


def main(builder: str) -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    gather(BUILD / "pages")
    shutil.copy(DOCS / "zensical.toml", BUILD)
    done = subprocess.run([builder, "build", "--clean"], cwd=BUILD)
    if done.returncode == 0:
        shutil.rmtree(SITE, ignore_errors=True)
        shutil.move(BUILD / "site", SITE)
    found = fetched_from_elsewhere(SITE) if done.returncode == 0 else []
    for line in found:
        print(f"the site would load from elsewhere: {line}")
    if not found and done.returncode == 0:
        print("open build/site/index.html")
    return done.returncode or bool(found)


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1])))
