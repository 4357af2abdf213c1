"""kill -9 at any moment of a run with threads, then another world and batch: the log of samples is that of one run."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import millrace as mr

pytestmark = [pytest.mark.own_process, pytest.mark.usefixtures("way")]

N, EPOCHS, SEED = 400, 3, 11

TRAIN = """
import json, os, sys, time
import numpy as np
import millrace as mr

store, run, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
feed = mr.Feed(
    mr.Records(mr.open_store(store)), batch=batch, seed=11, epochs=3, device="numpy",
    transform=lambda batch, rng: {**batch, "noise": rng.uniform()}, workers=2, depth=3,
)
if os.path.exists(run + "/state.json"):
    with open(run + "/state.json") as file:
        feed.load_state_dict(json.load(file))
log = open(run + "/log.jsonl", "a")
for got in feed:
    time.sleep(0.002)  # the step
    line = {"positions": got.positions[got.valid].tolist(), "keys": got.key[got.valid].tolist(),
            "noise": got.noise[got.valid].tolist()}
    log.write(json.dumps(line) + "\\n")
    log.flush()
    with open(run + "/state.tmp", "w") as file:
        json.dump(feed.state_dict(), file)
    os.rename(run + "/state.tmp", run + "/state.json")
    if len(sys.argv) > 4 and feed.position >= int(sys.argv[4]):
        print("stand here", flush=True)
        time.sleep(1000)
"""


def write_store(path):
    with mr.StoreWriter(
        path, columns={"hits": mr.Column("float32"), "key": mr.Column("int64", per="record")}
    ) as writer:
        for k in range(N):
            writer.append({"hits": np.full(k % 5, k), "key": k})


def train(tmp_path, batch, kill_at=None):
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "store"), str(tmp_path), str(batch)]
    if kill_at is None:
        assert subprocess.run(command, timeout=60, check=False).returncode == 0
        return
    with subprocess.Popen([*command, str(kill_at)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stand here\n"
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


def test_runs_killed_and_continued_with_other_batches_see_every_sample_once(tmp_path):
    write_store(tmp_path / "store")
    for batch, kill_at in ((32, 150), (7, 420), (50, 790), (32, None)):
        train(tmp_path, batch, kill_at)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    positions, keys, noise = ([one for line in lines for one in line[name]] for name in ("positions", "keys", "noise"))
    assert positions == list(range(N * EPOCHS))
    assert keys == mr.Shuffled(N, seed=SEED).samples(np.arange(N * EPOCHS)).tolist()
    straight = mr.Feed(
        mr.Records(mr.open_store(tmp_path / "store")), batch=64, seed=SEED, epochs=EPOCHS, device="numpy",
        transform=lambda batch, rng: {"noise": rng.uniform()},
    )  # fmt: skip
    assert noise == np.concatenate([got.noise[got.valid] for got in straight]).tolist()
