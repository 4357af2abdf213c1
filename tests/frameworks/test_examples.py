"""The examples with the real libraries, killed and resumed: what their steps saw is what an uninterrupted run sees."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import millrace as mr

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, SEED = 8, 32, 1


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Some 45 blocks of train, so that passes do not end with a batch."""
    folder = tmp_path_factory.mktemp("examples")
    rng = np.random.default_rng(0)
    lines = ["".join(rng.choice(list("abcdefgh \n"), 40)).replace("\n", "n") for _ in range(60)]
    (folder / "text.txt").write_text("\n".join(lines))
    mr.prepare_text([folder / "text.txt"], out=folder / "store", tokenizer="bytes", document="line", val=0.4, workers=1)
    return folder / "store"


def lives_of(example: str, store: Path, folder: Path, *lives: str) -> None:
    script = Path(__file__).with_name("launch.py")
    command = [sys.executable, "-W", "ignore", script, ROOT / "examples" / f"{example}.py", store, folder, *lives]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def steps_of(run: Path) -> dict[int, list[int]]:
    """The samples of each step over all ranks, as the last life saw it that came to it."""
    lives: dict[int, dict[int, list[int]]] = {}
    for path in sorted(run.glob("life-*-steps-*.jsonl")):  # by life, then by rank
        steps = lives.setdefault(int(path.stem.split("-")[1]), {})
        for line in path.read_text().splitlines():
            seen = json.loads(line)
            steps.setdefault(seen["step"], []).extend(seen["samples"])
    return {step: samples for number in sorted(lives) for step, samples in lives[number].items()}


def losses_of(run: Path) -> dict[int, float]:
    paths = sorted(run.glob("life-*-steps-0.jsonl"))
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return {seen["step"]: seen["loss"] for seen in lines}


def expected(store: Path, is_endless: bool) -> dict[int, list[int]]:
    """What three epochs hold whose last batches are dropped, or 15 steps of an endless feed: arithmetic."""
    n = len(mr.Blocks(mr.open_store(store).split("train"), length=LENGTH))
    assert n % BATCH
    assert n // BATCH == 5, "lives are killed within the second of three passes"
    order, length = mr.Shuffled(n, SEED), 5 * BATCH if is_endless else n
    starts = [epoch * length + batch * BATCH for epoch in range(3) for batch in range(5)]
    spans = [(start, start + BATCH) for start in starts]
    return {k: order.samples(np.arange(*span)).tolist() for k, span in enumerate(spans, start=1)}


@pytest.mark.parametrize(
    ("example", "is_endless"),
    [
        ("plain_ddp", True),
        ("lightning_trainer", False),
        ("fabric_loop", False),
        ("accelerate_loop", False),
        ("hf_trainer", False),
    ],
)
def test_two_ranks_killed_resumed_on_one_killed_and_resumed_on_two(example, is_endless, store, tmp_path):
    """Checkpoints are of every fourth step, so that each kill loses some."""
    lives_of(example, store, tmp_path, "run:2:8", "run:1:6", "run:2:0")
    assert steps_of(tmp_path / "run") == expected(store, is_endless)


@pytest.mark.parametrize(("example", "is_endless"), [("stateful_dataloader", False), ("jax_loop", True)])
def test_one_process_killed_is_the_uninterrupted_run_bit_for_bit(example, is_endless, store, tmp_path):
    lives_of(example, store, tmp_path, "whole:1:0", "run:1:7", "run:1:0")
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole") == expected(store, is_endless)
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")


def test_examples_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert len(lengths) == 7
    assert max(lengths.values()) < 60, lengths
