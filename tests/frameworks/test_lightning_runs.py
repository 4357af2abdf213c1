"""Random runs of Lightning: from any checkpoint, saved at any moment, what follows is what the uninterrupted run did.

Compared are the samples of every step, its ``batch_idx``, ``global_step`` and ``current_epoch``.
"""

import logging
import os
import random

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader

import millrace as mr

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

RUNS = 4 * int(os.environ.get("MILLRACE_SOAK", 8))
HOOKS = [
    "on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start",
    "on_validation_end", "on_validation_batch_end", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_train_start", "on_train_end",
]  # fmt: skip
SAVES = [
    {"every_n_train_steps": 2}, {"every_n_epochs": 1}, {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    {"every_n_train_steps": 1, "save_on_train_epoch_end": True},
]  # fmt: skip


class Stopped(Exception):
    pass


def parts_of(batch):
    """One batch of each loader; None of a loader that has come to its end."""
    return batch if isinstance(batch, list) else [batch]


class Model(lightning.LightningModule):
    """Notes every step. It may end an epoch, ask to stop, or raise."""

    def __init__(self, leaves_at=None, asks_at=None, raises_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.leaves_at, self.asks_at, self.raises_at, self.seen = leaves_at, asks_at, raises_at, []

    def on_train_batch_start(self, batch, batch_idx):
        samples = [None if part is None else part.samples.tolist() for part in parts_of(batch)]
        self.seen.append((samples, batch_idx, self.trainer.global_step, self.trainer.current_epoch))
        return -1 if batch_idx == self.leaves_at else None

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.raises_at:
            raise Stopped
        if len(self.seen) == self.asks_at:
            self.trainer.should_stop = True
        return self.layer(next(part for part in parts_of(batch) if part is not None)["x"].float()).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def saver(folder, hooks):
    """A callback that saves a checkpoint at each of these hooks."""

    def save(self, trainer, *_, **__):
        if not trainer.sanity_checking:
            trainer.save_checkpoint(folder / f"{len(list(folder.iterdir())):03}.ckpt")

    return type("Saver", (Callback,), dict.fromkeys(hooks, save))()


def blocks(size):
    return mr.Blocks(mr.from_arrays({"tokens": np.arange(size + 1)}), length=1)


class Run:
    """One random configuration, and the callbacks that save its checkpoints."""

    def __init__(self, chance):
        self.sizes = [(chance.randint(8, 12), chance.randint(2, 4), chance.choice(["pad", "drop"])) for _ in range(2)]
        self.mode = chance.choice([None, None, None, "max_size_cycle", "min_size", "max_size"])
        self.options = {"max_epochs": chance.randint(1, 4)}
        if chance.random() < 0.5:
            self.options |= {"max_steps": chance.randint(1, 9), "max_epochs": chance.choice([-1, 3])}
        if chance.random() < 0.3:
            self.options["limit_train_batches"] = chance.choice([1, 2, 0.5])
        if chance.random() < 0.3:
            self.options["accumulate_grad_batches"] = chance.randint(2, 3)
        self.validates = chance.random() < 0.6
        if self.validates and chance.random() < 0.5:
            every = [{"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2}]
            every.append({"val_check_interval": 3, "check_val_every_n_epoch": None})
            self.options |= chance.choice(every)
        self.leaves_at = 1 if chance.random() < 0.1 and "accumulate_grad_batches" not in self.options else None
        self.ending = chance.choice([{}, {"raises_at": chance.randint(1, 6)}, {"asks_at": chance.randint(1, 6)}])
        self.saves = chance.choice([chance.sample(HOOKS, 3), chance.sample(HOOKS, 3), chance.choice(SAVES)])

    def loaders(self):
        views = [blocks(size) for size, _, _ in self.sizes]
        made = [
            mr.Feed(view, batch=batch, seed=1, last=last).by_epoch()
            for view, (_, batch, last) in zip(views, self.sizes, strict=True)
        ]
        return made[0] if self.mode is None else CombinedLoader(made, self.mode)

    def fit(self, folder=None, resume=None, **ending):
        """What a run saw; with a folder, checkpoints lie there: some saved under way, one of its end."""
        callbacks, by_hooks = [], isinstance(self.saves, list)
        if folder is not None:
            folder.mkdir()
            callbacks = [
                saver(folder, self.saves) if by_hooks else ModelCheckpoint(folder, save_top_k=-1, **self.saves)
            ]
        model = Model(self.leaves_at, **ending)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=folder is not None and not by_hooks, callbacks=callbacks, **self.options,
        )  # fmt: skip
        val = mr.Feed(blocks(5), batch=2).by_epoch(repeat=True) if self.validates else None
        try:
            trainer.fit(model, self.loaders(), val, ckpt_path=resume)
        except Stopped:
            model.seen.pop()  # that step is to be taken again
        if folder is not None:
            trainer.save_checkpoint(folder / "end.ckpt")
        return model.seen


@pytest.mark.parametrize("number", range(RUNS))
def test_what_follows_any_checkpoint_is_what_the_uninterrupted_run_did(number, tmp_path, seed):
    chance = random.Random(f"{seed} {number}")
    run = Run(chance)
    whole = run.fit()
    folder = tmp_path / "first"
    first = run.fit(folder, **run.ending)
    assert first == whole[: len(first)]
    for life in range(2):  # the second from a checkpoint of the first
        paths = sorted(folder.glob("*.ckpt"))
        for path in chance.sample(paths, min(len(paths), 4)):
            used = torch.load(path)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
            assert run.fit(resume=path) == whole[used:], f"{vars(run)}, {path.name} of life {life}"
        folder = tmp_path / "second"
        if life == 0:
            run.fit(folder, resume=chance.choice(paths))
