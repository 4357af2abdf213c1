"""Checkpoints: whole or not there, whatever is killed or full; ``latest`` always loads."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import millrace as mr
from millrace.store import platform
from millrace.testing import Fault, NotPossibleHere, count_steps, iofault, run_forked, small_disk
from millrace.train.checkpoint import Checkpoints
from millrace.train.open_run import load_model
from millrace.train.state import State, name_of
from millrace.train.tensors import NAMES, hash_file, read_tensors, write_tensors

from .conftest import config_of, lines, nano


def parts_of(step: int, size: int = 50) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((size,), float(step))}, "optimizer": {"w.step": torch.tensor(float(step))}}


def save(checkpoints: Checkpoints, step: int, val_loss: float | None = None, size: int = 50) -> None:
    checkpoints.publish(State(step=step, feed={"position": step}, precision={}), parts_of(step, size))
    before = checkpoints.best_loss()
    if val_loss is not None and (before is None or val_loss < before):
        checkpoints.note_best(step, val_loss)


def loaded(checkpoints: Checkpoints) -> int:
    """The step of ``latest``, all of whose parts are of that step."""
    name = checkpoints.resolve("latest")
    state = checkpoints.check(name)
    model, optimizer = (
        read_tensors(checkpoints.folder / name / f"{part}.safetensors") for part in ("model", "optimizer")
    )
    assert model["w"].tolist() == [float(state.step)] * len(model["w"])
    assert optimizer["w.step"].item() == state.step == state.feed["position"]
    return state.step


def test_killed_at_every_step_of_saving_latest_loads(memory_folder):
    folder = memory_folder / "killed"
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2):
        save(checkpoints, step)
    with count_steps() as steps:
        save(Checkpoints(folder, keep=2), 3)
    found = []
    last = 3
    for at in range(1, len(steps) + 1):
        assert run_forked(save, checkpoints, last + 1, fault=Fault(at, "kill")) == -9
        found.append(loaded(checkpoints) - last)
        checkpoints.sweep()  # as the next start does
        last = loaded(checkpoints)
        save(checkpoints, last + 1)
        last += 1
        assert loaded(checkpoints) == last
        assert sorted(path.name for path in folder.iterdir()) == ["latest", name_of(last - 1), name_of(last)]
    assert found == sorted(found)  # one moment at which the new one counts
    assert set(found) == {0, 1}


def test_a_run_that_is_to_keep_fewer_lets_the_others_go_before_it_saves(tmp_path):
    many = Checkpoints(tmp_path, keep=9)
    for step, val_loss in ((1, None), (2, 0.5), (3, None), (4, None)):
        save(many, step, val_loss)
    few = Checkpoints(tmp_path, keep=1)
    assert few.sweep() == []
    assert few.names() == [name_of(2), name_of(4)]  # the best and the latest
    assert loaded(few) == 4


def test_an_error_at_every_step_of_saving_leaves_latest_and_says_what_to_do(memory_folder):
    folder = memory_folder / "errors"
    checkpoints = Checkpoints(folder, keep=2)
    save(checkpoints, 1)
    with count_steps() as steps:
        save(checkpoints, 2)
    for at in range(1, len(steps) + 1):
        before = loaded(checkpoints)
        with iofault(at, errno.ENOSPC), pytest.raises(mr.StoreWriteFailed, match=r"No space left.*free space"):
            save(checkpoints, before + 1)
        assert loaded(checkpoints) in (before, before + 1)
        checkpoints.sweep()
        save(checkpoints, loaded(checkpoints) + 1)


def test_a_disk_that_is_really_full(tokens, tmp_path):
    """A run whose checkpoints no longer fit stops with the remedy, and continues once there is room."""
    from millrace.train.trainer import train

    try:
        with small_disk(1 << 20) as disk:
            config = config_of(tokens, train__max_steps=60, checkpoint__every=1, checkpoint__keep=1, model__width=32)
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(400 << 10))
            with pytest.raises(
                mr.StoreWriteFailed,
                match=r"saving .*step-00000002.*: No space left on device .* run the same",
            ):
                train(config, disk / "run")
            assert Checkpoints(disk / "run" / "checkpoints").check("step-00000001").step == 1
            assert load_model(disk / "run").step == 1
            ballast.unlink()
            train(
                config_of(tokens, train__max_steps=4, checkpoint__every=0, checkpoint__keep=1, model__width=32),
                disk / "run",
            )
    except NotPossibleHere as reason:
        pytest.skip(str(reason))


def test_no_room_for_metrics_says_so(tokens, tmp_path):
    from millrace.train.trainer import train

    with (
        iofault(5, errno.ENOSPC, operation="write") as steps,
        pytest.raises(mr.StoreWriteFailed, match=r"writing .*metrics.jsonl: No space left.*free space"),
    ):
        train(config_of(tokens, checkpoint__every=0), tmp_path / "run")
    assert steps[-1] == ("write", str(tmp_path / "run" / "metrics.jsonl"))


def test_no_room_for_shards_says_so_and_leaves_none(tokens, tmp_path, start):
    try:
        with small_disk(700 << 10) as disk:
            changes = {"train__parallel": "fsdp2", "checkpoint__keep": 1, "model__width": 32}
            values = nano(tokens, checkpoint__every=1, train__max_steps=50, **changes)
            ranks = start(values, disk / "run", 2)
            assert ranks.wait() == [1, 1]
            assert "error: saving" in ranks.output
            assert "No space left on device" in ranks.output
            assert "Traceback" not in ranks.output
            assert not list((disk / "run/checkpoints").glob("*.partial"))
            assert load_model(disk / "run").step == 1
    except NotPossibleHere as reason:
        pytest.skip(str(reason))


@pytest.mark.filterwarnings("ignore:.*latest names step")
def test_shards_are_of_one_step_though_training_goes_on(tokens, tmp_path, start):
    """Saved after every step, beside the training: each checkpoint is that of an undisturbed run without shards."""
    changes = {"train__max_steps": 6, "train__precision": "fp64", "optimizer__decay_steps": 6}
    sharded = nano(
        tokens, **changes, train__parallel="fsdp2", checkpoint__every=1, checkpoint__keep=20, evaluation__every=2
    )
    start(sharded, tmp_path / "run", 2).finish()
    whole = nano(tokens, **changes, checkpoint__every=1, checkpoint__keep=20)
    start(whole, tmp_path / "whole").finish()
    for step in range(1, 7):
        found = []
        for run in ("run", "whole"):
            (tmp_path / run / "checkpoints" / "latest").write_text(f"{name_of(step)}\n")
            found.append(load_model(tmp_path / run).model.state_dict())
        for name, value in found[0].items():
            torch.testing.assert_close(value, found[1][name], rtol=1e-6, atol=1e-7)  # loaded in fp32


def test_shards_are_copied_before_training_goes_on(tmp_path, monkeypatch):
    """The thread is held until the weights have changed: it still writes those of its step."""
    from millrace.train import model_state, saver
    from millrace.train.dist import World
    from millrace.train.parallel import shard

    alone, has_changed = World(0, 1, torch.device("cpu")), threading.Event()

    def later(*args):
        assert has_changed.wait(60)
        model_state.write_shards(*args)

    monkeypatch.setattr(saver, "write_shards", later)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(5, 3)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        shard(model, alone)
        optimizer = torch.optim.AdamW(model.parameters())
        writing = saver.Saver(Checkpoints(tmp_path / "saved"), alone, asynchronous=True)
        writing.save(State(step=1, feed={}, precision={}), model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0)
        has_changed.set()
        writing.finish()
        writing.close()
    finally:
        torch.distributed.destroy_process_group()
    whole = torch.nn.Linear(5, 3)
    saved = Checkpoints(tmp_path / "saved").check(name_of(1))
    model_state.load(tmp_path / "saved" / name_of(1), saved, whole, None)
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore:.*names step-.* is there too")  # killed between a checkpoint and its name in latest
def test_kill_in_a_loop_while_saving(tokens, tmp_path, start, seed):
    """Saves after every step, killed at random moments: each time ``latest`` loads and the run goes on."""
    rounds = int(os.environ.get("MILLRACE_SOAK", "6"))
    moments, run = random.Random(seed), tmp_path / "run"
    values = nano(tokens, train__max_steps=10_000_000, checkpoint__every=1)
    before = 0
    for _ in range(rounds):
        ranks = start(values, run)
        ranks.reach(before + 3)  # the save of the step before the last has been waited for
        time.sleep(moments.uniform(0, 0.2))
        ranks.kill()
        step = load_model(run).step
        assert step > before
        before = step


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, val_loss in ((1, 5.0), (2, 3.0), (3, None), (4, 4.0), (5, 4.5), (6, None)):
        save(checkpoints, step, val_loss)
    assert checkpoints.names() == [name_of(2), name_of(5), name_of(6)]
    assert (checkpoints.resolve("best"), checkpoints.resolve("latest")) == (name_of(2), name_of(6))
    save(checkpoints, 7, 2.5)
    assert checkpoints.names() == [name_of(6), name_of(7)]
    assert checkpoints.resolve("best") == name_of(7)


def test_going_back_to_an_earlier_one(tmp_path):
    """Written into ``latest`` by hand: what came after it goes, also as ``best``."""
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2, 3):
        save(checkpoints, step, 10.0 - step)
    (tmp_path / "latest").write_text(name_of(2) + "\n")
    checkpoints.sweep()
    assert loaded(checkpoints) == 2
    assert checkpoints.names() == [name_of(1), name_of(2)]
    save(checkpoints, 3, 8.5)
    assert checkpoints.resolve("best") == name_of(2)  # of those that there are now, with 8.0
    save(checkpoints, 4, 7.5)
    assert checkpoints.resolve("best") == name_of(4)


def test_without_latest_the_newest_whole_one_is_taken_and_nothing_is_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2, 3):
        save(checkpoints, step, 10.0 - step)
    flip(tmp_path / name_of(3) / "model.safetensors")
    (tmp_path / "latest").unlink()
    said = checkpoints.sweep()
    assert loaded(checkpoints) == 2
    assert "step-00000003 is damaged (model.safetensors has hash" in said[0]
    assert "was missing; it now names step-00000002" in said[1]
    (tmp_path / "latest").unlink()
    for step in (1, 2):
        flip(tmp_path / name_of(step) / "model.safetensors")
    with pytest.raises(
        mr.TrainError, match=r"no checkpoint in .* is whole: .*latest was missing; step-00000002 is damaged"
    ):
        checkpoints.sweep()
    assert checkpoints.names() == [name_of(1), name_of(2)]


def test_latest_never_names_what_cannot_be_read_back(tmp_path):
    """A disk that keeps other bytes than were written: the new checkpoint is refused, ``latest`` stays."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def damage(operation: str, path: str) -> None:
        if (operation, path) == ("fsync", str(tmp_path)) and (tmp_path / name_of(2)).exists():
            platform.before_write = None
            flip(tmp_path / name_of(2) / "model.safetensors")

    platform.before_write = damage
    try:
        with pytest.raises(mr.TrainError, match=r"step-00000002 is damaged \(model.safetensors has hash"):
            save(checkpoints, 2)
    finally:
        platform.before_write = None
    assert loaded(checkpoints) == 1


def test_every_file_is_durable_before_the_checkpoint_has_its_name(tmp_path):
    with count_steps() as steps:
        save(Checkpoints(tmp_path), 1)
    renamed = steps.index(("rename", str(tmp_path / name_of(1))))
    synced = {Path(path).name for operation, path in steps[:renamed] if operation == "fsync"}
    assert synced >= {"model.safetensors", "optimizer.safetensors", "state.json", f"{name_of(1)}.partial"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_flipped_bit_is_found_and_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    flip(tmp_path / name_of(2) / "model.safetensors")
    with pytest.raises(
        mr.TrainError, match=r"step-00000002 is damaged \(model.safetensors has hash .* others: step-00000001"
    ):
        checkpoints.check(name_of(2))
    platform.remove(tmp_path / name_of(1))
    with pytest.raises(
        mr.TrainError, match=r"step-00000002 is damaged .* there is no other: bring it back from a copy"
    ):
        checkpoints.check(name_of(2))
    (tmp_path / "latest").write_text("step-99999999\n")
    with pytest.raises(mr.TrainError, match="names 'step-99999999', which is not there"):
        checkpoints.resolve("latest")
    (tmp_path / "latest").write_text("../../etc\n")
    with pytest.raises(mr.TrainError, match="names"):
        checkpoints.resolve("latest")


def test_a_failed_save_beside_the_training_stops_it(tokens, tmp_path, monkeypatch):
    from millrace.train.trainer import train

    def fail(self, state, parts):
        raise mr.StoreWriteFailed("no room", errno=28)

    monkeypatch.setattr(Checkpoints, "publish", fail)
    with pytest.raises(mr.StoreWriteFailed, match="no room"):
        train(config_of(tokens, train__max_steps=50, checkpoint__every=2), tmp_path / "run")
    assert max(line["step"] for line in lines(tmp_path / "run")) < 10


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_is_of_one_step_though_training_goes_on(asynchronous, tokens, tmp_path, monkeypatch):
    """Steps continue while the thread writes; the copy must not change under it."""
    from millrace.train.trainer import train

    publish = Checkpoints.publish

    def slowly(self, state, parts):
        time.sleep(0.05)  # a slow disk: the next step is taken meanwhile
        publish(self, state, parts)

    monkeypatch.setattr(Checkpoints, "publish", slowly)

    changes = {
        "train__max_steps": 12,
        "checkpoint__every": 2,
        "checkpoint__keep": 20,
        "checkpoint__asynchronous": asynchronous,
    }
    train(config_of(tokens, **changes), tmp_path / "run")
    for step in (2, 4, 6):
        train(config_of(tokens, train__max_steps=step, optimizer__decay_steps=12), tmp_path / f"until-{step}")
        name = f"checkpoints/{name_of(step)}"
        for part in ("model", "optimizer"):
            saved = read_tensors(tmp_path / "run" / name / f"{part}.safetensors")
            expected = read_tensors(tmp_path / f"until-{step}" / name / f"{part}.safetensors")
            assert all(torch.equal(saved[key], expected[key]) for key in expected)
    stalls = [line for line in lines(tmp_path / "run") if "checkpoint" in line]
    assert [line["checkpoint"] for line in stalls] == [name_of(step) for step in range(2, 13, 2)]
    assert all(line["stall_s"] > 0 and line["write_s"] > 0 for line in stalls)


@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=8),
        st.tuples(st.sampled_from(list(NAMES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    )
)
@settings(max_examples=40)
def test_files_are_what_safetensors_reads(tmp_path_factory, entries):
    tensors = {name: (torch.randn(shape) * 3).to(dtype) for name, (dtype, shape) in entries.items()}
    path: Path = tmp_path_factory.mktemp("t") / "x.safetensors"
    assert write_tensors(path, tensors) == hash_file(path)
    for found in (load_file(path), read_tensors(path)):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
