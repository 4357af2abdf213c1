"""The examples with the real libraries, killed and resumed: what their steps saw is what an uninterrupted run sees."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

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


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Discs, rings and squares of random places and colours, as JPEG and PNG in class folders, prepared by the command."""
    folder, rng = tmp_path_factory.mktemp("shapes"), np.random.default_rng(0)
    for k in range(90):
        name = ("disc", "square", "ring")[k % 3]
        image = Image.fromarray(rng.integers(0, 60, (48, 64, 3), dtype=np.uint8))
        colour, (x, y) = tuple(rng.integers(120, 256, 3).tolist()), rng.integers(4, 24, 2).tolist()
        draw, box = ImageDraw.Draw(image), (x, y, x + 20, y + 20)
        (draw.rectangle if name == "square" else draw.ellipse)(
            box, outline=colour, fill=None if name == "ring" else colour, width=3
        )
        (folder / "in" / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / "in" / name / f"{k:02d}.{'png' if k % 4 == 0 else 'jpg'}", quality=90)
    command = [sys.executable, "-m", "millrace", "prepare", "records", folder / "in", "--out", folder / "store"]
    subprocess.run([str(part) for part in command], check=True, timeout=110)
    return folder / "store"


def test_an_image_classifier_killed_is_the_uninterrupted_run_bit_for_bit_and_learns(shapes, tmp_path):
    lives_of("images", shapes, tmp_path, "whole:1:0", "run:1:7", "run:1:11", "run:1:0")
    order = mr.Shuffled(90, SEED)
    samples = {k + 1: order.samples(np.arange(16 * k, 16 * k + 16)).tolist() for k in range(30)}
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole") == samples
    losses = losses_of(tmp_path / "whole")
    assert losses_of(tmp_path / "run") == losses
    assert np.mean([losses[k] for k in range(26, 31)]) < 0.8 * np.mean([losses[k] for k in range(1, 4)])


def test_the_events_example_prepares_a_root_file_learns_and_resumes_bit_for_bit(tmp_path):
    lives_of("events", tmp_path / "store", tmp_path, "whole:1:0", "run:1:7", "run:1:50", "run:1:0")
    events = mr.Records(mr.open_store(tmp_path / "store").where("nhits >= 5"))
    train, _ = mr.random_split(events, [0.9, 0.1], labels="label")
    order = mr.Shuffled(len(train), SEED)
    steps = {k + 1: order.samples(np.arange(64 * k, 64 * (k + 1))).tolist() for k in range(120)}
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole") == steps
    losses = losses_of(tmp_path / "whole")
    assert losses_of(tmp_path / "run") == losses
    assert losses[120] < 0.2 < 0.6 < losses[1]


def test_examples_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert len(lengths) == 9
    assert max(lengths.values()) < 64, lengths
