"""Ranks that are started by others: a feed is that of the rank which iterates it, wherever it was made."""

import json
import subprocess
import sys

import numpy as np
import pytest

import millrace as mr

RANKS = """
import json, sys
import numpy as np
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import millrace as mr

def train(rank, world, path, loader):
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world)
    got = [batch.x[batch.valid, 0].tolist() for batch in loader]
    everybody = [None] * world
    dist.all_gather_object(everybody, got)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(everybody))

if __name__ == "__main__":
    path, method, kind = sys.argv[1:]
    feed = mr.Feed(mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=1), batch=7, seed=3, epochs=1)
    loader = feed.by_epoch() if kind == "passes" else feed
    multiprocessing.start_processes(train, (2, path, loader), nprocs=2, start_method=method)
"""


@pytest.mark.parametrize(("method", "kind"), [("spawn", "passes"), ("fork", "feed")])
def test_ranks_that_are_spawned_or_forked_share_an_epoch(tmp_path, method, kind):
    """The feed is made before the ranks and their group; in each of them it is that rank's."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, str(script), str(tmp_path / "group"), method, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    assert len(found[0]) == len(found[1]) == 5
    together = [sample for batches in zip(*found, strict=True) for one in batches for sample in one]
    assert together == mr.Shuffled(30, seed=3).samples(np.arange(30)).tolist()


LIGHTNING = """
import json, sys
from pathlib import Path
import lightning
import numpy as np
import torch
import millrace as mr

torch.set_num_threads(1)

class Model(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.layer, self.folder = torch.nn.Linear(1, 1), folder

    def training_step(self, batch, batch_idx):
        with open(self.folder / f"rank-{self.global_rank}", "a") as log:
            print(json.dumps(batch.samples.tolist()), file=log)
        return self.layer(batch.x.float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)

if __name__ == "__main__":
    feed = mr.Feed(mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=1), batch=6, seed=3)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=sys.argv[2], max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(Path(sys.argv[1])), feed.by_epoch())
"""


@pytest.mark.parametrize("strategy", [pytest.param("ddp_spawn", marks=pytest.mark.soak), "ddp_fork"])
def test_ranks_that_lightning_starts_share_every_batch(tmp_path, strategy):
    """They got the same batches when a feed was what it was where it was made."""
    script = tmp_path / "lightning_ranks.py"
    script.write_text(LIGHTNING)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), strategy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    shares = [(tmp_path / f"rank-{rank}").read_text().splitlines() for rank in range(2)]
    together = [sample for both in zip(*shares, strict=True) for share in both for sample in json.loads(share)]
    assert together == mr.Shuffled(30, seed=3).samples(np.arange(60)).tolist(), done.stderr
