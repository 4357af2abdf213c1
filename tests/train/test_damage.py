"""A damaged run folder: it continues exactly, from the checkpoint before if need be, or is refused by name. Nothing hangs."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import millrace as mr
from millrace.cli import run as millrace
from millrace.cli.explain import explain_run, last_step
from millrace.feed import journal
from millrace.report.runs import run_report
from millrace.train import state as states
from millrace.train.checkpoint import Checkpoints
from millrace.train.open_run import load_model
from millrace.train.run_folder import read_run
from millrace.train.trainer import train

from .conftest import config_of, weights

IS_SOAK = bool(os.environ.get("MILLRACE_SOAK"))
CHANGES = {"evaluation__every": 2, "checkpoint__every": 2, "checkpoint__keep": 3, "optimizer__decay_steps": 20}
LATEST, BEFORE = "checkpoints/step-00000008", "checkpoints/step-00000006"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def honest(tokens, tmp_path_factory) -> Path:
    """A run of 8 steps with checkpoints of steps 4, 6 and 8."""
    run = tmp_path_factory.mktemp("honest") / "run"
    train(config_of(tokens, train__max_steps=8, **CHANGES), run)
    return run


@pytest.fixture(scope="module")
def whole(tokens, honest) -> Path:
    """The same run, continued to step 10 without damage."""
    run = honest.with_name("whole")
    shutil.copytree(honest, run)
    go_on(tokens, run)
    return run


def go_on(tokens: Path, run: Path) -> list[str]:
    """Continues a run to step 10; returns the lines it said."""
    said: list[str] = []

    class Lines:
        say = show = note = staticmethod(said.append)

    train(config_of(tokens, train__max_steps=10, **CHANGES), run, console=Lines())
    return said


def check_is(run: Path, whole: Path) -> None:
    """A continued run is the one without damage, to the last bit."""
    ours, theirs = weights(run), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = (Checkpoints(each / "checkpoints") for each in (run, whole))
    assert (ours.pick("best"), ours.best_loss()) == (theirs.pick("best"), theirs.best_loss())


# Damages: each makes something else of a path.


def lost(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def flip(path: Path, place: int = -3, bit: int = 2) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    lost(path)
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def a_fifo(path: Path) -> None:
    lost(path)
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    lost(path)
    path.mkdir()
    (path / "x").write_text("of somebody else")


def named(name: str, damage: Damage) -> Damage:
    damage.__name__ = name
    return damage


def a_link_to(target: str) -> Damage:
    return named(f"a link to {target}", lambda path: (lost(path), path.symlink_to(target)))


def holding(name: str, data: bytes, size: int = 0) -> Damage:
    """Other bytes, in a sparse file of at least this size."""
    return named(name, lambda path: (lost(path), path.write_bytes(data), os.truncate(path, max(size, len(data)))))


def another_step(path: Path) -> None:
    lost(path)
    shutil.copytree(path.parent / "step-00000006", path)


def every_state(path: Path) -> None:
    for state in path.glob("*/state.json"):
        flip(state)


def only_latest(path: Path) -> None:
    for folder in path.glob("step-*"):
        shutil.rmtree(folder)


def a_later_step_first(path: Path) -> None:
    """One wrong digit of a step: all lines after it would be cut."""
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"step": 1,', b'"step": 9,', 1))


NO_FILES = (a_fifo, a_folder, a_link_to("/dev/zero"), a_link_to("nothing"))
NO_JSON = (
    holding("deep", b"[" * 100_000 + b"]" * 100_000 + b"\n"),
    holding("a deep object", b'{"step":' * 100_000 + b"1" + b"}" * 100_000 + b"\n"),
    holding("no UTF-8", b'{"step": "\xff\xfe"}\n'),
)
HUGE = holding("huge", b"{}\n", 1 << 34)
ODD = (cut, *NO_FILES, *NO_JSON, HUGE)


def damaged_runs(honest: Path, run: Path, name: str, damages: tuple[Damage, ...]) -> Iterator[Damage]:
    """A copy of the honest run for each damage to one of its files."""
    for damage in damages:
        lost(run)
        shutil.copytree(honest, run)
        damage(run / name)
        yield damage


@pytest.mark.parametrize(
    ("name", "damages", "line"),
    [
        ("checkpoints/latest", (lost, *ODD), r"latest (was missing|is damaged \(.*\)); it now names step-00000008, the newest"),
        ("checkpoints/best", ODD, r"best is damaged \(.*\); by their val_loss the best is now step-0000000\d$"),
        (f"{LATEST}/state.json", (flip, lost, *ODD), r"08 is damaged \(state.json: .*\); it is not used, and kept as step-0"),
        (f"{LATEST}/model.safetensors", (flip, lost, *NO_FILES), r"08 is damaged \(model.safetensors has hash"),
        (f"{LATEST}/optimizer.safetensors", (flip, cut), r"08 is damaged \(optimizer.safetensors has hash .*, expected"),
        (LATEST, (another_step,), r"08 is damaged \(state.json: it is of step 6 in format 2, and has a hash\)"),
        (f"{BEFORE}/state.json", (flip,), r"06 is damaged \(state.json: its values have hash"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_the_run_is_that_without_damage(
    name, damages, line, honest, whole, tokens, tmp_path
):
    run = tmp_path / "run"
    for damage in damaged_runs(honest, run, name, damages):
        if damage is damages[0]:
            said = go_on(tokens, run)
            check_is(run, whole)
        else:  # the same without the steps
            said = Checkpoints(run / "checkpoints", keep=3).sweep()
        assert any(re.search(line, each) for each in said), (damage.__name__, said)
        if name.startswith(LATEST):
            assert any("latest now names step-00000006" in each for each in said), damage.__name__
            assert (run / f"{LATEST}.damaged").is_dir()  # whoever has a copy may mend it


NO_WHOLE = r"no checkpoint in .* is whole: .*step-00000008 is damaged .*step-00000004 is damaged .*; bring one back"


@pytest.mark.parametrize(
    ("name", "damages", "message"),
    [
        ("run.json", (flip, *ODD), r"run.json is damaged \(.*\); bring it back from a copy, or start another run with --run"),
        ("run.json", (lost,), r"has checkpoints and no run.json"),
        ("metrics.jsonl", (*NO_FILES, *NO_JSON, HUGE), r"metrics.jsonl is damaged at byte 0 \(.*\); move it away"),
        ("metrics.jsonl", (a_later_step_first,), r"at byte 0 \(a line of step \d+ follows one of a later step\); move it"),
        ("feed.jsonl", (flip, *NO_FILES, *NO_JSON, HUGE), r"feed.jsonl is damaged \(.*\), so the steps .* are not known"),
        ("checkpoints", (lost, holding("a file", b"")), r"has saved step-00000008, .* no checkpoint now; bring it back"),
        ("checkpoints", (every_state,), NO_WHOLE),
        ("checkpoints", (only_latest,), r"no checkpoint in .* is whole: .*latest is damaged \(names 'step-00000008', which"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused_by_name_and_stays(name, damages, message, honest, tokens, tmp_path):
    """It never starts again from step 0, however often it is tried."""
    run = tmp_path / "run"
    for damage in damaged_runs(honest, run, name, damages):
        before = sorted(path for path in run.rglob("*") if path.name != "owner.json")
        for _ in range(2 if damage is damages[0] else 1):
            with pytest.raises(mr.MillraceError, match=message) as refused:
                go_on(tokens, run)
            assert "\n" not in str(refused.value), damage.__name__
        assert sorted(path for path in run.rglob("*") if path.name != "owner.json") == before


READERS = {
    "model": lambda run: load_model(run).step,
    "best": lambda run: load_model(run, "best").step,
    "metrics": lambda run: mr.open_run(run).metrics(),
    "config": lambda run: mr.open_run(run).config,
    "watch": lambda run: run_report(run).title.replace(str(run), ""),
    "explain": lambda run: explain_run(str(run), 8)["samples"].tolist(),
    "last step": lambda run: last_step(str(run)),
}
# What a reader may leave out, where a line or a file cannot be read.
LENIENT = {"metrics": ("metrics",), "last step": ("metrics", "run"), "best": ("checkpoints/best",)}


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "feed.jsonl", "checkpoints/latest", "checkpoints/best",
                                  f"{LATEST}/state.json", f"{LATEST}/model.safetensors"])  # fmt: skip
def test_whoever_reads_a_damaged_run_gets_what_was_written_or_one_line(name, honest, tmp_path):
    run = tmp_path / "run"
    expected = {reader: read(honest) for reader, read in READERS.items()}
    for damage in damaged_runs(honest, run, name, (flip, lost, cut, *NO_FILES, *NO_JSON)):
        for reader, read in READERS.items():
            try:
                found = read(run)
            except mr.MillraceError as error:
                is_one_line = "\n" not in str(error) and str(run) in str(error)
                assert is_one_line, (reader, damage.__name__, error)  # noqa: PT017 - most have no error
                continue
            assert found == expected[reader] or name.startswith(LENIENT.get(reader, "?")), (reader, damage.__name__)


def test_every_flipped_bit_of_a_state_is_found_or_harmless(tmp_path, seed):
    """All bits in a soak. Harmless is another spelling of the same values: 1e-05 as 1E-05."""
    folder = tmp_path / "step-00000004"
    folder.mkdir()
    state = states.State(
        step=4, feed={"position": 48, "seed": 7}, precision={"scaler": {"scale": 1e-05, "growth": 2.0}, "skipped": 1},
        val_loss=0.125, world=2, tensors={"model": {"w": ("torch.float32", [3])}}, files={"model.safetensors": "8a1f"},
    )  # fmt: skip
    states.write_state(folder, state)
    assert states.read_state(folder) == state
    data = (folder / "state.json").read_bytes()
    bits = list(range(8 * len(data)))
    refused = 0
    for bit in bits if IS_SOAK else random.Random(seed).sample(bits, 1500):
        (folder / "state.json").unlink()
        (folder / "state.json").write_bytes(data)
        flip(folder / "state.json", bit // 8, bit % 8)
        try:
            assert states.read_state(folder) == state
        except (states.Damage, mr.TrainError):
            refused += 1
    assert refused > 1490


def test_a_flipped_bit_anywhere_gives_the_same_model_or_is_refused_by_name(honest, whole, tokens, tmp_path, seed):
    """The lines of metrics.jsonl that hold no val_loss are for people, and their numbers have no hash."""
    chance = random.Random(seed)
    names = [path.relative_to(honest) for path in sorted(honest.rglob("*")) if path.is_file()]
    names = [name for name in names if name.name not in ("loss.png", "owner.json")]
    outcomes = {"same": 0, "refused": 0}
    for number, name in enumerate(30 * names if IS_SOAK else chance.sample(names, 9)):
        place, bit = chance.randrange((honest / name).stat().st_size), chance.randrange(8)
        run = tmp_path / str(number)
        shutil.copytree(honest, run)
        flip(run / name, place, bit)
        try:
            go_on(tokens, run)
        except mr.MillraceError as error:
            assert name.name in str(error), (name, place, bit)  # noqa: PT017 - most runs go on
            outcomes["refused"] += 1
            continue
        check_is(run, whole)
        outcomes["same"] += 1
    assert min(outcomes.values()) > 0, outcomes


def as_of_0_1(run: Path) -> None:
    """Takes the hashes away that millrace 0.1 did not write."""
    for path in (run / "run.json", *run.glob("checkpoints/*/state.json")):
        values = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "hash"}
        lost(path)
        path.write_text(json.dumps(values | ({"format": 1} if "format" in values else {})))
    for path in (run / "feed.jsonl", run / "metrics.jsonl"):
        entries = [json.loads(line) for line in path.read_bytes().splitlines()]
        path.write_text("".join(json.dumps({k: v for k, v in each.items() if k != "hash"}) + "\n" for each in entries))


def test_a_run_of_millrace_0_1_goes_on_with_a_note(honest, whole, tokens, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    as_of_0_1(run)
    assert not states.read_state(run / LATEST).is_sealed
    assert READERS["explain"](run) == READERS["explain"](honest)
    said = go_on(tokens, run)
    assert [line for line in said if "step-00000008 is of millrace 0.1, whose state.json has no hash" in line]
    check_is(run, whole)
    assert states.read_state(run / "checkpoints/step-00000010").is_sealed
    assert not any("0.1" in line for line in go_on(tokens, run))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (("feed", "position"), 97, r"it stands at position 97, and step 8 ends at 96 by .*feed.jsonl"),
        (("step",), 9, "it is of step 9 in format 1, and has no hash"),
        (("wolrd",), 1, "it has the key 'wolrd'"),
        (("world",), "1", r"Expected `int`, got `str` - at `\$.world`"),
        (("format",), 2, "it is of step 8 in format 2, and has no hash"),
        (("feed",), [], "Expected `object`, got `array`"),
        (("precision",), {"scaler": {}}, "precision: it has no 'skipped'"),
        (("tensors",), {"model": {"w": [1]}}, "Expected `array` of length 2"),
    ],
)
def test_a_state_without_a_hash_is_refused_where_its_values_do_not_fit(key, value, message, honest, tokens, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    as_of_0_1(run)
    for name in ("step-00000004", "step-00000006"):
        lost(run / "checkpoints" / name)
    path = run / LATEST / "state.json"
    values = json.loads(path.read_bytes())
    part = values
    for each in key[:-1]:
        part = part[each]
    part[key[-1]] = value
    path.write_text(json.dumps(values))
    with pytest.raises(mr.TrainError, match=f"step-00000008 is damaged .*{message}"):
        go_on(tokens, run)


def test_steps_and_positions_fit_after_starts_with_other_batches(honest, tokens, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    for batch, last in ((5, 11), (12, 13), (7, 15)):
        train(config_of(tokens, train__max_steps=last, train__batch=batch, **CHANGES), run)
    position = 8 * 12 + 3 * 5 + 2 * 12 + 2 * 7
    assert states.read_state(run / "checkpoints/step-00000015").feed["position"] == position
    assert journal.misplaced(run, 15, position) is None
    assert "step 15 ends at 149" in str(journal.misplaced(run, 15, position + 1))
    assert journal.misplaced(run, 11, 8 * 12 + 3 * 5) is None
    (run / "feed.jsonl").rename(run / "away.jsonl")  # as the message allows
    for _ in range(2):
        train(config_of(tokens, train__max_steps=16, **CHANGES), run)
    assert read_run(run).threads == 1


@pytest.mark.parametrize("damage", [lost, lambda path: path.write_bytes(b"")], ids=["lost", "empty"])
def test_steps_after_a_lost_journal_keep_their_numbers(damage, honest, whole, tokens, tmp_path):
    """The refusal of a damaged feed.jsonl advises to move it away: then no step gets another's samples."""
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    damage(run / "feed.jsonl")
    go_on(tokens, run)
    check_is(run, whole)
    assert explain_run(run, 9)["samples"].tolist() == explain_run(whole, 9)["samples"].tolist()
    assert last_step(run) == last_step(whole)
    with pytest.raises(mr.ConfigError, match=r"step 8 is before the first start"):
        explain_run(run, 8)


def test_a_latest_that_is_not_the_newest_is_said(honest, tmp_path, capsys):
    """A flipped bit may name another checkpoint that is there; so does somebody who wants the earlier one."""
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    (run / "checkpoints/latest").write_text("step-00000006\n")
    with pytest.warns(
        UserWarning, match=r"latest names step-00000006, so this is its model, though step-00000008 is there"
    ):
        assert load_model(run).step == 6
    assert millrace(["forecast", str(run), "--out", str(tmp_path / "x.csv")]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("note: ")
    assert "though step-00000008 is there" in first
    assert last.startswith("error: the run trained 'gpt'")
