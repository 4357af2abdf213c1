"""A loop of one's own under DistributedDataParallel. Kill it and start it again, on any number of ranks: it continues exactly.

torchrun --nproc-per-node 2 examples/plain_ddp.py STORE RUN
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import millrace as mr

STEPS, SAVE_EVERY = 15, 4
path, run = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else sys.exit("usage: " + __doc__.split("\n")[2])
if "RANK" not in os.environ:
    sys.exit("start it with: " + __doc__.split("\n")[2])
run.mkdir(parents=True, exist_ok=True)

store = mr.open_store(path) if Path(path, "store.json").exists() else sys.exit(f"{path} is not a store")
feed = mr.Feed(mr.Blocks(store.split("train"), length=32), batch=8, seed=1)  # 8 blocks a step, over all ranks

torch.manual_seed(0)
vocab = store.tokenizer.vocab_size
model = torch.nn.Sequential(torch.nn.Embedding(vocab, 32), torch.nn.Linear(32, vocab))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
parts = {"model": model, "optimizer": optimizer, "feed": feed}
if (run / "latest.pt").exists():
    saved = torch.load(run / "latest.pt", weights_only=True)
    step = saved["step"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])

dist.init_process_group("gloo")
parallel = DistributedDataParallel(model)
with feed, open(run / f"steps-{dist.get_rank()}.jsonl", "a") as log:
    for batch in feed:  # this rank's share of each step
        step += 1
        loss = functional.cross_entropy(parallel(batch.x).flatten(0, 1), batch.y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(json.dumps({"step": step, "loss": loss.item(), "samples": batch.samples.tolist()}), file=log, flush=True)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step, **saved}, run / "next.pt")
            os.replace(run / "next.pt", run / "latest.pt")
        if step >= STEPS:
            break
del parallel  # before its group: torch 2.13 may wait for ever where the group ends with it
dist.destroy_process_group()
