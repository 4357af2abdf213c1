"""Who may import whom, read from the sources: a layer knows those below it and no others."""

import ast
import re
from pathlib import Path

import pytest

import millrace

ROOT = Path(millrace.__file__).parent

# From the top down; the parts of one line do not know each other.
LINES = [
    ["cli"],
    ["train", "augment"],
    ["prepare", "feed", "exports", "report"],
    ["text", "scaling", "images", "selections"],
    ["store", "view", "order", "gather", "queues", "meter"],
    ["ragged"],
    ["condition", "padding"],
    ["distribution", "errors", "identity", "lazy", "native"],
    ["terminal"],
]
HEIGHT = {part: len(LINES) - k for k, line in enumerate(LINES) for part in line}
EDGES = {("view", "gather.gather")}  # for view[i]
CORE_USERS = {"store", "native"}  # the others ask native, which knows whether it is there
SLOW = {"millrace.testing.slow", "millrace.testing.device"}  # they slow down stages of feeds, so they know them
LIGHT = {"from millrace.distribution import __version__ as __version__", "from millrace.lazy import attach"}
ANYTHING = {"torch", "jax", "accelerate", "transformers", "__main__"}  # adapters and the entry point: above everything


def part_of(module: str) -> str:
    """``millrace.store.reader`` -> ``store``; the package itself is ``""``."""
    return module.split(".")[1] if "." in module else ""


def module_of(path: Path, root: Path) -> str:
    names = path.relative_to(root).with_suffix("").parts
    return ".".join(["millrace", *(names[:-1] if names[-1] == "__init__" else names)])


def is_module(name: str, root: Path) -> bool:
    path = root.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").exists() or path.with_suffix(".pyi").exists()


def imports(path: Path, root: Path) -> set[str]:
    """Every module of millrace that a source imports, at any depth, also under TYPE_CHECKING.

    ``from millrace.gather import gather`` is ``millrace.gather.gather`` where that is a module.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = ["millrace", *path.relative_to(root).parts[:-1]]
            above = names[: len(names) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            full = [f"{base}.{alias.name}" for alias in node.names]
            found |= {name if is_module(name, root) else base for name in full if base.split(".")[0] == "millrace"}
    return {name for name in found if name.split(".")[0] == "millrace"}


def allowed(importer: str, imported: str) -> bool:
    mine, theirs = part_of(importer), part_of(imported)
    if mine in ANYTHING or mine == theirs:
        return True
    if theirs == "":  # names from the top level hide where they come from; above the layers that is what they are for
        return mine in ("cli", "train", "testing")
    if theirs == "_core":
        return mine in CORE_USERS
    if mine == "testing":
        is_slow = theirs == "feed" and importer in SLOW
        return is_slow or (theirs in HEIGHT and HEIGHT[theirs] < HEIGHT["feed"])
    if theirs == "testing" or theirs in ANYTHING:
        return mine == "cli"
    if mine not in HEIGHT or theirs not in HEIGHT:
        return False
    return HEIGHT[theirs] < HEIGHT[mine] or (mine, imported.removeprefix("millrace.")) in EDGES


def named(path: Path) -> set[str]:
    """Every module of millrace that a source names as a string, as ``import_module`` takes it."""
    strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    return {text for text in strings if isinstance(text, str) and re.fullmatch(r"millrace(\.\w+)+", text)}


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        module = module_of(path, root)
        if module == "millrace":
            continue
        if part_of(module) not in {*HEIGHT, *ANYTHING, "testing"}:
            found.append(f"{module} is in no layer; add it to LINES")
        used = {**dict.fromkeys(named(path), "names"), **dict.fromkeys(imports(path, root), "imports")}
        found += [f"{module} {how} {name}" for name, how in sorted(used.items()) if not allowed(module, name)]
    return found


def test_no_part_imports_what_is_beside_or_above_it():
    assert violations(ROOT) == []


def test_the_package_itself_imports_nothing_but_its_loader_when_loaded():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = ast.unparse(node)
            is_own = "millrace" in source and source not in LIGHT
            assert not is_own, f"{source} runs at import; names load lazily"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("store/a.py", "from millrace.view import blocks"),
        ("store/a.py", "def f():\n    import millrace.feed.slots"),
        ("store/a.py", "from ..order import permute"),
        ("store/a.py", "from millrace import order"),
        ("store/a.py", "from millrace import Store"),
        ("view/a.py", "from millrace.gather import native"),
        ("view/a.py", "from millrace import _core"),
        ("errors.py", "from millrace.ragged import Ragged"),
        ("ragged.py", "import millrace.store"),
        ("text/a.py", "from millrace.scaling import fit"),
        ("feed/a.py", "from millrace.prepare import plan"),
        ("feed/a.py", "from millrace.train import loop"),
        ("testing/a.py", "from millrace.feed import Feed"),
        ("feed/a.py", "from millrace.testing import tiny"),
        ("store/a.py", "from millrace.torch import Dataset"),
        ("store/a.py", "from importlib import import_module\nimport_module('millrace.text.load')"),
        ("lazy.py", "MAKERS = {'scaling': 'millrace.scaling.apply'}"),
        ("utils/a.py", "import os"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, path, line):
    for part in (*HEIGHT, "testing"):
        (tmp_path / part).mkdir()
    for known in ("_core.pyi", "torch.py"):
        (tmp_path / known).touch()
    assert violations(tmp_path) == []
    target = tmp_path / path
    target.parent.mkdir(exist_ok=True)
    target.write_text(line)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("store/a.py", "from millrace.errors import ConfigError\nfrom . import b\nfrom millrace import _core"),
        ("view/a.py", "from millrace.gather.gather import Field"),
        ("view/a.py", "from millrace.gather import gather"),
        ("feed/a.py", "from millrace.store.reader import read_store\nfrom millrace.text import encode"),
        ("cli/a.py", "import millrace as mr\nfrom millrace.train import loop"),
        ("testing/a.py", "from millrace.store import platform"),
        ("torch.py", "from millrace.feed import Feed"),
    ],
)
def test_an_allowed_import_is_not(tmp_path, path, line):
    for part in ("store", "gather", "text", "feed", "train"):
        (tmp_path / part).mkdir()
    for known in ("gather/gather.py", "_core.pyi"):
        (tmp_path / known).touch()
    target = tmp_path / path
    target.parent.mkdir(exist_ok=True)
    target.write_text(line)
    assert violations(tmp_path) == []
