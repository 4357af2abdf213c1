"""Forecasts of the rows to come: what the model says of them, their times, their units, as tables and in Python."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas
import pytest

import millrace as mr
from millrace.cli import run as millrace
from millrace.train import prediction
from millrace.train.backtest import backtest
from millrace.train.open_run import load_model
from millrace.train.prediction import next_times
from millrace.train.trainer import train

from .conftest import config_of


@pytest.fixture(scope="module")
def waves_run(waves, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "waves"
    train(config_of(waves, model__kind="lstm", data__lead=2), run)
    return run


def shorter(waves: Path, path: Path, rows: int, **meta) -> mr.Store:
    """The same series without their last rows."""
    store = mr.open_store(waves)
    columns = {name: store.layout.columns[name] for name in ("values", "name", "cuts")}
    with mr.StoreWriter(
        path, kind="series", columns=columns, meta={"features": ["a", "b", "c"], **meta}, cuts=mr.Cuts(("train", "val"))
    ) as writer:
        for k, name in enumerate(store.columns["name"][:]):
            first, last = store.offsets[k : k + 2].tolist()
            writer.append({"values": store.columns["values"][first : last - rows], "name": name, "cuts": [10]})
    return mr.open_store(path)


def test_the_rows_to_come_are_what_the_model_says_once_they_are_there(waves, waves_run, tmp_path):
    store = shorter(waves, tmp_path / "shorter", 6)  # lead and horizon
    trained = mr.open_run(waves_run).model()
    for entity in ("sensor-00", "sensor-07", "sensor-19"):
        known = backtest(trained, entity, windows=1)
        found = trained.predict(store, entity)
        assert (found.entity, found.targets) == (entity, ["a", "b", "c"])
        assert found.times.tolist() == known.rows[0].tolist()
        np.testing.assert_allclose(found.values, known.forecast[0], rtol=1e-5, atol=1e-6)


def test_batches_give_what_single_entities_give(waves, waves_run, monkeypatch):
    monkeypatch.setattr(prediction, "BATCH", 3)
    trained = load_model(waves_run)
    predictor = prediction.Predictor(trained)
    batches = list(prediction.predictions(predictor, np.flatnonzero(predictor.is_long_enough())))
    assert [len(batch) for batch in batches] == [3] * 6 + [2]
    for each in (each for batch in batches for each in batch):
        alone = trained.predict(entity=each.entity)
        np.testing.assert_allclose(each.values, alone.values, rtol=1e-5, atol=1e-6)
        assert each.times.tolist() == alone.times.tolist()


def test_a_store_that_means_something_else_is_refused(waves, waves_run, tmp_path):
    other = shorter(waves, tmp_path / "other", 0, categories={"x": ["a"]})
    with pytest.raises(mr.ConfigError, match=r"has other categories than .*, on which the model was trained"):
        mr.open_run(waves_run).model().predict(other, "sensor-00")


def test_what_cannot_be_forecast_is_told(waves, waves_run, tokens, tmp_path, capsys):
    with pytest.raises(mr.ConfigError, match="entity 'nobody' is not in"):
        mr.open_run(waves_run).model().predict(entity="nobody")
    with pytest.raises(mr.ConfigError, match="is not the folder of a training run"):
        mr.open_run(tmp_path)
    train(config_of(tokens, train__max_steps=1), tmp_path / "gpt")
    with pytest.raises(mr.ConfigError, match="forecasts nothing; see millrace generate"):
        mr.open_run(tmp_path / "gpt").model().predict(entity="x")
    for arguments, message in (
        ([], "what to forecast? --out forecast.csv"),
        (["--out", str(tmp_path / "no/where.csv")], "No such file or directory"),
        (["--out", str(tmp_path / "t.csv"), "--target", "z"], "target 'z' is not forecast by this run"),
    ):
        assert millrace(["forecast", str(waves_run), *arguments]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not list(tmp_path.glob("t.csv*"))
    assert millrace(["forecast", str(tmp_path / "none")]) == 1
    assert "none is not the folder of a training run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def heat(tmp_path_factory) -> tuple[Path, Path, pandas.DataFrame]:
    """Hourly temperatures of three sensors far from 0, each scaled by itself; the third is too short to be forecast."""
    folder = tmp_path_factory.mktemp("heat")
    frames = []
    for k, rows in enumerate((200, 150, 10)):
        when = pandas.date_range("2024-02-01", periods=rows, freq="h", tz="UTC")
        frames.append(pandas.DataFrame({"sensor": f"s{k}", "when": when, "heat": 1000.0 * k + 0.001 * np.arange(rows)}))
    frame = pandas.concat(frames, ignore_index=True)
    frame.to_parquet(folder / "t.parquet")
    mr.prepare_table(
        str(folder / "t.parquet"), folder / "store", entity=("sensor",), time="when", target=("heat",), val_last=0.2,
        per_entity=True,
    )  # fmt: skip
    train(config_of(folder / "store", model__kind="lstm", train__max_steps=2), folder / "run")
    return folder / "store", folder / "run", frame


def rows_of(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_a_table_has_original_units_and_the_times_after_the_last_row(heat, tmp_path, capsys):
    _, run, frame = heat
    assert millrace(["forecast", str(run), "--out", str(tmp_path / "f.csv")]) == 0
    told = capsys.readouterr().out
    assert f"wrote {tmp_path}/f.csv: 4 rows for each of 2 entities, after their last rows" in told
    assert "left out 1 entities with fewer than 16 rows: s2" in told
    heading, *rows = rows_of(tmp_path / "f.csv")
    assert heading == ["entity", "time", "heat"]
    assert [row[0] for row in rows] == ["s0"] * 4 + ["s1"] * 4
    for name in ("s0", "s1"):
        last = frame[frame.sensor == name].iloc[-1]
        mine = [row for row in rows if row[0] == name]
        expected = [last.when + pandas.Timedelta(hours=k) for k in (1, 2, 3, 4)]
        assert [pandas.Timestamp(row[1]) for row in mine] == expected
        assert all(abs(float(row[2]) - last.heat) < 0.2 for row in mine)


def test_parquet_holds_what_csv_holds_and_one_entity_can_be_asked_for(heat, tmp_path):
    _, run, _ = heat
    for name in ("f.csv", "f.parquet"):
        assert millrace(["forecast", str(run), "--entity", "s1", "--out", str(tmp_path / name)]) == 0
    table = pandas.read_parquet(tmp_path / "f.parquet")
    rows = rows_of(tmp_path / "f.csv")[1:]
    assert table.entity.tolist() == [row[0] for row in rows] == ["s1"] * 4
    assert table.time.tolist() == [pandas.Timestamp(row[1]) for row in rows]
    assert table.heat.tolist() == [float(row[2]) for row in rows]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.csv", "f.parquet"]


def test_after_an_append_forecasts_begin_behind_the_newest_row(heat, tmp_path):
    import shutil

    store, _, frame = heat
    shutil.copytree(store, tmp_path / "store")
    train(config_of(tmp_path / "store", model__kind="lstm", train__max_steps=1), tmp_path / "run")
    last = frame[frame.sensor == "s0"].iloc[-1]
    when = pandas.date_range(last.when, periods=6, freq="h")[1:]
    pandas.DataFrame({"sensor": "s0", "when": when, "heat": 0.5}).to_parquet(tmp_path / "new.parquet")
    mr.prepare_table(str(tmp_path / "new.parquet"), tmp_path / "store", entity=("sensor",), time="when", append=True)
    out = str(tmp_path / "f.csv")
    assert millrace(["forecast", str(tmp_path / "run"), "--entity", "s0", "--out", out]) == 0
    assert pandas.Timestamp(rows_of(tmp_path / "f.csv")[1][1]) == when[-1] + pandas.Timedelta(hours=1)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (["2024-01-01", "2024-01-02", "2024-01-05", "2024-01-06"], ["2024-01-07", "2024-01-08"]),
        (["2023-11-01", "2023-12-01", "2024-01-01"], ["2024-02-01", "2024-03-01"]),
        (["2023-11-30", "2023-12-31", "2024-01-31"], ["2024-02-29", "2024-03-31"]),
        (["2023-03-15", "2023-06-15", "2023-09-15"], ["2023-12-15", "2024-03-15"]),
        (["2022-01-01", "2023-01-01", "2024-01-01"], ["2025-01-01", "2026-01-01"]),
        (["2024-01-01", "2024-01-02", "2024-01-05", "2024-01-13"], ["2024-01-16", "2024-01-19"]),  # the median
    ],
)
def test_times_go_on_by_their_usual_step(times, expected):
    given = np.array(times, "datetime64[s]").astype(np.int64)
    found = next_times(given, "s", 2).astype("datetime64[s]")
    assert found.tolist() == np.array(expected, "datetime64[s]").tolist()
