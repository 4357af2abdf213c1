"""Small entities are read, measured and written many at a time; that changes no byte of the store, and nothing in its report."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.prepare.table.settle import index
from millrace.testing import tree_digest

CUTS = ({}, {"val_last": 0.3}, {"val": 0.2, "test": 0.2}, {"split_by": "entity", "val": 0.4})
ways = st.fixed_dictionaries(
    {
        "scale": st.sampled_from(["standard", "minmax", "robust", "none"]),
        "per_entity": st.booleans(),
        "fit_on": st.sampled_from(["train", "all"]),
        "nulls": st.sampled_from(["ffill", "drop", "interpolate", "mask"]),
        "duplicates": st.sampled_from(["first", "last", "mean"]),
        "min_rows": st.sampled_from([1, 4]),
        "freq": st.sampled_from([None, None, "1s"]),
        "calendar": st.sampled_from([[], ["hour"]]),
        "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
    }
)


def many_small(seed, *, entities=40):
    """Some with gaps, some with a time twice, some in no order, some of one row, one larger than the rest."""
    rng = np.random.default_rng(seed)
    frames = []
    for k in range(entities):
        rows = 60 if k == 7 else int(rng.integers(1, 9))
        times = np.sort(rng.permutation(80)[:rows])
        if rng.random() < 0.2:
            times[-1] = times[0]
        frame = pd.DataFrame({"name": f"e{k * 17 % entities}", "t": pd.to_datetime(times, unit="s")})
        for j in range(3):
            frame[f"f{j}"] = rng.normal(j, 2, rows).astype(np.float32)
        if rng.random() < 0.3:
            frame.loc[rng.random(rows) < 0.5, "f1"] = np.nan
        frame["kind"], frame["size"] = rng.choice(["a", "b", "c"], rows), float(k % 5)
        frames.append(frame.sample(frac=1, random_state=seed) if rng.random() < 0.2 else frame)
    return pd.concat(frames)


def digests(folder, frame, cuts, way, sizes):
    for k, part in enumerate(np.array_split(np.arange(len(frame)), 3)):  # an entity may go on in the next file
        frame.iloc[part].to_parquet(folder / f"{k}.parquet", row_group_size=50)
    for number, rows in enumerate(sizes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index, "BLOCK_ROWS", rows)
            out = folder / f"out{number}"
            report = mr.prepare_table(
                str(folder / "?.parquet"), out, entity="name", time="t", categorical=["kind"], static=["size"], workers=1,
                **cuts, **way,
            )  # fmt: skip
        yield tree_digest(out), report.rows, report.dropped, report.columns


@settings(max_examples=25)
@given(seed=st.integers(0, 99), cuts=st.sampled_from(CUTS), way=ways)
def test_together_or_one_by_one(twin, seed, cuts, way):
    with twin.folder() as folder:
        alone, few, many = digests(folder, many_small(seed), cuts, way, (1, 20, 1 << 15))
        assert alone == few == many


def test_entities_that_come_in_turn_lie_in_every_part(twin):
    """As files of one day each have them: the runs of an entity are read from many places."""
    frame = many_small(3)
    with twin.folder() as folder, twin.small(part_bytes=300):
        by_time = frame.sort_values("t", kind="stable")
        found = list(digests(folder, by_time, {"val_last": 0.3}, {"duplicates": "mean"}, (1, 1 << 15)))
        assert found[0] == found[1]
