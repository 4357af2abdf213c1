"""Lightning: a feed by epoch is the train loader, a repeated one the val loader. Start it again and it continues exactly.

python examples/lightning_trainer.py STORE RUN [DEVICES]
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torchmetrics import MeanMetric

import millrace as mr

EPOCHS, SAVE_EVERY = 3, 4
path, run = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else sys.exit("usage: " + __doc__.split("\n")[2])
devices = int((*sys.argv, "1")[3])


class Model(lightning.LightningModule):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(vocab, 32), torch.nn.Linear(32, vocab))
        self.val_loss = MeanMetric()  # over all ranks

    def losses(self, batch: mr.Batch) -> torch.Tensor:
        return functional.cross_entropy(self.layers(batch.x).transpose(1, 2), batch.y, reduction="none").mean(1)

    def training_step(self, batch: mr.Batch, batch_idx: int) -> torch.Tensor:
        loss = self.losses(batch).mean()
        with open(run / f"steps-{self.global_rank}.jsonl", "a") as log:
            seen = {"step": self.global_step + 1, "loss": loss.item(), "samples": batch.samples.tolist()}
            print(json.dumps(seen), file=log)
        return loss

    def validation_step(self, batch: mr.Batch, batch_idx: int) -> None:
        valid = torch.from_numpy(batch.valid).to(self.device)  # the last batch is padded: every sample counts once
        self.val_loss.update(self.losses(batch), valid)
        self.log("val_loss", self.val_loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    run.mkdir(parents=True, exist_ok=True)
    lightning.seed_everything(0)
    store = mr.open_store(path) if Path(path, "store.json").exists() else sys.exit(f"{path} is not a store")
    feed = mr.Feed(mr.Blocks(store.split("train"), length=32), batch=8, seed=1, last="drop")
    val = mr.Feed(mr.Blocks(store.split("val"), length=32), batch=8)
    saves = ModelCheckpoint(run, every_n_train_steps=SAVE_EVERY, save_last=True)
    trainer = lightning.Trainer(accelerator="cpu", devices=devices, max_epochs=EPOCHS, callbacks=[saves], logger=False)
    last = run / "last.ckpt" if (run / "last.ckpt").exists() else None
    trainer.fit(Model(store.tokenizer.vocab_size), feed.by_epoch(), val.by_epoch(repeat=True), ckpt_path=last)
