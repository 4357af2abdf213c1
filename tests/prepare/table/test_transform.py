"""Transforms of the user: what they make, and what they must keep to; tests/contract has those that crash."""

import numpy as np
import pandas as pd
import pytest

import millrace as mr
from millrace.prepare.table.read import sources

TRANSFORMS = """
import pyarrow as pa, pyarrow.compute as pc

def doubled(table):
    names = table.column_names
    made = table.append_column("z", pc.multiply(table["x"], 2.0)) if "x" in names else table
    return made.append_column("when", pc.add(table["t"], 1)).filter(pc.greater(made["x"], 10.0))

def raises_at_once(table):
    return table["no such column"]

def gives_nothing(table):
    return None

def forgets(table):
    return table if not len(table) else table.drop_columns(["x"])

def another_type(table):
    return table if not len(table) else table.set_column(0, "t", pa.array(["late"] * len(table)))
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Four files, and as many parts."""
    for k in range(4):
        frame = pd.DataFrame({"t": np.arange(30), "x": 30.0 * k + np.arange(30)})
        frame.to_parquet(tmp_path / f"{k}.parquet")
    (tmp_path / "own_transforms.py").write_text(TRANSFORMS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "PART_BYTES", 1)
    return str(tmp_path / "?.parquet")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def prepare(source, out, how, **options):
    return mr.prepare_table(source, out, **{"workers": 2, "time": "t", "transform": f"own_transforms:{how}", **options})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_transform_that_exits_on_a_table_without_rows_is_named(source, out, workers):
    with pytest.raises(mr.ConfigError, match=r'(?s)transform="sys:exit" raised SystemExit.*on a table without rows'):
        mr.prepare_table(source, out, time="t", transform="sys:exit", workers=workers)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises_at_once", r"raises_at_once. raised KeyError: .* \(on a table without rows, with the columns of '.*0\.parquet'\)"),
        ("gives_nothing", "transform= gave NoneType for a table without rows; it must give an Arrow table"),
        ("forgets", r"transform= left out column 'x' \(on '.*0\.parquet'\); it must always give it"),
        ("another_type", r"transform= gave column 't' as string, but int64 for a table without rows \(on '.*0\.parquet'\)"),
        ("missing", "cannot be loaded: module 'own_transforms' has no attribute 'missing'"),
    ],
)  # fmt: skip
def test_a_transform_that_does_not_keep_its_promise_is_told(source, out, how, said):
    with pytest.raises(mr.ConfigError, match=said):
        prepare(source, out, how, workers=1)
    assert not list(out.parent.glob("out*"))


def test_a_transform_makes_columns_and_takes_rows(source, out):
    report = prepare(source, out, "doubled", time="when", features=["z", "x"], scale="none", where="z < 200")
    expected = [30.0 * k + j for k in range(4) for j in range(30) if 10 < 30 * k + j < 100]
    store = report.open()
    assert store.columns["values"][:].tolist() == [[2 * x, x] for x in expected]
    assert store.columns["time"][:].tolist() == [int(x) % 30 + 1 for x in expected]
    assert report.dropped["where"] == 20


def test_a_transform_that_was_changed_reads_all_rows_anew(source, out, tmp_path, monkeypatch):
    """Else the parts of before would stay as the old function left them."""
    code = "import pyarrow.compute as pc\ndef made(t):\n    if len(t) and pc.max(t['x']).as_py() > {limit}: raise ValueError\n"
    code += "    return t.set_column(1, 'x', pc.multiply(t['x'], {factor}))\n"
    (tmp_path / "changed_transforms.py").write_text(code.format(limit=70, factor=2.0))
    options = {"time": "t", "transform": "changed_transforms:made", "scale": "none", "workers": 1}
    with pytest.raises(mr.ConfigError, match="raised ValueError"):
        mr.prepare_table(source, out, **options)
    assert list(out.with_name("out.partial").glob("parts/*/done.json"))
    (tmp_path / "changed_transforms.py").write_text(code.format(limit=1000, factor=10.0))
    said = []
    store = mr.prepare_table(source, out, progress=lambda *told: said.append(told), **options).open()
    assert np.array_equal(np.sort(store.columns["values"][:, 0]), 10.0 * np.arange(120))
    notes = [facts["note"] for stage, _, _, facts in said if stage == "note"]
    assert notes == ['transform="changed_transforms:made" has changed since this was begun: all rows are read again']
    (tmp_path / "changed_transforms.py").write_text(code.format(limit=1000, factor=100.0))
    with pytest.raises(mr.ConfigError, match="is finished, but with other sources or options: transform was"):
        mr.prepare_table(source, out, **options)
