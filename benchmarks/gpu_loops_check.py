"""What frameworks do to the batches of a feed, checked on a GPU.

    python -m benchmarks.gpu_loops_check [--out gpu_loops_check.json] [--device cuda|cpu]

One line per check, ``ok``, ``MISS`` or what is not installed; exit status 1 where one is missed. ``--device cpu`` tries the script.
From a bare checkout see ``benchmarks/gpu_train_check.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import millrace as mr
from benchmarks.common import machine

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

RNG = np.random.default_rng(0)
TOKENS = mr.Blocks(mr.from_arrays({"tokens": RNG.integers(0, 50, 2_085).astype(np.uint16)}), length=16)  # 130 samples
OFFSETS = np.concatenate(([0], np.cumsum(RNG.integers(0, 9, 130))))
HITS = {"hits": RNG.normal(size=(int(OFFSETS[-1]), 3)).astype(np.float32), "label": np.arange(130)}
EVENTS = mr.Records(mr.from_arrays(HITS, OFFSETS))


def same(one: mr.Batch, other: mr.Batch) -> bool:
    """Whether two batches hold the same, wherever they lie."""

    def host(value: Any) -> Any:
        return (
            value.map(host) if isinstance(value, mr.Ragged) else value.cpu().numpy() if hasattr(value, "cpu") else value
        )

    def equal(a: Any, b: Any) -> bool:
        pairs = ((a.values, b.values), (a.offsets, b.offsets)) if isinstance(a, mr.Ragged) else ((a, b),)
        return all(np.array_equal(x, y) for x, y in pairs)

    marks = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("positions", "samples", "valid"))
    return marks and list(one) == list(other) and all(equal(host(one[name]), host(other[name])) for name in one)


def passes(device: str) -> bool:
    """Passes on the device hold what they hold on the host: every kind of last batch, renamed, ragged, transformed."""
    found = []
    for view, last, transform in itertools.product(
        (TOKENS, EVENTS), ("pad", "drop", "short"), (None, lambda batch, rng: batch)
    ):
        names = {"x": "input_ids"} if view is TOKENS else {"label": "labels"}
        options = {"batch": 16, "seed": 3, "last": last, "rename": names, "transform": transform}
        there, here = (
            mr.Feed(view, device=device, **options).by_epoch(),
            mr.Feed(view, device="numpy", **options).by_epoch(),
        )
        for _ in range(2):
            found += [same(a, b) for a, b in zip(there, here, strict=True)]
    return all(found) and len(found) == 2 * 4 * (9 + 8 + 9)


def moved(device: str) -> bool:
    """``to`` and ``pin_memory`` of dense and ragged batches; views of what was moved by a feed itself."""
    found = []
    for view in (TOKENS, EVENTS):
        for batch in mr.Feed(view, batch=16, seed=3, epochs=1):
            pinned = batch.pin_memory() if device != "cpu" else batch
            found.append(same(pinned.to(device, non_blocking=True), batch))
    return all(found)


def wrapped(device: str) -> bool:
    """A batch that goes through DistributedDataParallel keeps its marks."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Embedding(50, 4)

        def forward(self, batch: mr.Batch) -> tuple[torch.Tensor, Any]:
            return self.layer(batch["x"]).mean(), batch.samples

    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device != "cpu" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            own = Model().to(device)
            model = torch.nn.parallel.DistributedDataParallel(own, device_ids=[0] if device != "cpu" else None)
            batches = list(itertools.islice(mr.Feed(TOKENS, batch=16, seed=3), 3))
            found = [np.array_equal(model(batch)[1], batch.samples) for batch in batches]
            del model
        finally:
            dist.destroy_process_group()
    return all(found)


def lightning(device: str) -> bool:
    """Steps, validations and a resume within an epoch, with batches that Lightning moves and such as lie there already."""
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Embedding(50, 4)
            self.seen: list[Any] = []

        def training_step(self, batch: mr.Batch, batch_idx: int) -> torch.Tensor:
            assert batch["x"].device.type == torch.device(device).type
            self.seen.append(batch.samples.tolist())
            return self.layer(batch["x"]).mean()

        def validation_step(self, batch: mr.Batch, batch_idx: int) -> None:
            self.log("val", self.layer(batch["x"]).mean(), batch_size=int(batch.valid.sum()))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def fit(where: str, folder: str, resume: str | None = None) -> list[Any]:
        model = Model()
        trainer = pl.Trainer(
            accelerator="gpu" if device != "cpu" else "cpu", devices=1, max_epochs=2, precision="bf16-mixed", logger=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)],
        )  # fmt: skip
        options = {"batch": 16, "seed": 3, "device": where}
        trainer.fit(
            model,
            mr.Feed(TOKENS, **options).by_epoch(),
            mr.Feed(TOKENS, **options).by_epoch(repeat=True),
            ckpt_path=resume,
        )
        return model.seen

    found = []
    for where in ("cpu", device):
        with tempfile.TemporaryDirectory() as folder:
            whole = fit(where, folder)
            found += [len(whole) == 18, fit(where, folder, f"{folder}/step=5.ckpt") == whole[5:]]
    return all(found)


def transformers(device: str) -> bool:
    """Training and evaluation by FeedTrainer, resumed within an epoch with the same losses."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

    from millrace.transformers import FeedTrainer

    names = {"x": "input_ids", "y": "labels"}

    def train(folder: str, resume: str | None) -> list[float]:
        set_seed(0)
        config = GPT2Config(
            vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
        )
        arguments = TrainingArguments(
            folder,
            num_train_epochs=2,
            save_steps=5,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        feed = mr.Feed(TOKENS, batch=16, seed=3, last="drop", rename=names, device=device)
        val = mr.Feed(TOKENS, batch=16, rename=names)
        trainer = FeedTrainer(GPT2LMHeadModel(config), arguments, train_dataset=feed.by_epoch(), eval_dataset=val)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.evaluate()["eval_loss"] > 0
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    with tempfile.TemporaryDirectory() as folder:
        whole = train(folder, None)
        return len(whole) == 16 and np.allclose(train(folder, f"{folder}/checkpoint-5"), whole, rtol=1e-4)


CHECKS: dict[str, tuple[Callable[[str], bool], str | None]] = {
    "passes": (passes, None),
    "moved": (moved, None),
    "wrapped": (wrapped, None),
    "lightning": (lightning, "lightning"),
    "transformers": (transformers, "accelerate"),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("gpu_loops_check.json"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, (check, needed) in CHECKS.items():
        if needed is not None and importlib.util.find_spec(needed) is None:
            found[name] = f"{needed} is not installed"
        else:
            found[name] = "ok" if check(options.device) else "MISS"
        print(f"{name}: {found[name]}", flush=True)
    options.out.write_text(json.dumps({"machine": machine(), "checks": found}, indent=2) + "\n")
    return int("MISS" in found.values())


if __name__ == "__main__":
    sys.exit(main())
