"""Accelerate: the loader is registered for checkpoints; each rank reads its share, so preparing it changes nothing else.

torchrun --nproc-per-node 2 examples/accelerate_loop.py STORE RUN
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import millrace as mr
from millrace.accelerate import Loader

EPOCHS, SAVE_EVERY = 3, 4
path, run = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else sys.exit("usage: " + __doc__.split("\n")[2])
run.mkdir(parents=True, exist_ok=True)

accelerator = Accelerator(cpu=True)
store = mr.open_store(path) if Path(path, "store.json").exists() else sys.exit(f"{path} is not a store")
loader = Loader(mr.Feed(mr.Blocks(store.split("train"), length=32), batch=8, seed=1, last="drop").by_epoch())
val = Loader(mr.Feed(mr.Blocks(store.split("val"), length=32), batch=8).by_epoch(repeat=True))

torch.manual_seed(0)
vocab = store.tokenizer.vocab_size
model = torch.nn.Sequential(torch.nn.Embedding(vocab, 32), torch.nn.Linear(32, vocab))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
accelerator.register_for_checkpointing(loader)
step = int((run / "latest").read_text()) if (run / "latest").exists() else 0
if step:
    accelerator.load_state(run / f"state-{step}")

with open(run / f"steps-{accelerator.process_index}.jsonl", "a") as log:
    while step < EPOCHS * len(loader):
        for batch in loader:  # the rest of a pass, if the run was killed within it
            step += 1
            loss = torch.nn.functional.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            seen = {"step": step, "loss": loss.item(), "samples": batch.samples.tolist()}
            print(json.dumps(seen), file=log, flush=True)
            if step % SAVE_EVERY == 0:
                accelerator.save_state(run / f"state-{step}")
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (run / "next").write_text(str(step))
                    os.replace(run / "next", run / "latest")
                    shutil.rmtree(run / f"state-{step - SAVE_EVERY}", ignore_errors=True)

with torch.no_grad():  # gather_for_metrics leaves out padding: every block of val counts once, over all ranks
    losses = []
    for batch in val:
        each = torch.nn.functional.cross_entropy(model(batch.x).transpose(1, 2), batch.y, reduction="none").mean(1)
        losses.append(accelerator.gather_for_metrics(each))
accelerator.print(f"val_loss {torch.cat(losses).mean().item():.4f} of {len(torch.cat(losses))} blocks")
