"""An image classifier in a loop of one's own: decoded, cropped, mixed by position. Killed and started again it continues exactly.

python examples/images.py STORE RUN
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional

import millrace as mr

STEPS, SAVE_EVERY, SIZE = 30, 4, 32
path, run = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else sys.exit("usage: " + __doc__.split("\n")[2])
run.mkdir(parents=True, exist_ok=True)

store = mr.open_store(path) if Path(path, "store.json").exists() else sys.exit(f"{path} is not a store")
decode = mr.images.decode(size=SIZE, scale=(0.5, 1), normalize=(0.5, 0.25))  # the records hold JPEG or PNG
mix = mr.augment.Mixup(0.2, group=4)
feed = mr.Feed(mr.Records(store.split("train")), batch=16, seed=1, decode=decode, transform=mix, workers=2)

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 5, stride=2), torch.nn.ReLU(),
    torch.nn.Conv2d(16, 32, 3, stride=2), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.LazyLinear(len(store.meta["classes"])),
)  # fmt: skip
model(torch.zeros(1, 3, SIZE, SIZE))  # finds the size of the last layer
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
parts = {"model": model, "optimizer": optimizer, "feed": feed}
step = 0
if (run / "latest.pt").exists():
    saved = torch.load(run / "latest.pt", weights_only=True)
    step = saved["step"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])

with feed, open(run / "steps-0.jsonl", "a") as log:
    for batch in feed if step < STEPS else ():
        step += 1
        scores = model(batch.image)
        losses = [
            functional.cross_entropy(scores, label, reduction="none") for label in (batch.label, batch.label_partner)
        ]
        loss = (batch.mix * losses[0] + (1 - batch.mix) * losses[1]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(json.dumps({"step": step, "loss": loss.item(), "samples": batch.samples.tolist()}), file=log, flush=True)
        if step % SAVE_EVERY == 0:
            torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, run / "next.pt")
            os.replace(run / "next.pt", run / "latest.pt")
        if step >= STEPS:
            break
