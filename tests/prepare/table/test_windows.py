"""From files to windows: x and y are what brute force finds in the original frame, and train never sees what comes later."""

import contextlib

import numpy as np
import pandas as pd
import pytest
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.testing import tree_digest

FEATURES = ["f0", "f1"]


def by_force(entities, options, names, lookback, horizon, stride, lead, gap, values):
    """(entity, x, y) of every window of every split: all starts are tried."""
    found = {name: [] for name in names}
    for entity in entities:
        rows = values[entity.name]
        edges = [0, *entity.cuts, len(rows)]
        for k, name in enumerate(names):
            first = None
            for start in range(len(rows) - lookback - lead - horizon + 1):
                low = start + lookback + lead
                inside = edges[k] + (gap if k else 0) <= low and low + horizon <= edges[k + 1]
                if not inside:
                    continue
                first = start if first is None else first
                if (start - first) % stride == 0:
                    found[name].append((entity.name, rows[start : start + lookback], rows[low : low + horizon]))
    return found


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    way=st.sampled_from(["from", "from+test", "share", "last", "last+test", "none"]),
    gap=st.integers(0, 3),
    lookback=st.integers(1, 4),
    horizon=st.integers(1, 3),
    stride=st.integers(1, 3),
    lead=st.integers(0, 2),
    is_small=st.booleans(),
)
def test_windows_of_splits_by_time(twin, seed, way, gap, lookback, horizon, stride, lead, is_small):
    frame = twin.random_frame(seed, rows=60, names=["A", "B", "C"], kinds=["float64"] * 2)
    start = twin.START * 1000
    options = {
        "from": {"val_from": "2020-01-01T01:40:00"},
        "from+test": {"val_from": "2020-01-01T01:00:30", "test_from": "2020-01-01 02:00"},
        "share": {"val": 0.2, "test": 0.1},
        "last": {"val_last": 0.29},
        "last+test": {"val_last": 0.1, "test_last": 0.7},
        "none": {},
    }[way]
    with twin.folder() as folder:
        written = twin.write(frame, folder / "in", layout="spread", seed=seed)
        entities = twin.cleaned(written.frame, FEATURES)
        low, high = written.frame["t"].min(), written.frame["t"].max()
        tenth = (high - low) / 10
        times = {
            "from": [start + 6_000_000],
            "from+test": [start + 3_630_000, start + 7_200_000],
            "share": [high - 3 * tenth, high - tenth],
        }.get(way)
        for entity in entities:
            rows = len(entity.time)
            if times is not None:
                entity.cuts = [int((entity.time < time).sum()) for time in times]
            elif way == "last":
                entity.cuts = [rows - rows * 29 // 100]
            elif way == "last+test":
                entity.cuts = [rows - rows * 8 // 10, rows - rows * 7 // 10]
        names = ["train", "val", "test"][: 1 + (0 if way == "none" else len(entities[0].cuts))]
        rows = {name: sum(len(e.time[e.split(k)]) for e in entities) for k, name in enumerate(names)}
        assume(all(rows.values()))
        with twin.small() if is_small else contextlib.nullcontext():
            report = mr.prepare_table(
                written.paths,
                folder / "out",
                workers=1,
                gap=gap if way != "none" else 0,
                target="f1",
                **options,
                **written.options,
            )
        assert report.rows == rows
        store = mr.open_store(folder / "out")
        stored = twin.read(store)
        body = store.manifest.scaling
        center, scale = np.array(body["center"]), np.array(body["scale"])
        scaled = {
            e.name: ((twin.filled(e, FEATURES, None, center) - center) / scale).astype(np.float32) for e in entities
        }
        for entity in entities:
            if entity.cuts:
                assert stored[entity.name]["cuts"].tolist() == entity.cuts
        expected = by_force(
            entities, options, names, lookback, horizon, stride, lead, gap if way != "none" else 0, scaled
        )
        for name in names:
            view = mr.Windows(
                store.split(name), lookback=lookback, horizon=horizon, stride=stride, lead=lead, target=["f1"]
            )
            assert len(view) == len(expected[name])
            if len(view):
                items = view[list(range(len(view)))]
                np.testing.assert_array_equal(items["x"], np.stack([x for _, x, _ in expected[name]]))
                np.testing.assert_array_equal(items["y"], np.stack([y[:, 1:] for _, _, y in expected[name]]))
                who = np.asarray(store.columns["name"][:])[view.records(np.arange(len(view)))]
                assert who.tolist() == [entity for entity, _, _ in expected[name]]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), way=st.sampled_from(["hash", "list"]), is_small=st.booleans())
def test_splits_by_entity(twin, seed, way, is_small):
    frame = twin.random_frame(seed, rows=80, names=twin.NAMES, kinds=["float64"] * 2)
    names = sorted(set(frame["name"]), key=str.encode)
    if way == "hash":
        options = {"val": 0.25, "test": 0.25}
        share = {name: (xxhash.xxh3_64_intdigest(name.encode()) >> 11) / 2**53 for name in names}
        split = {name: "val" if share[name] < 0.25 else "test" if share[name] < 0.5 else "train" for name in names}
    else:
        options = {"val_entities": names[:2], "test_entities": names[2:3]}
        split = {name: "val" if k < 2 else "test" if k < 3 else "train" for k, name in enumerate(names)}
    assume(set(split.values()) == {"train", "val", "test"})
    with twin.folder() as folder:
        written = twin.write(frame, folder / "in", layout="spread", seed=seed)
        with twin.small() if is_small else contextlib.nullcontext():
            mr.prepare_table(written.paths, folder / "out", workers=1, split_by="entity", **options, **written.options)
        store = mr.open_store(folder / "out", check=True)
        entities = twin.cleaned(written.frame, FEATURES)
        train = np.concatenate([entity.values for entity in entities if split[entity.name] == "train"])
        center, scale = twin.fitted("standard", train)
        np.testing.assert_allclose(store.manifest.scaling["center"], center, rtol=1e-10, atol=1e-9)
        for name in ("train", "val", "test"):
            part = store.split(name)
            mine = [entity for entity in entities if split[entity.name] == name]
            assert np.asarray(part.columns["name"][:]).tolist() == [entity.name for entity in mine]
            full = np.concatenate([(twin.filled(e, FEATURES, None, center) - center) / scale for e in mine])
            np.testing.assert_allclose(part.columns["values"][:], full, rtol=1e-6, atol=1e-6)
            view = mr.Windows(part, lookback=2, horizon=1)
            assert len(view) == sum(max(0, len(entity.time) - 2) for entity in mine)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    way=st.sampled_from(["time", "last", "entity"]),
    method=st.sampled_from(["standard", "minmax", "robust"]),
    nulls=st.sampled_from(["ffill", "interpolate", "mask", "value:1"]),
    per_entity=st.booleans(),
    has_grid=st.booleans(),
    is_small=st.booleans(),
)
def test_nothing_after_the_cut_changes_a_byte_of_train(twin, seed, way, method, nulls, per_entity, has_grid, is_small):
    """Every value at or after the cut is another one, missing or infinite: train samples and scaling stay as they are."""
    frame = twin.random_frame(seed, rows=60, names=["A", "B", "C", "D"], kinds=["float64"] * 2, missing=0.2)
    options = {
        "time": {"val_from": "2020-01-01T01:20:00"},
        "last": {"val_last": 0.3},
        "entity": {"split_by": "entity", "val_entities": ["B"]},
    }[way]
    rng = np.random.default_rng(seed)
    step = 60 if has_grid else None
    later = np.zeros(len(frame), bool)
    for entity in twin.cleaned(frame, FEATURES, step=step):
        if way == "entity":
            later |= (frame["name"] == "B").to_numpy()
        elif way == "time":
            later |= (frame["t"] >= twin.START + 4800).to_numpy()
        else:
            rows = len(entity.time)
            cut = rows - rows * 3 // 10
            if cut < rows:
                later |= ((frame["name"] == entity.name) & (frame["t"] >= entity.time[cut])).to_numpy()
    assume(later.any() and not later.all())
    other = frame.copy()
    for name in FEATURES:
        noise = rng.choice([np.nan, np.inf, 1e12, -3.5], len(frame)) * rng.choice([1, -1], len(frame))
        other.loc[later, name] = noise[later]
    with twin.folder() as folder:
        made = []
        for k, version in enumerate((frame, other)):
            written = twin.write(version, folder / f"in{k}", layout="spread", seed=seed)
            with twin.small() if is_small else contextlib.nullcontext():
                mr.prepare_table(
                    written.paths,
                    folder / f"out{k}",
                    workers=1,
                    scale=method,
                    nulls=nulls,
                    per_entity=per_entity,
                    freq="1min" if has_grid else None,
                    **options,
                    **written.options,
                )
            made.append(mr.open_store(folder / f"out{k}"))
        one, two = made
        assert one.manifest.scaling == two.manifest.scaling
        for lookback, horizon in ((1, 1), (3, 2)):
            views = [mr.Windows(store.split("train"), lookback=lookback, horizon=horizon) for store in made]
            assert len(views[0]) == len(views[1])
            if len(views[0]):
                samples = list(range(len(views[0])))
                for key in ("x", "y"):
                    assert views[0][samples][key].tobytes() == views[1][samples][key].tobytes()
        train = [twin.read(store) for store in made]
        for name, mine in train[0].items():
            cut = mine["cuts"][0] if "cuts" in mine else 0 if name == "B" else len(mine["time"])
            for column, values in mine.items():
                if column in ("values", "mask", "time"):
                    assert values[:cut].tobytes() == train[1][name][column][:cut].tobytes()
                elif way != "entity" or name != "B":
                    assert values.tobytes() == train[1][name][column].tobytes()


def test_fit_on_all_does_leak_which_is_why_it_must_be_asked_for(twin, tmp_path):
    """The test above can fail."""
    frame = twin.random_frame(1, names=["A"], kinds=["float64"] * 2)
    for k in range(2):
        frame.loc[frame["t"] > twin.START + 4800, "f0"] *= 1 + k
        written = twin.write(frame, tmp_path / f"in{k}")
        mr.prepare_table(
            written.paths,
            tmp_path / f"out{k}",
            workers=1,
            val_from="2020-01-01T01:20:00",
            fit_on="all",
            **written.options,
        )
    one, two = (mr.open_store(tmp_path / f"out{k}").manifest.scaling["center"] for k in range(2))
    assert one[0] != two[0]


@pytest.mark.parametrize(
    ("time", "cut", "rows"),
    [
        ("timestamp[ms]", "2020-01-01T00:05:00", 5),
        ("timestamp[ms]", "2020-01-01T00:04:00.000001", 5),
        ("timestamp[ms]", "2020-01-01 00:05", 5),
        ("timestamp[us, tz=UTC]", "2020-01-01T00:05:00", 5),
        ("timestamp[us, tz=UTC]", "2020-01-01T02:05:00+02:00", 5),
        ("timestamp[ns, tz=Asia/Tokyo]", "2020-01-01T00:05:00.000000000", 5),
        ("timestamp[ns, tz=Asia/Tokyo]", "2020-01-01T00:04:00.000000001Z", 5),
        ("date32", "2020-01-06", 5),
        ("date32", "2020-01-05T00:00:01", 5),
        ("int64", 1_577_837_100, 5),
        ("int32", "300", 5),
        ("float64", 37.5, 5),
        ("float64", "30.1", 5),
    ],
)
def test_times_of_every_kind_cut_where_they_say(twin, tmp_path, time, cut, rows):
    step = 86400 if time == "date32" else 60
    frame = pd.DataFrame({"name": "A", "t": twin.START + step * np.arange(10), "f0": np.arange(10.0)})
    written = twin.write(frame, tmp_path / "in", time=time)
    report = mr.prepare_table(written.paths, tmp_path / "out", workers=1, val_from=cut, **written.options)
    assert report.rows == {"train": rows, "val": 10 - rows}


@pytest.mark.parametrize(
    ("time", "cut", "said"),
    [
        ("timestamp[ms]", "yesterday", r"val begins at 'yesterday', which is no time; give 2023-01-01"),
        ("timestamp[ms]", "2020-01-01T00:05:00Z", "has a zone, but the times have none; give it without"),
        ("int64", "2020-01-01", "the times are plain numbers; give a number"),
        (
            "timestamp[ms]",
            "2019-01-01",
            r"split 'train' would be empty: .* at or before the first row, .* run from 2020-01-01T00:01.* to 2020-01-01T02.*; move",
        ),
        (
            "timestamp[ms]",
            "2029-01-01",
            r"split 'val' would be empty: .* as times run from 2020-01-01T00:01.* to .*; move .*what was read is kept",
        ),
    ],
)
def test_cuts_that_cannot_be(twin, tmp_path, time, cut, said):
    written = twin.write(twin.random_frame(1, kinds=["float64"]), tmp_path / "in", time=time)
    with pytest.raises(mr.ConfigError, match=said):
        mr.prepare_table(written.paths, tmp_path / "out", workers=1, val_from=cut, **written.options)


def test_times_beyond_the_precision_of_floats_are_cut_exactly(tmp_path):
    """Nanoseconds since 1970 are 1.6e18; a float64 counts in steps of 256 there."""
    times = 1_600_000_000_000_000_000 + np.arange(101)
    pd.DataFrame({"t": times, "x": 1.0 * np.arange(101)}).to_parquet(tmp_path / "a.parquet")
    report = mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, time="t", val=0.29, test=0.1)
    assert report.rows == {"train": 61, "val": 29, "test": 11}
    again = mr.prepare_table(
        str(tmp_path / "a.parquet"),
        tmp_path / "same",
        workers=1,
        time="t",
        val_from=str(times[61]),
        test_from=str(times[90]),
    )
    assert again.rows == report.rows
    assert tree_digest(tmp_path / "out" / "shards") == tree_digest(tmp_path / "same" / "shards")
