"""A name that is nearly right is answered with the right one."""

import numpy as np
import pytest

import millrace as mr
from millrace.errors import closest

STORE = mr.from_arrays(
    {"values": np.zeros((9, 2)), "time": range(9), "label": [1]},
    [0, 9], per={"label": "record"}, kind="series", meta={"features": ["origin", "dest"]},
)  # fmt: skip


@pytest.mark.parametrize(
    ("use", "near"),
    [
        (lambda: STORE.columns["Values"], "values"),
        (lambda: STORE.columns["lable"], "label"),
        (lambda: mr.Records(STORE, columns=["Label"]), "label"),
        (lambda: mr.Windows(STORE, lookback=2, horizon=1, target=["Origin"]), "origin"),
        (lambda: mr.Windows(STORE, lookback=2, horizon=1, inputs="dst"), "dest"),
        (lambda: mr.Windows(STORE, lookback=2, horizon=1, column="valeus"), "values"),
        (lambda: mr.Windows(STORE, lookback=2, horizon=1, include="times"), "time"),
    ],
)
def test_did_you_mean(use, near: str) -> None:
    with pytest.raises((mr.ConfigError, KeyError), match=rf"is unknown \(did you mean '{near}'\?\); "):
        use()


def test_a_split_that_is_nearly_right(tmp_path) -> None:
    from millrace.testing import tiny_store

    with pytest.raises(
        mr.ConfigError, match=r"split 'Val' is unknown \(did you mean 'val'\?\); this store has train, val"
    ):
        tiny_store("text", tmp_path / "s").split("Val")


def test_nothing_near_names_nothing() -> None:
    assert closest("xyz", ["origin", "dest"]) is None
    with pytest.raises(KeyError, match="column 'xyz' is unknown; the store has values, time, label"):
        STORE.columns["xyz"]
