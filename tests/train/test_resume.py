"""Exact resume: kill -9 at any step, on any number of ranks, and the run is the one that was never killed."""

from __future__ import annotations

import json
import random
import signal

import numpy as np
import pytest
import torch

import millrace as mr
from millrace.cli.explain import explain_run
from millrace.train.config import parse_config
from millrace.train.trainer import train

from .conftest import config_of, lines, losses, nano, weights


@pytest.mark.parametrize(
    "changes",
    [
        {"model__dropout": 0.1},
        {"model__kind": "lstm", "optimizer__name": "adafactor"},
        {"model__kind": "transformer", "optimizer__name": "sgd", "optimizer__momentum": 0.9, "train__micro_batch": 5},
    ],
    ids=["gpt", "lstm", "transformer"],
)
def test_forty_steps_are_bitwise_the_same_after_kills(changes, tokens, waves, tmp_path, start, seed):
    store = waves if "model__kind" in changes else tokens
    values = nano(store, train__max_steps=40, evaluation__every=9, checkpoint__every=4, **changes)
    start(values, tmp_path / "straight").finish()
    moments = random.Random(seed)
    run, kills = tmp_path / "killed", 0
    for step in sorted(moments.sample(range(2, 36), 3)):
        ranks = start(values, run, stand_at=39)
        ranks.reach(step)
        ranks.kill()
        kills += ranks.processes[0].exitcode == -signal.SIGKILL
    assert kills == 3
    start(values, run).finish()
    assert losses(run) == losses(tmp_path / "straight")
    assert sorted(losses(run)) == list(range(1, 41))
    straight, killed = weights(tmp_path / "straight"), weights(run)
    assert all(torch.equal(straight[name], killed[name]) for name in straight)
    evaluations = [[line for line in lines(path) if "val_loss" in line] for path in (run, tmp_path / "straight")]
    assert evaluations[0] == evaluations[1]
    assert [line["step"] for line in evaluations[0]] == [9, 18, 27, 36, 40]


def test_four_ranks_killed_and_resumed_on_two_one_and_three_see_the_same_samples(waves, tmp_path, start):
    """The samples of every step that counts, over all ranks, are those of an undisturbed line."""
    log = tmp_path / "samples.jsonl"
    values = nano(
        waves, model__kind="own_models:Remembers", train__max_steps=40, checkpoint__every=3,
        model__options={"features": 3, "targets": 3, "log": str(log)},
    )  # fmt: skip
    run = tmp_path / "run"
    for ranks, step in ((4, 8), (2, 17), (1, 26)):
        began = start(values, run, ranks, stand_at=39)
        began.reach(step)
        began.kill()
        assert set(began.wait()) == {-signal.SIGKILL}, began.output
    start(values, run, 3).finish()
    view = mr.Windows(mr.open_store(waves).split("train"), lookback=16, horizon=4)
    order = mr.Shuffled(len(view), seed=7)
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    for line in seen:  # steps done again after a kill hold what they held before
        assert line["samples"] == order.samples(np.array(line["positions"])).tolist()
    first = 0
    for ranks in (4, 2, 1, 3):  # each life goes on at a checkpoint of the one before, and repeats or skips nothing
        positions = sorted(p for line in seen if line["ranks"] == ranks for p in line["positions"])
        whole = [p for p in positions if p < max(positions) // 12 * 12]  # ranks are not killed at quite the same step
        assert whole == list(range(positions[0], len(whole) + positions[0]))
        assert positions[0] % 36 == 0
        assert positions[0] <= first
        first = max(positions) + 1
    assert first == 40 * 12
    assert sorted(losses(run)) == list(range(1, 41))


def test_a_run_continues_where_it_is_and_can_be_made_longer(tokens, tmp_path):
    from millrace.train.trainer import train

    run = tmp_path / "run"
    train(config_of(tokens, train__max_steps=6), run)
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    train(config_of(tokens, train__max_steps=6), run)
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    train(config_of(tokens, train__max_steps=9, train__batch=6), run)
    assert sorted(losses(run)) == list(range(1, 10))
    starts = [json.loads(line) for line in (run / "feed.jsonl").read_text().splitlines()]
    assert [(start["step"], start["position"], start["batch"]) for start in starts] == [(1, 0, 12), (7, 72, 6)]


def test_metrics_are_cut_to_whole_lines_up_to_the_checkpoint(tokens, tmp_path):
    from millrace.train.trainer import train

    run = tmp_path / "run"
    train(config_of(tokens, train__max_steps=6), run)
    kept = (run / "metrics.jsonl").read_bytes()
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    train(config_of(tokens, train__max_steps=6), run)
    assert (run / "metrics.jsonl").read_bytes() == kept


def test_a_run_pins_its_snapshot(tmp_path):
    """Rows appended to the store after the run began are not seen by it."""
    from millrace.train.dist import World
    from millrace.train.trainer import Trainer, train

    columns = {"tokens": mr.Column("uint16")}
    with mr.StoreWriter(tmp_path / "store", kind="text", columns=columns, meta={"vocabulary": 50}) as writer:
        writer.append({"tokens": np.arange(2000) % 50})
    train(config_of(tmp_path / "store", train__max_steps=4), tmp_path / "run")
    pinned = mr.open_store(tmp_path / "store").fingerprint
    with mr.StoreWriter(tmp_path / "store", append=True) as writer:
        writer.append({"tokens": np.arange(2000) % 50})
    trainer = Trainer(
        config_of(tmp_path / "store", train__max_steps=6), tmp_path / "run", World(0, 1, torch.device("cpu"))
    )
    assert trainer.store.fingerprint == pinned
    assert trainer.step == 4
    trainer.run()
    trainer.close()
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_another_store_is_refused(tokens, tmp_path):
    import shutil

    from millrace.train.trainer import train

    shutil.copytree(tokens, tmp_path / "moved")
    with mr.StoreWriter(
        tmp_path / "other", kind="text", columns={"tokens": mr.Column("uint16")}, meta={"vocabulary": 200}
    ) as writer:
        writer.append({"tokens": np.arange(2000) % 50})
    train(config_of(tokens, train__max_steps=2), tmp_path / "run")
    train(config_of(tmp_path / "moved", train__max_steps=3), tmp_path / "run")
    with pytest.raises(mr.ConfigError, match=r"other does not hold what the run began with.*it is another store"):
        train(config_of(tmp_path / "other", train__max_steps=4), tmp_path / "run")


def test_another_input_is_refused_and_the_same_elsewhere_continues(tmp_path, capsys):
    from millrace.train.run_folder import read_run
    from millrace.train.trainer import train

    class Printed:
        say = show = note = staticmethod(print)

    one, moved, other = tmp_path / "one.txt", tmp_path / "moved.txt", tmp_path / "other.txt"
    one.write_text("a few words of one text. " * 200)
    other.write_text("now for something else! " * 200)
    run, options = tmp_path / "run", {"tokenizer": "bytes", "val": 0, "workers": 1}

    def go_on(path, steps, **prepare):
        changes = {"data__input": str(path), "data__prepare": {**options, **prepare}, "train__max_steps": steps}
        train(config_of("", **changes), run, console=Printed())

    go_on(one, 2)
    began = (run / "run.json").read_bytes()
    with pytest.raises(mr.ConfigError, match=r"data.input was '.*one.txt' in the run .* and is '.*other.txt' now"):
        go_on(other, 3)
    with pytest.raises(mr.ConfigError, match=r"data.prepare was .*'val': 0} .* and is .*'val': 0.1"):
        go_on(one, 3, val=0.1)
    assert (run / "run.json").read_bytes() == began
    one.rename(moved)
    go_on(moved, 3, workers=2)
    go_on(tmp_path / "." / "moved.txt", 4)
    assert "has changed" not in capsys.readouterr().out
    moved.write_text("more")
    go_on(moved, 5)
    assert f"note: {moved} has changed since the run began" in capsys.readouterr().out
    moved.unlink()
    go_on(moved, 6)
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    train(config_of(run / "data", train__max_steps=7), run)
    assert read_run(run).config.data.input == ""


def test_an_input_for_a_run_on_a_store_is_refused_before_it_is_prepared(tokens, tmp_path):
    from millrace.train.trainer import train

    (tmp_path / "t.txt").write_text("words " * 500)
    train(config_of(tokens, train__max_steps=2), tmp_path / "run")
    with pytest.raises(mr.ConfigError, match=r"data.input was '' in the run .* and is '.*t.txt' now"):
        train(config_of("", data__input=str(tmp_path / "t.txt"), train__max_steps=3), tmp_path / "run")
    assert not (tmp_path / "run/data").exists()


def test_an_input_prepared_for_a_run_that_never_began_is_not_taken_for_another(tmp_path):
    """The first command failed after the preparation: no run.json is there."""
    from millrace.train.trainer import train

    (tmp_path / "one.txt").write_text("a few words of one text. " * 200)
    (tmp_path / "other.txt").write_text("now for something else! " * 200)
    prepare = {"tokenizer": "bytes", "val": 0, "workers": 1}
    bad = config_of("", data__input=str(tmp_path / "one.txt"), data__prepare=prepare, model__vocabulary=3)
    with pytest.raises(mr.ConfigError, match=r"model.vocabulary = 3 is smaller"):
        train(bad, tmp_path / "run")
    with pytest.raises(mr.ConfigError, match=r"data is finished, but with other sources"):
        train(config_of("", data__input=str(tmp_path / "other.txt"), data__prepare=prepare), tmp_path / "run")
    train(config_of("", data__input=str(tmp_path / "one.txt"), data__prepare=prepare), tmp_path / "run")


def test_what_a_run_cannot_change_is_refused_by_its_key(tokens, tmp_path):
    from millrace.train.trainer import train

    train(config_of(tokens, train__max_steps=2), tmp_path / "run")
    for key, value in {"model__width": 32, "data__length": 8, "optimizer__name": "sgd", "train__seed": 8}.items():
        with pytest.raises(mr.ConfigError, match=f"{key.replace('__', '.')} was .* and is {value!r} now"):
            train(config_of(tokens, train__max_steps=4, **{key: value}), tmp_path / "run")
    with pytest.raises(mr.ConfigError, match=r'data.include was \[\] in the run .* and is \["document"\] now'):
        train(config_of(tokens, train__max_steps=4, data__include=["document"]), tmp_path / "run")
    with pytest.raises(mr.ConfigError, match="holds a run already"):
        train(config_of(tokens), tmp_path / "run", resume="never")


def test_a_run_without_a_checkpoint_takes_other_settings(tokens, tmp_path):
    """Killed before the first one: nothing is lost, and a line says what changed."""
    run, lines_said = tmp_path / "run", []
    begin(config_of(tokens), run)
    train_with(config_of(tokens, model__width=32, train__seed=8, train__max_steps=2), run, lines_said)
    assert lines_said[0] == (
        "note: model.width was 16 and is 32, train.seed was 7 and is 8; no checkpoint was saved before, so the run begins again"
    )
    assert sorted(losses(run)) == [1, 2]
    with pytest.raises(mr.ConfigError, match=r"model.width was 32 .* a run cannot change it"):  # now there is one
        train_with(config_of(tokens, train__seed=8), run, [])


def test_a_run_without_a_checkpoint_takes_another_store_or_input(tokens, tmp_path):
    run, other, prepare = tmp_path / "run", tmp_path / "other", {"tokenizer": "bytes", "val": 0, "workers": 1}
    with mr.StoreWriter(other, kind="text", columns={"tokens": mr.Column("uint16")}, meta={"vocabulary": 9}) as writer:
        writer.append({"tokens": np.arange(2000) % 9})
    begin(config_of(tokens), run)
    begin(config_of(other), run)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"words of {name}. " * 300)
        changes = {"data__input": str(tmp_path / f"{name}.txt"), "data__prepare": prepare}
        begin(config_of("", **changes), run)
        store = mr.open_store(run / "data")
        assert f"words of {name}" in store.decode(store.columns["tokens"][:40])
    train_with(config_of(other, train__max_steps=2), run, [])
    assert sorted(losses(run)) == [1, 2]


def begin(config, run) -> None:
    """A run that was killed before its first checkpoint."""
    from millrace.train.dist import World
    from millrace.train.trainer import Trainer

    Trainer(config, run, World(0, 1, torch.device("cpu"))).close()


def train_with(config, run, lines_said) -> None:
    from millrace.train.trainer import train

    class Lines:
        say = show = note = staticmethod(lines_said.append)

    train(config, run, console=Lines())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_saves_all_at_one_step_and_ends(number, tokens, tmp_path, start):
    import os

    values = nano(tokens, train__max_steps=100_000, checkpoint__every=0)
    ranks = start(values, tmp_path / "run", 2)
    ranks.reach(5)
    os.kill(ranks.processes[1].pid, number)
    assert ranks.wait() == [number, number], ranks.output
    from millrace.train.checkpoint import Checkpoints

    (name,) = Checkpoints(tmp_path / "run" / "checkpoints").names()
    last = max(losses(tmp_path / "run"))
    assert name == f"step-{last:08d}"
    values["train"]["max_steps"] = last + 3
    start(values, tmp_path / "run", 1).finish()
    assert sorted(losses(tmp_path / "run")) == list(range(1, last + 4))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_within_an_evaluation_does_not_wait_for_its_end(ranks, waves, tmp_path, start):
    """Saved at that step, and the evaluation is done by the next life."""
    from millrace.train.checkpoint import Checkpoints

    log, run = tmp_path / "log", tmp_path / "run"
    values = nano(
        waves, model__kind="own_models:Terminated", evaluation__every=5, checkpoint__every=0, train__max_steps=8,
        model__options={"features": 3, "targets": 3, "log": str(log)},
    )  # fmt: skip
    killed = start(values, run, ranks)
    assert set(killed.wait()) == {signal.SIGTERM}, killed.output
    assert len(log.read_text().splitlines()) <= ranks
    assert Checkpoints(run / "checkpoints").names() == ["step-00000005"]
    assert not any("val_loss" in line for line in lines(run))
    start(values, run, ranks).finish()
    start(values, tmp_path / "straight", ranks).finish()
    found, expected = ([line for line in lines(path) if "val_loss" in line] for path in (run, tmp_path / "straight"))
    assert [line["step"] for line in found] == [5, 8]
    assert found == expected
    assert losses(run) == losses(tmp_path / "straight")


def test_best_is_the_best_of_all_evaluations(waves, tmp_path):
    """Also of those that fall between checkpoints, and over several lives."""
    from millrace.train.checkpoint import Checkpoints
    from millrace.train.open_run import load_model
    from millrace.train.trainer import train

    run = tmp_path / "run"
    options = {"features": 3, "targets": 3, "val_losses": [5.0, 3.0, 4.0, 4.5, 3.5, 6.0, 1.0, 7.0]}
    for last, expected in ((3, (2, 3.0)), (5, (2, 3.0)), (8, (7, 1.0))):
        config = config_of(
            waves, model__kind="own_models:Scripted", model__options=options, evaluation__every=1, checkpoint__every=0,
            checkpoint__keep=1, train__max_steps=last,
        )  # fmt: skip
        train(config, run)
        checkpoints = Checkpoints(run / "checkpoints")
        best = load_model(run, "best", own="own_models:Scripted")
        assert (best.step, checkpoints.best_loss()) == expected
        assert best.model.steps == best.step
        assert checkpoints.names() == [f"step-{step:08d}" for step in (best.step, last)]


def test_the_best_is_named_though_killed_before_that(waves, tmp_path):
    """The evaluation was written down, and the process killed before ``best`` named its checkpoint."""
    from millrace.train.checkpoint import Checkpoints
    from millrace.train.trainer import train

    options = {"features": 3, "targets": 3, "val_losses": [5.0, 3.0]}
    config = config_of(waves, model__kind="own_models:Scripted", model__options=options, train__max_steps=2)
    train(config, tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    (checkpoints.folder / "best").unlink()
    before = lines(tmp_path / "run")
    train(config, tmp_path / "run")
    assert (checkpoints.resolve("best"), checkpoints.best_loss()) == ("step-00000002", 3.0)
    assert lines(tmp_path / "run") == before


def test_the_pace_is_that_of_steps_alone(tokens, tmp_path, monkeypatch):
    """By a clock that runs for an hour in each evaluation and each save."""
    import time

    from millrace.train import trainer
    from millrace.train.saver import Saver

    now = [0.0]

    def hour_long(function):
        def call(*args, **kwargs):
            now[0] += 3600
            return function(*args, **kwargs)

        return call

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(time, "perf_counter", tick)
    monkeypatch.setattr(trainer, "evaluate", hour_long(trainer.evaluate))
    monkeypatch.setattr(Saver, "save", hour_long(Saver.save))
    trainer.train(config_of(tokens, evaluation__every=2, checkpoint__every=3), tmp_path / "run")
    found = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert now[0] > 7 * 3600
    assert all(line["step_s"] < 1 and line["eta_s"] < 10 and line["wait"] > 0.001 for line in found)


def test_a_second_trainer_in_the_same_folder_is_refused(tokens, tmp_path, start):
    from millrace.train.trainer import train

    ranks = start(nano(tokens, train__max_steps=100_000), tmp_path / "run")
    ranks.reach(2)
    with pytest.raises(mr.StoreLocked, match=f"process {ranks.processes[0].pid}"):
        train(config_of(tokens), tmp_path / "run")
    ranks.kill()


def test_checkpoints_by_the_clock_are_agreed_on(tokens, tmp_path, start):
    """Only the first rank's clock would be early; both save at one step."""
    values = nano(tokens, train__max_steps=30, checkpoint__every=0, checkpoint__every_minutes=1e-9, checkpoint__keep=50)
    start(values, tmp_path / "run", 2).finish()
    from millrace.train.checkpoint import Checkpoints

    assert len(Checkpoints(tmp_path / "run" / "checkpoints").names()) == 30


def test_a_run_keeps_the_threads_it_began_with_and_every_other_life_says_so(tokens, tmp_path, capsys):
    from millrace.train.run_folder import read_run
    from millrace.train.trainer import train

    class Printed:
        say = show = note = staticmethod(print)

    before = torch.get_num_threads()
    try:
        for steps, threads in ((1, 1), (2, 2), (3, 2), (4, 1)):
            train(
                config_of(tokens, train__max_steps=steps, train__threads=threads), tmp_path / "run", console=Printed()
            )
            assert read_run(tmp_path / "run").threads == 1
    finally:
        torch.set_num_threads(before)
    assert capsys.readouterr().out.count("the run began with 1 threads, now 2") == 2


def test_a_run_over_several_sources_mixes_them_and_goes_on_with_other_weights(tmp_path):
    rng = np.random.default_rng(1)
    for name in ("web", "code"):
        columns, meta = {"tokens": mr.Column("uint16")}, {"vocabulary": 200}
        with mr.StoreWriter(
            tmp_path / name, kind="text", columns=columns, meta=meta, splits=("train", "val")
        ) as writer:
            for split in ("train", "val"):
                writer.append({"tokens": rng.integers(0, 200, 3000)}, split=split)

    def steps(first, second, last):
        values = nano(tmp_path / "web", train__max_steps=last)
        del values["data"]["store"]
        weights = {"web": first, "code": second}
        values["data"]["sources"] = [{"store": str(tmp_path / name), "weight": own} for name, own in weights.items()]
        train(parse_config(values), tmp_path / "run")

    steps(1, 1, 4)
    steps(1, 0, 6)
    explained = [explain_run(str(tmp_path / "run"), step) for step in (1, 6)]
    assert [np.mean([row["part"] for row in own["rows"]]) for own in explained] == [0.5, 0.0]
    assert [line["step"] for line in lines(tmp_path / "run") if "val_loss" in line] == [4, 6]
    with pytest.raises(mr.ConfigError, match="expected a store and its weight"):
        parse_config({"data": {"sources": [{"store": "web"}]}})
    with pytest.raises(mr.ConfigError, match="list all stores"):
        parse_config({"data": {"store": "web", "sources": [{"store": "web", "weight": 1}]}})


def test_a_transform_in_processes_is_resumed_exactly_and_may_go_on_in_threads(tokens, tmp_path):
    from millrace.train.trainer import train

    def run_of(name, steps, **changes):
        hidden = {"data__transform": "hiding:hide", "optimizer__schedule": "constant", **changes}
        train(config_of(tokens, train__max_steps=steps, **hidden), tmp_path / name)
        return losses(tmp_path / name)

    straight = run_of("straight", 8)
    assert straight != run_of("plain", 8, data__transform="")
    run_of("stopped", 4, data__processes=True, data__workers=2)
    assert run_of("stopped", 8, data__processes="auto", data__workers=1) == straight
    assert all(
        torch.equal(one, weights(tmp_path / "stopped")[name]) for name, one in weights(tmp_path / "straight").items()
    )
    with pytest.raises(mr.ConfigError, match=r"data\.transform"):
        run_of("stopped", 9, data__transform="")
    with pytest.raises(mr.ConfigError, match=r"data\.processes is for data\.transform"):
        run_of("other", 1, data__transform="", data__processes=True)
