"""``millrace explain`` and ``millrace verify-resume``."""

import json
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run
from millrace.testing import tiny_store


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "text"
    tiny_store("text", path)
    return path


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "series"
    tiny_store("series", path)
    return path


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert run(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_step_of_a_store_is_what_the_feed_delivers(text: Path, capsys) -> None:
    view = mr.Blocks(mr.open_store(text).split("train"), length=8)
    feed = mr.Feed(view, batch=4, seed=7, device="numpy")
    options = ["--length", "8", "--batch", "4", "--seed", "7"]
    for step, batch in zip(range(1, 6), feed, strict=False):
        found = explained(capsys, str(text), "--step", str(step), *options)
        assert found["samples"] == batch.samples.tolist()
        assert found["positions"] == batch.positions.tolist()
        assert [row["rows"][0] for row in found["rows"]] == view.spans(batch.samples).starts.tolist()
    assert run(["explain", str(text), "--step", "3", *options]) == 0
    assert "step 3: 4 samples" in capsys.readouterr().out


def test_windows_name_their_entity(series: Path, capsys) -> None:
    found = explained(capsys, str(series), "--step", "2", "--lookback", "4", "--horizon", "2", "--batch", "3")
    store = mr.open_store(series)
    for row in found["rows"]:
        assert row["columns"]["name"] == store.columns["name"][row["record"]]
        assert store.offsets[row["record"]] <= row["rows"][0] < store.offsets[row["record"] + 1]


def test_a_store_of_several_columns_needs_the_name_of_one(tmp_path: Path, capsys) -> None:
    with mr.StoreWriter(
        tmp_path / "store", columns={"ids": mr.Column("uint16"), "more": mr.Column("uint16")}
    ) as writer:
        writer.append({"ids": np.arange(40), "more": np.zeros(40, int)})
    arguments = [str(tmp_path / "store"), "--step", "1", "--length", "8", "--batch", "4"]
    assert run(["explain", *arguments]) == 1
    assert "this store has ids, more; name one" in capsys.readouterr().err
    assert len(explained(capsys, *arguments, "--column", "ids")["rows"]) == 4


def test_a_run_needs_no_options_also_after_the_batch_changed(text: Path, tmp_path: Path, capsys) -> None:
    view = mr.Subset(mr.Blocks(mr.open_store(text).split("train"), length=8), range(0, 20, 2))
    delivered = []
    state = None
    for batch_size, steps in ((4, 3), (2, 5)):
        feed = mr.Feed(view, batch=batch_size, seed=1, device="numpy", run=tmp_path / "run")
        if state is not None:
            feed.load_state_dict(state)
        delivered += [batch.samples.tolist() for _, batch in zip(range(steps), feed, strict=False)]
        state = feed.state_dict()
        feed.close()
    for step, samples in enumerate(delivered, start=1):
        assert explained(capsys, str(tmp_path / "run"), "--step", str(step))["samples"] == samples


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "8", "--lookback", "3", "--horizon", "1"], "one kind"),
        (["--lookback", "3"], "--lookback without --horizon; windows need both"),
        (["--horizon", "3"], "--horizon without --lookback; windows need both"),
        ([], "is a text store; say what a sample is, as in: --length 1024"),
        (["--length", "8", "--split", "nope"], "split 'nope' is unknown"),
        (["--length", "99999999"], "no samples"),
        (["--column", "tokens"], "--column tokens without --length or --lookback"),
    ],
)
def test_options_that_make_no_view_are_refused(text: Path, options: list[str], message: str, capsys) -> None:
    assert run(["explain", str(text), "--step", "1", *options]) == 1
    assert message in capsys.readouterr().err


def test_verify_resume_proves_and_tells_what_it_tried(text: Path, series: Path, capsys) -> None:
    assert run(["verify-resume", str(text), "--length", "8", "--batch", "6", "--steps", "20", "--trials", "4"]) == 0
    shown = capsys.readouterr().out
    assert "all 4 trials identical" in shown
    assert "ranks" in shown
    assert (
        run(["verify-resume", str(series), "--lookback", "4", "--horizon", "2", "--trials", "2", "--split", "val"]) == 0
    )


def test_verify_resume_finds_an_order_that_is_not_exact(text: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.feed import cursor

    real = cursor.read
    monkeypatch.setattr(cursor, "read", lambda *arguments: max(0, real(*arguments) - 1))
    assert run(["verify-resume", str(text), "--length", "8", "--batch", "6", "--steps", "20", "--trials", "4"]) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_the_steps_of_a_run_that_is_read_by_epoch(text: Path, tmp_path: Path, capsys) -> None:
    view = mr.Subset(mr.Blocks(mr.open_store(text).split("train"), length=8), range(10))
    feed = mr.Feed(view, batch=4, seed=1, device="numpy", run=tmp_path / "run")
    loader = feed.by_epoch()
    delivered = [batch.samples[batch.valid].tolist() for _ in range(2) for batch in loader]
    for step, samples in enumerate(delivered, start=1):
        assert explained(capsys, str(tmp_path / "run"), "--step", str(step))["samples"] == samples
    assert run(["explain", str(tmp_path / "run"), "--step", str(len(delivered) + 1)]) == 1


def test_a_store_of_text_must_be_told_what_a_sample_is(text: Path, capsys) -> None:
    assert run(["explain", str(text), "--step", "1"]) == 1
    assert "--length" in capsys.readouterr().err


def test_a_step_beyond_every_line_is_one_line(text: Path, capsys) -> None:
    assert run(["explain", str(text), "--step", str(10**18), "--length", "8", "--batch", "32"]) == 1
    assert "2^63" in capsys.readouterr().err


def test_a_step_after_the_end_says_how_many_steps_there_are(text: Path, tmp_path: Path, capsys) -> None:
    view = mr.Subset(mr.Blocks(mr.open_store(text).split("train"), length=8), range(10))
    for last, steps in (("pad", 3), ("drop", 2)):
        feed = mr.Feed(view, batch=4, epochs=1, device="numpy", run=tmp_path / last, last=last)
        assert len(list(feed)) == steps
        assert run(["explain", str(tmp_path / last), "--step", str(steps)]) == 0
        for step in (steps + 1, 99):
            assert run(["explain", str(tmp_path / last), "--step", str(step)]) == 1
            assert (
                f"step {step} is after the end of the run {tmp_path / last}, which has {steps} steps"
                in capsys.readouterr().err
            )


def test_a_training_run_ends_where_its_metrics_do(text: Path, tmp_path: Path, capsys) -> None:
    """One that stopped between two lines of its log may have been a little further."""
    view = mr.Blocks(mr.open_store(text).split("train"), length=8)
    next(iter(mr.Feed(view, batch=2, device="numpy", run=tmp_path)))
    step = ["explain", str(tmp_path), "--step"]
    assert run([*step, "99"]) == 0
    assert "does not record its last step" in capsys.readouterr().out
    for max_steps, expected in ((3, 3), (25, 8), (6, 6)):
        (tmp_path / "run.json").write_text(json.dumps({"config": {"train": {"max_steps": max_steps, "log_every": 5}}}))
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 3, "loss": 1}\n{"step": 4')
        assert run([*step, str(expected)]) == 0
        assert "record its last" not in capsys.readouterr().out
        assert run([*step, str(expected + 1)]) == 1
        assert f"which has {expected} steps" in capsys.readouterr().err
