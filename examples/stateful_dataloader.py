"""torchdata's StatefulDataLoader around a feed: its state is the feed's. Start it again and it continues exactly.

python examples/stateful_dataloader.py STORE RUN
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional
from torchdata.stateful_dataloader import StatefulDataLoader

import millrace as mr
import millrace.torch

EPOCHS, SAVE_EVERY = 3, 4
path, run = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else sys.exit("usage: " + __doc__.split("\n")[2])
run.mkdir(parents=True, exist_ok=True)

store = mr.open_store(path) if Path(path, "store.json").exists() else sys.exit(f"{path} is not a store")
feed = mr.Feed(mr.Blocks(store.split("train"), length=32), batch=8, seed=1, last="drop")
dataset = millrace.torch.IterableDataset(feed.by_epoch())
loader = StatefulDataLoader(dataset, batch_size=None)  # the feed makes batches, and in threads of its own

torch.manual_seed(0)
vocab = store.tokenizer.vocab_size
model = torch.nn.Sequential(torch.nn.Embedding(vocab, 32), torch.nn.Linear(32, vocab))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
parts = {"model": model, "optimizer": optimizer, "loader": loader}
if (run / "latest.pt").exists():
    saved = torch.load(run / "latest.pt", weights_only=True)
    step = saved["step"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])

with open(run / "steps-0.jsonl", "a") as log:
    while step < EPOCHS * len(loader):
        for batch in loader:  # the rest of a pass, if the run was killed within it
            step += 1
            loss = functional.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen = {"step": step, "loss": loss.item(), "samples": batch.samples.tolist()}
            print(json.dumps(seen), file=log, flush=True)
            if step % SAVE_EVERY == 0:
                saved = {name: part.state_dict() for name, part in parts.items()}
                torch.save({"step": step, **saved}, run / "next.pt")
                os.replace(run / "next.pt", run / "latest.pt")
sys.stdout.write(f"{step} steps are done; {run}/steps-0.jsonl lists them\n")
