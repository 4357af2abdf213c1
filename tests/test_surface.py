"""The public surface: exactly these names, each where the lazy table and the type checker say, and no code in data."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import millrace
from millrace.native import core

ROOT = Path(millrace.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

# Relied on outside the repository: a name may be added here, never taken away.
NAMES = [
    "Batch", "BlockShuffled", "Blocks", "Column", "Concat", "ConfigError", "Cuts", "Feed", "FeedError", "LeaseLost",
    "MillraceError", "Mixture", "MixtureOrder", "QueueError", "QueueUnreachable", "Packed", "Ragged", "Records", "ResumeMismatch",
    "Sequential", "Shuffled", "SourceError", "Spans", "StageFailed", "Store", "StoreCorrupt", "StoreError", "StoreLocked",
    "StoreNotFound", "StoreTooNew", "StoreUnreachable", "StoreWriteFailed", "StoreWriter", "Subset", "TrainError", "View",
    "Warmup", "Windows", "__version__", "balanced", "cu_seqlens", "export", "from_arrays", "from_pandas", "from_spec", "k_fold",
    "open_run", "open_store", "prepare_records", "prepare_table", "prepare_text", "pull", "push", "random_split",
    "sorted_by",
]  # fmt: skip


def test_the_public_names_are_exactly_these():
    assert millrace.__all__ == sorted(NAMES)
    assert dir(millrace) == millrace.__all__


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_can_be_had_and_has_a_docstring(name):
    value = getattr(millrace, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__doc__


@pytest.mark.parametrize("name", sorted(millrace._NAMES))
def test_a_name_is_defined_in_the_module_the_table_names(name):
    module = f"millrace.{millrace._NAMES[name]}"
    assert getattr(import_module(module), name).__module__ == module


def test_the_type_checker_sees_the_same_names_in_the_same_modules():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "`as` the same name is what makes it public for type checkers"
            seen[alias.name] = node.module
    packages = dict.fromkeys(millrace._PACKAGES, "millrace")
    assert seen == {name: f"millrace.{module}" for name, module in millrace._NAMES.items()} | packages


@pytest.mark.parametrize("name", millrace._PACKAGES)
def test_a_package_of_names_comes_when_it_is_asked_for(name):
    package = getattr(millrace, name)
    assert package is import_module(f"millrace.{name}")
    assert package.__all__ == sorted(package.__all__)
    assert all(getattr(package, own).__doc__ for own in package.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'millrace' has no attribute 'Stoer'"):
        millrace.Stoer  # noqa: B018


# No code in data (promise 8): what could run code from a file is not called anywhere. Text may name it.

MODULES = {"joblib", "marshal", "shelve", "dill", "cloudpickle", "yaml", "jsonpickle"}
CALLS = re.compile(
    r"(pickle\.(load|loads|Unpickler)|_pickle\.\w+|eval|exec|__import__|builtins\.(eval|exec)|yaml\.\w+|os\.system)"
)


def dangers(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if name.split(".")[0] in MODULES or CALLS.fullmatch(name)]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if CALLS.fullmatch(called):
                found.append(called)
            if options.get("allow_pickle", "False") != "False":
                found.append("allow_pickle")
            if called == "torch.load" and options.get("weights_only") != "True":
                found.append("torch.load without weights_only=True")
            if options.get("shell", "False") != "False":
                found.append("shell")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_here_runs_code_from_data(path):
    # A feed's own workers get one pickle from it, by a descriptor that only they inherit.
    own = ["pickle.loads"] if path.relative_to(ROOT).as_posix() == "feed/processes/job.py" else []
    assert dangers(path.read_text()) == own


@pytest.mark.parametrize(
    "line",
    [
        "import joblib",
        "import yaml",
        "from joblib import load",
        "import pickle; pickle.load(f)",
        "import pickle; pickle.loads(b)",
        "from pickle import loads",
        "from pickle import Unpickler as U",
        "eval('1')",
        "exec('1')",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_a_way_to_run_code_is_found(line):
    assert len(dangers(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "np.load(f, allow_pickle=False)",
        "torch.load(f, weights_only=True)",
        "text = 'convert it: joblib.load(path)'",
        "import pickle; pickle.dumps(x)",
    ],
)
def test_harmless_lines_are_not(line):
    assert dangers(line) == []


@pytest.mark.needs_core
def test_the_types_of_the_core_are_those_of_its_names():
    tree = ast.parse((ROOT / "_core.pyi").read_text())
    typed = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert typed == {name for name in dir(core) if not name.startswith("_")}
