"""tier="ram": the same batches from memory, whatever happens to the files."""

import os

import numpy as np
import pytest

import millrace as mr
from millrace.store import reader
from millrace.testing import tiny_records, tiny_series, tiny_text

from .test_remote import same_batches

VIEWS = {
    "text": lambda path: mr.Blocks(tiny_text(path).split("train"), length=8),
    "series": lambda path: mr.Windows(tiny_series(path), lookback=5, horizon=2, include=["time"]),
    "records": lambda path: mr.Records(tiny_records(path).split("train")),
    "subset": lambda path: mr.Subset(mr.Windows(tiny_series(path), lookback=5, horizon=2), np.arange(60)[::-2]),
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("options", [{}, {"transform": lambda batch, rng: batch}], ids=["plain", "transform"])
def test_batches_and_states_are_the_same(tmp_path, kind, options):
    view, twin = VIEWS[kind](tmp_path / "a"), VIEWS[kind](tmp_path / "b")
    made = {"batch": 7, "seed": 3, "epochs": 2, "device": "numpy", **options}
    with mr.Feed(view, **made) as a, mr.Feed(twin, tier="ram", **made) as b:
        assert same_batches(a, b)


def test_nothing_is_read_from_the_files_once_they_are_loaded(tmp_path):
    """The files are changed under the feed, which keeps what it loaded."""
    view = mr.Windows(tiny_series(tmp_path / "store"), lookback=5, horizon=2)
    with mr.Feed(view, batch=7, seed=3, epochs=1, device="numpy") as feed:
        expected = [batch["x"].copy() for batch in feed]
    fresh = mr.Windows(mr.open_store(tmp_path / "store"), lookback=5, horizon=2)
    with mr.Feed(fresh, batch=7, seed=3, epochs=1, device="numpy", tier="ram") as feed:
        batches = iter(feed)
        got = [next(batches)["x"].copy()]
        for path in (tmp_path / "store").rglob("values.f32"):
            os.chmod(path, 0o644)
            path.write_bytes(bytes(path.stat().st_size))
        got += [batch["x"].copy() for batch in batches]
    np.testing.assert_equal(got, expected)


def test_what_does_not_fit_and_what_cannot_be_is_refused(tmp_path, monkeypatch):
    view = mr.Windows(tiny_series(tmp_path / "store"), lookback=5, horizon=2)
    with pytest.raises(mr.ConfigError, match="tier='disk'; expected 'ram'"):
        mr.Feed(view, batch=7, tier="disk")
    with pytest.raises(mr.ConfigError, match="copy of its own"):
        mr.Feed(view, batch=7, tier="ram", processes=True)
    monkeypatch.setattr(reader, "free_memory", lambda: 100)
    with pytest.raises(mr.ConfigError, match="needs 2,496 more bytes of memory, and 100 are free"):
        iter(mr.Feed(view, batch=7, tier="ram", device="numpy"))
