"""``metadata.json`` + ``all_features.mmap``: entities, features, scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError, StoreCorrupt
from millrace.store.foreign import open_foreign
from millrace.store.store import Store

VALUES = np.arange(12, dtype="<f4").reshape(6, 2)
METADATA: dict[str, Any] = {"features": ["open", "close"], "entities": {"B": [0, 4], "A": [4, 6]}}


def write(folder: Path, metadata: Any = METADATA, scaler: Any = None, values: Any = VALUES) -> Path:
    (folder / "metadata.json").write_text(metadata if isinstance(metadata, str) else json.dumps(metadata))
    (folder / "all_features.mmap").write_bytes(values.tobytes())
    if scaler is not None:
        (folder / "scaler.json").write_text(scaler if isinstance(scaler, str) else json.dumps(scaler))
    return folder


def open_at(folder: Path) -> Store:
    return open_foreign(str(folder), None)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(StoreCorrupt) as caught:
        open_at(folder)
    for word in (str(folder), *words):
        assert word in str(caught.value)


def names_of(store: Store) -> list[str]:
    return list(store.columns["name"])


def test_entities_become_records_with_names(tmp_path: Path) -> None:
    store = open_at(write(tmp_path))
    assert (store.kind, store.num_records, store.num_rows) == ("series", 2, 6)
    assert (names_of(store), store.offsets.tolist()) == (["B", "A"], [0, 4, 6])
    assert np.array_equal(store.columns["values"], VALUES)
    assert store.meta["features"] == ["open", "close"]
    assert store.meta["layout"] == "metadata.json with all_features.mmap of 2 entities x 2 float32 features"
    assert not {"scaling", "target"} & store.meta.keys()


@pytest.mark.parametrize("key", ["entities", "entity_index", "entity_offsets", "index"])
@pytest.mark.parametrize(
    "entities",
    [
        {"A": [4, 6], "B": [0, 4]},
        [{"name": "A", "start": 4, "end": 6}, {"name": "B", "start": 0, "end": 4}],
        [{"entity": "B", "start_row": 0, "end_row": 4}, {"entity": "A", "start_row": 4, "end_row": 6}],
        {"A": {"start": 4, "end": 6}, "B": {"start_row": 0, "end_row": 4}},
    ],
)
def test_entities_are_read_in_each_spelling_and_sorted_by_start(tmp_path: Path, key: str, entities: Any) -> None:
    store = open_at(write(tmp_path, {"feature_columns": ["open", "close"], key: entities}))
    assert (names_of(store), store.offsets.tolist()) == (["B", "A"], [0, 4, 6])


def test_bare_list_of_names_beside_the_rows_is_passed_over(tmp_path: Path) -> None:
    metadata = {"features": ["a", "b"], "entities": ["A", "B"], "entity_index": {"A": [0, 6]}}
    assert names_of(open_at(write(tmp_path, metadata))) == ["A"]


def test_names_may_be_any_text_and_never_become_paths(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "größe", ""]
    spans = {name: [2 * k, 2 * k + 2] for k, name in enumerate(names)}
    assert names_of(open_at(write(tmp_path, {**METADATA, "entities": spans}))) == names


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8), random=st.randoms(use_true_random=False))
def test_any_complete_cover_opens(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], random: Any) -> None:
    offsets = np.cumsum([0, *lengths]).tolist()
    entities = [{"name": f"{k}", "start": offsets[k], "end": offsets[k + 1]} for k in range(len(lengths))]
    random.shuffle(entities)
    folder = write(
        tmp_path_factory.mktemp("cover"), {**METADATA, "entities": entities}, values=np.zeros((offsets[-1], 2), "<f4")
    )
    store = open_at(folder)
    found = dict(zip(names_of(store), np.diff(store.offsets).tolist(), strict=True))
    assert found == {f"{k}": length for k, length in enumerate(lengths)}


@pytest.mark.parametrize(
    ("entities", "words"),
    [
        ({"A": [0, 3], "B": [4, 6]}, ("'B'", "[4, 6)", "gap", "expected start 3")),
        ({"A": [1, 6]}, ("'A'", "gap", "expected start 0")),
        ({"A": [0, 4], "B": [3, 6]}, ("'B'", "overlaps", "expected start 4")),
        ({"A": [0, 4], "B": [4, 5]}, ("'B'", "ends at row 5", "6 rows")),
        ({"A": [0, 4], "B": [4, 9]}, ("'B'", "ends at row 9", "6 rows")),
        ({"A": [0, 10**30]}, ("'A'", "6 rows")),
        ({"A": [0, 6], "B": [6, 2]}, ("'B'", "end before they start")),
        ({"A": [-1, 6]}, ("'A'", "expected start 0")),
        ({"A": [0, 6.0]}, ("'A'", "two integers")),
        ({"A": [0, True]}, ("'A'", "two integers")),
        ({"A": 6}, ("'A'", "two integers")),
        ({"A": [0, 3, 6]}, ("'A'", "two integers")),
        ([{"name": "A", "start": 0}], ("'A'", "two integers")),
        ([{"start": 0, "end": 6}], ("name is None",)),
        ([{"name": "A", "start": 0, "end": 2}, {"name": "A", "start": 2, "end": 6}], ("'A'", "2 times")),
        ({"\ud800": [0, 6]}, ("not valid text",)),
        ({}, ("no entities", "6 rows")),
        (["A"], ("no entities under", "entity_index")),
        (None, ("no entities under",)),
    ],
)
def test_entities_that_do_not_cover_every_row_once_are_refused(
    tmp_path: Path, entities: Any, words: tuple[str, ...]
) -> None:
    refused(write(tmp_path, {**METADATA, "entities": entities}), "metadata.json", *words)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"features": []}, "no list of names"),
        ({"features": 2}, "no list of names"),
        ({"features": ["a", None]}, "name is None"),
        ({"features": ["a", "a"]}, "'a' is named 2 times"),
        ({"feature_columns": ["close", "open"]}, "differ"),
        ({"dtype": "float64"}, "float64"),
        ({"target": {"a": 1}}, "target name is"),
    ],
)
def test_metadata_that_cannot_be_meant_is_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    refused(write(tmp_path, {**METADATA, **change}), "metadata.json", word)


@pytest.mark.parametrize("text", ["", "[]", '{"a": NaN}', '{"features": ["a"], "features": ["b"]}'])
def test_metadata_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    refused(write(tmp_path, text), "metadata.json")


def test_data_without_metadata_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "metadata.json").unlink()
    refused(tmp_path, "metadata.json: cannot be read")


def test_size_that_is_no_whole_number_of_rows_is_refused(tmp_path: Path) -> None:
    write(tmp_path, values=VALUES.reshape(-1)[:-1])
    refused(tmp_path, "all_features.mmap", "44 bytes", "multiple of 8")


@pytest.mark.parametrize(("key", "value"), [("target", "close"), ("target_column", ["open", "close"])])
def test_target_is_kept(tmp_path: Path, key: str, value: Any) -> None:
    assert open_at(write(tmp_path, {**METADATA, key: value})).meta["target"] == value


@pytest.mark.parametrize(
    ("scaler", "scale"),
    [
        ({"scale": [2, 0.5]}, [2.0, 0.5]),
        ({"var": [4, 0.25]}, [2.0, 0.5]),
        ({"scale": [3, 1], "var": [4, 4]}, [3.0, 1.0]),
    ],
)
def test_scaler_becomes_mean_and_scale(tmp_path: Path, scaler: dict[str, Any], scale: list[float]) -> None:
    (tmp_path / "scaler.joblib").write_bytes(b"never opened")
    store = open_at(write(tmp_path, scaler={"mean": [1, -1.5], **scaler, "n_samples": 3}))
    assert store.scaling.method == "standard"
    assert (store.scaling.center.tolist(), store.scaling.scale.tolist()) == ([1.0, -1.5], scale)
    assert store.inverse([[1.0, 2.0]]).tolist() == [[1.0 + scale[0], -1.5 + 2 * scale[1]]]
    assert store.scale([[1.0 + scale[0], -1.5]]).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("scaler", "words"),
    [
        ({"mean": [0, 0], "scale": [1, 0]}, ("'close'", "0.0", "more than 0")),
        ({"mean": [0, 0], "scale": [-1, 1]}, ("'open'", "-1.0")),
        ({"mean": [0, 0], "var": [1, -1]}, ("var of feature 'close'",)),
        ({"mean": [0], "scale": [1, 1]}, ("mean is 1 numbers", "a list of 2")),
        ({"mean": [0, 0], "scale": [1, 1, 1]}, ("scale is 3 numbers",)),
        ({"scale": [1, 1]}, ("mean is None",)),
        ({"mean": [0, 0]}, ("scale is None",)),
        ({"mean": [0, "0"], "scale": [1, 1]}, ("mean of feature 'close'", "finite")),
        ({"mean": [0, True], "scale": [1, 1]}, ("mean of feature 'close'", "finite")),
        ({"mean": [10**400, 0], "scale": [1, 1]}, ("mean of feature 'open'", "finite")),
        ('{"mean": [1e999, 0], "scale": [1, 1]}', ()),
        ('{"mean": [NaN, 0], "scale": [1, 1]}', ("NaN",)),
    ],
)
def test_scaler_that_cannot_scale_is_refused(tmp_path: Path, scaler: Any, words: tuple[str, ...]) -> None:
    refused(write(tmp_path, scaler=scaler), "scaler.json", *words)


@pytest.mark.parametrize("name", ["scaler.joblib", "standard_scaler.pkl"])
def test_pickled_scaler_is_refused_with_the_line_that_converts_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"never opened")
    with pytest.raises(ConfigError) as caught:
        open_at(write(tmp_path))
    line = str(caught.value).partition("this line of Python: ")[2]
    assert [repr(str(tmp_path / name)) in line, repr(str(tmp_path / "scaler.json")) in line] == [True, True]
    compile(line, "conversion", "exec")


def test_dtype_other_than_float32_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    assert open_foreign(str(tmp_path), "float32").num_rows == 6
    with pytest.raises(ConfigError, match="dtype='float64' given"):
        open_foreign(str(tmp_path), "float64")


def test_fingerprint_follows_entities_features_and_scaling_but_no_other_key(tmp_path: Path) -> None:
    base = open_at(write(tmp_path)).fingerprint
    assert open_at(write(tmp_path, {**METADATA, "created": "today"})).fingerprint == base
    seen = {base, open_at(write(tmp_path, {**METADATA, "features": ["close", "open"]})).fingerprint}
    seen.add(open_at(write(tmp_path, {**METADATA, "entities": {"B": [0, 3], "A": [3, 6]}})).fingerprint)
    seen.add(open_at(write(tmp_path, {**METADATA, "entities": {"A": [0, 4], "B": [4, 6]}})).fingerprint)
    seen.add(open_at(write(tmp_path, scaler={"mean": [0, 0], "scale": [1, 1]})).fingerprint)
    assert len(seen) == 5
