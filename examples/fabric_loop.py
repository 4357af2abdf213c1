"""Lightning Fabric: a feed needs no setup_dataloaders, and goes into fabric.save as it is. Start it again and it continues exactly.

python examples/fabric_loop.py STORE RUN [DEVICES]
"""

import json
import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.nn import functional

import millrace as mr

EPOCHS, SAVE_EVERY = 3, 4
path, run = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else sys.exit("usage: " + __doc__.split("\n")[2])
devices = int((*sys.argv, "1")[3])


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    fabric.seed_everything(0)
    run.mkdir(parents=True, exist_ok=True)
    store = mr.open_store(path) if Path(path, "store.json").exists() else sys.exit(f"{path} is not a store")
    loader = mr.Feed(mr.Blocks(store.split("train"), length=32), batch=8, seed=1, last="drop").by_epoch()
    vocab = store.tokenizer.vocab_size
    model = torch.nn.Sequential(torch.nn.Embedding(vocab, 32), torch.nn.Linear(32, vocab))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    if (run / "latest.ckpt").exists():
        fabric.load(run / "latest.ckpt", state)
    with open(run / f"steps-{fabric.global_rank}.jsonl", "a") as log:
        while state["step"] < EPOCHS * len(loader):
            for batch in loader:  # the rest of a pass, if the run was killed within it
                state["step"] += 1
                loss = functional.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                step = {"step": state["step"], "loss": loss.item(), "samples": batch.samples.tolist()}
                print(json.dumps(step), file=log, flush=True)
                if state["step"] % SAVE_EVERY == 0:
                    fabric.save(run / "next.ckpt", state)
                    fabric.barrier()
                    if fabric.global_rank == 0:
                        os.replace(run / "next.ckpt", run / "latest.ckpt")


if __name__ == "__main__":
    main()
