"""A classifier of events with any number of hits, from a ROOT file. Start it again and it continues exactly.

python examples/events.py STORE RUN
"""

import json
import os
import sys
from pathlib import Path

import awkward as ak
import numpy as np
import torch
import uproot
from torch.nn import Linear, ReLU, Sequential, functional

import millrace as mr

STEPS, SAVE_EVERY = 120, 4
path, run = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else sys.exit("usage: " + __doc__.split("\n")[2])
run.mkdir(parents=True, exist_ok=True)
if not Path(path).exists():  # or make it: millrace prepare records EVENTS.root --out STORE
    rng = np.random.default_rng(0)
    label, counts = rng.integers(0, 2, 2000), rng.integers(1, 60, 2000)  # 0: hits in a ball, 1: on its shell
    hits = rng.normal(size=(3, counts.sum()))
    hits *= np.where(np.repeat(label, counts), 1, rng.random(counts.sum())) / np.linalg.norm(hits, axis=0)
    hits = ak.unflatten(ak.zip(dict(zip("xyz", hits, strict=True))), counts)
    with uproot.recreate(f"{path}.root") as file:
        file.mktree("events", {"label": "int64", "hits": "var * {x: float32, y: float32, z: float32}"})
        file["events"].extend({"label": label, "hits": hits})
    mr.prepare_records(f"{path}.root", path)
store = mr.open_store(path) if Path(path, "store.json").exists() else sys.exit(f"{path} is not a store")
train, val = mr.random_split(store.where("nhits >= 5"), [0.9, 0.1], labels="label")
feed = mr.Feed(train, batch=64, seed=1)

torch.manual_seed(0)
model = Sequential(Linear(3, 32), ReLU(), Linear(32, 32), ReLU(), Linear(32, 2))  # of one hit
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
parts = {"model": model, "optimizer": optimizer, "feed": feed}
saved = torch.load(run / "latest.pt", weights_only=True) if (run / "latest.pt").exists() else {"step": 0}
for name in parts if saved["step"] else ():
    parts[name].load_state_dict(saved[name])


def logits(batch):  # of events: the mean over their hits
    hits = batch.hits_x.with_values(torch.stack([batch[f"hits_{axis}"].values for axis in "xyz"], 1))
    return torch.zeros(len(hits), 2).index_add(0, hits.batch_vector, model(hits.values)) / hits.lengths[:, None]


with feed, open(run / "steps-0.jsonl", "a") as log:
    for step, batch in zip(range(saved["step"] + 1, STEPS + 1), feed, strict=False):
        loss = functional.cross_entropy(logits(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(json.dumps({"step": step, "loss": loss.item(), "samples": batch.samples.tolist()}), file=log, flush=True)
        if step % SAVE_EVERY == 0:
            torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, run / "next.pt")
            os.replace(run / "next.pt", run / "latest.pt")
others = next(iter(mr.Feed(val, batch=len(val), epochs=1)))
right = (logits(others).argmax(1) == others.label).float().mean().item()
sys.stdout.write(f"{STEPS} steps are done; {right:.0%} of {len(val)} other events are classified rightly\n")
