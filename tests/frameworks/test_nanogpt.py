"""The patch for nanoGPT, as the guide shows it, in a loop of nanoGPT's shape: it reads one batch ahead and saves at its top."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import millrace as mr

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "frameworks.md"
BATCH, LENGTH, MICRO = 4, 8, 3


def added_lines() -> list[str]:
    """The lines that the patch adds, by the places it names."""
    patch = re.search(r"^```diff\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL).group(1)
    hunks = re.split(r"^@@.*\n", patch, flags=re.MULTILINE)
    return ["\n".join(line[1:] for line in hunk.splitlines() if line.startswith("+")) for hunk in hunks]


def train(folder: Path, *, until: int, resume: bool) -> list[list[int]]:
    """The samples of every micro step, with the names and the order of nanoGPT's train.py."""
    setup, load, first, save, fetch = map(str.strip, added_lines())
    names = {"data_dir": str(folder), "block_size": LENGTH, "batch_size": BATCH, "ddp_world_size": 1, "device": "cpu"}
    exec(setup, names)
    iter_num, used, path = 0, [], folder / "ckpt.json"
    if resume:
        names["checkpoint"] = json.loads(path.read_text())
        iter_num = names["checkpoint"]["iter_num"]
        exec(load, names)
    exec(first, names)
    while iter_num < until:
        if iter_num % 2 == 0:
            exec(f"saved = {{{save}}}", names)
            path.write_text(json.dumps({"iter_num": iter_num, **names["saved"]}))
        for _ in range(MICRO):
            used.append(names["ahead"].samples.tolist())
            exec(fetch, names)
        iter_num += 1
    names["feed"].close()
    return used


@pytest.mark.parametrize("killed_at", [3, 5, 6])
def test_a_patched_nanogpt_continues_with_the_same_samples(killed_at, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50, 400).astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    tokens[:100].tofile(tmp_path / "val.bin")
    whole = train(tmp_path, until=9, resume=False)
    n = len(mr.Blocks(mr.open_store(tmp_path).split("train"), length=LENGTH))
    order = mr.Shuffled(n, seed=1337).samples(np.arange(len(whole) * BATCH))
    assert whole == order.reshape(-1, BATCH).tolist()
    train(tmp_path, until=killed_at, resume=False)
    saved = json.loads((tmp_path / "ckpt.json").read_text())["iter_num"]
    assert train(tmp_path, until=9, resume=True) == whole[saved * MICRO :]
