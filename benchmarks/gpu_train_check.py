"""What ``millrace train`` promises, checked on a GPU: kills, number formats, lack of memory, shards, compiled steps.

    python -m benchmarks.gpu_train_check [--out gpu_train_check.json] [--device cuda|cpu] [--only resume,fp16]

One line per check, ``ok`` or ``MISS``; exit status 1 where one is missed. Runs are processes of ``millrace train``, killed
by SIGKILL where a check says so. The lack of memory is a real one: this process holds all of the GPU but a few GiB.
``--device cpu`` runs what a CPU can show, so that the script itself can be tried: all but that and the peak of memory.

From a bare checkout, without installing: the first line builds the core in place; ``carry`` is a folder with the packages
that millrace imports beside torch, if they are not there.

    gcc -shared -fPIC -O3 -DPy_LIMITED_API=0x030b0000 -I$(python -c "import sysconfig; print(sysconfig.get_paths()['include'])") \
        src/millrace/_core/*.c -o src/millrace/_core.abi3.so
    PYTHONPATH=src:.:carry python -m benchmarks.gpu_train_check --out gpu_train_check.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import millrace as mr
from benchmarks.common import machine
from benchmarks.gpu_train_models import VOCABULARY
from millrace.train import data, run_folder
from millrace.train.checkpoint import Checkpoints
from millrace.train.config import parse_config
from millrace.train.dist import World
from millrace.train.metrics import read_metrics
from millrace.train.models import layers
from millrace.train.models.gpt import GPT
from millrace.train.open_run import load_model
from millrace.train.optimizers import build_optimizer
from millrace.train.parallel import shard
from millrace.train.precision import Precision
from millrace.train.saver import Saver
from millrace.train.state import State
from millrace.train.stepper import Stepper
from millrace.train.tensors import read_tensors
from millrace.train.trainer import Trainer

STEP = re.compile(r"step ([0-9,]+)/")
CONFIG = """\
[data]
length = 128

[model]
kind = "gpt"
layers = 4
heads = 4
width = 128
dropout = 0.1

[train]
max_steps = 200
batch = 32
micro_batch = 16
log_every = 1
deterministic = true
tensorboard = false

[optimizer]
lr = 1e-3
warmup = 10

[checkpoint]
every = 20
"""
KINDS = ("resume", "resume-bf16", "fp16", "oom", "fsdp2", "recompute", "compile", "queue", "packed")


class Checks:
    """Runs in a folder of their own, on one device; ``found`` is what was seen."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device, self.found = folder, device, []  # type: ignore[var-annotated]
        self.config = folder / "gpt.toml"
        small = {
            "log_every = 1": "log_every = 1\nthreads = 1",
            "width = 128": "width = 32",
            "length = 128": "length = 32",
            "layers = 4": "layers = 2",
        }
        text = CONFIG
        for large, other in small.items() if device == "cpu" else ():
            text = text.replace(large, other)
        self.config.write_text(text)
        rng = np.random.default_rng(0)
        columns = {"tokens": mr.Column("uint16")}
        with mr.StoreWriter(folder / "store", kind="text", columns=columns, meta={"vocabulary": VOCABULARY}) as writer:
            ids = (VOCABULARY * rng.random(2_000_000) ** 4).astype(
                np.uint16
            )  # small ids are frequent: something to learn
            writer.extend({"tokens": ids}, [0, len(ids)])

    def say(self, name: str, held: bool, told: str, **facts: Any) -> None:
        print(f"{'ok  ' if held else 'MISS'} {name}: {told}", flush=True)
        self.found.append({"name": name, "held": held, "told": told, **facts})

    def make_series(self) -> Path:
        rng, columns = (
            np.random.default_rng(0),
            {"values": mr.Column("float32", (6,)), "mask": mr.Column("uint8", (6,))},
        )
        values = rng.normal(size=(100_000, 6)).astype(np.float32)
        path = self.folder / "series"
        with mr.StoreWriter(path, kind="series", columns=columns, meta={"features": list("abcdef")}) as writer:
            writer.extend({"values": values, "mask": (values < 2).astype(np.uint8)}, [0, 40_000, 100_000])
        return path

    # Runs.

    def start(self, name: str, *changes: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "millrace", "train", str(self.config), "--store", str(self.folder / "store")]
        command += ["--run", str(self.folder / name)]
        for change in (f"train.device={self.device}", *changes):
            command += ["--set", change]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def train(self, name: str, *changes: str) -> tuple[int, str, str]:
        """To its end: exit status, what it said, what it complained of."""
        process = self.start(name, *changes)
        said, complained = process.communicate()
        return process.returncode, said, complained

    def whole(self, name: str, *changes: str) -> dict[int, float]:
        """The losses of a run that must end well."""
        status, _, complained = self.train(name, *changes)
        assert status == 0, complained[-3000:]
        return self.losses(name)

    def kill(self, name: str, step: int, *changes: str) -> int:
        """Kills a run as soon as it tells of a step; returns the last step it told."""
        process, last = self.start(name, *changes), 0
        assert process.stdout is not None
        for line in process.stdout:
            match = STEP.match(line)
            last = int(match[1].replace(",", "")) if match else last
            if last >= step and process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        complained = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, f"{process.returncode}: {complained[-3000:]}"
        return last

    def losses(self, name: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in read_metrics(self.folder / name) if "loss" in line}

    def weights(self, name: str) -> dict[str, Tensor]:
        checkpoints = self.folder / name / "checkpoints"
        return read_tensors(checkpoints / (checkpoints / "latest").read_text().strip() / "model.safetensors")

    # Checks.

    def resume(self, precision: str = "fp32", at: tuple[int, ...] = (50, 130)) -> None:
        """Killed and continued, losses and weights are those of a run that was left alone."""
        name, changes = f"killed-{precision}", (f"train.precision={precision}",)
        straight = self.whole(f"straight-{precision}", *changes)
        kills = [self.kill(name, step, *changes) for step in at]
        resumed = self.whole(name, *changes)
        same_losses = straight == resumed and len(straight) == 200
        own, other = self.weights(f"straight-{precision}"), self.weights(name)
        same_weights = all(torch.equal(own[key], other[key]) for key in own)
        falls = straight[200] < straight[1]
        told = f"killed at steps {kills}: losses the same {same_losses}, weights the same {same_weights}, "
        told += f"loss {straight[1]:.4f} to {straight[200]:.4f}"
        self.say(f"resume {precision}", same_losses and same_weights and falls, told)

    def resume_bf16(self) -> None:
        self.resume("bf16", (90,))

    def fp16(self) -> None:
        """Steps that overflow are skipped and counted, also through a restart; the rest goes as in fp32."""
        changes = ("train.precision=fp16", "model.kind=benchmarks.gpu_train_models:Steep")
        losses = self.whole("steep", *changes, "train.max_steps=30")
        lines = [line for line in read_metrics(self.folder / "steep") if "loss" in line]
        skipped = [line["skipped"] for line in lines]
        without = sum(line["grad_norm"] is None for line in lines)
        self.whole("steep", *changes, "train.max_steps=31")
        after = [line["skipped"] for line in read_metrics(self.folder / "steep") if "loss" in line][-1]
        held = 0 < skipped[-1] < 30 and skipped[-1] == without == after and losses[30] < losses[1]
        told = f"{skipped[-1]} of 30 steps skipped, {without} without a norm, {after} after a restart"
        self.say("fp16 skips", held, f"{told}, loss {losses[1]:.0f} to {losses[30]:.0f}")
        changes = ("train.max_steps=40", "model.dropout=0.0", "train.clip=0.0")
        half, single = self.whole("half", "train.precision=fp16", *changes), self.whole("single", *changes)
        apart = _apart(half, single)
        self.say("fp16 losses", apart < 5e-3, f"at most {apart:.1e} from those of fp32 over 40 steps", apart=apart)

    def oom(self) -> None:
        """Where the GPU's memory ends: a clear error, or smaller parts with the same losses."""
        changes = ("model.kind=benchmarks.gpu_train_models:Uneven", "train.batch=512", "train.micro_batch=0")
        changes = (*changes, "train.max_steps=5", "train.deterministic=false", "optimizer.warmup=0")
        plenty = self.whole("plenty", *changes)
        with little_memory(4.0):
            status, _, complained = self.train("little", *changes)
            lines = complained.strip().splitlines()
            clear = "out of memory at step 1 with micro-batches of 512" in complained and "Traceback" not in complained
            self.say("out of memory", status == 1 and clear, lines[-1] if lines else f"exit status {status}")
            halved = self.whole("halved", *changes, "train.halve_on_oom=true")
        apart = _apart(plenty, halved)
        own, other = self.weights("plenty"), self.weights("halved")
        moved = max(float((own[key] - other[key]).abs().max()) for key in own)
        peaks = [
            max(line.get("gpu_memory", 0) for line in read_metrics(self.folder / name)) for name in ("plenty", "halved")
        ]
        told = f"losses at most {apart:.1e} from those with memory enough, weights {moved:.1e}, "
        told += f"peak {peaks[1] / 2**30:.2f} instead of {peaks[0] / 2**30:.2f} GiB"
        self.say("halve on OOM", apart < 1e-5 and moved < 1e-4 and peaks[1] < peaks[0], told, peaks=peaks)

    def fsdp2(self) -> None:
        """A checkpoint of a sharded model on one rank is loaded by a model that is not."""
        import torch.distributed as distributed

        device = torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")
        backend = "nccl" if self.device == "cuda" else "gloo"
        folder = self.folder / "sharded"
        distributed.init_process_group(backend, init_method=f"file://{self.folder / 'meeting'}", rank=0, world_size=1)
        try:
            world = World(0, 1, device)
            values: Any = {"data": {"store": str(self.folder / "store"), "length": 128}, "train": {"parallel": "fsdp2"}}
            config = parse_config(values)
            store = mr.open_store(self.folder / "store")
            view = data.training_view(store, config)
            torch.manual_seed(0)
            model = data.build_model(config, store, view).to(device)
            shard(model, world)
            optimizer = build_optimizer(model, config.optimizer)
            stepper = Stepper(model, model, optimizer, Precision("bf16", device), config, world)
            run_folder.write_run(folder, config, store, world, None)
            saver = Saver(Checkpoints(folder / "checkpoints"), world, asynchronous=True)
            losses = []
            with mr.Feed(view, batch=32, seed=0, device=str(device)) as feed:
                for step, batch in zip(range(1, 21), feed, strict=False):
                    losses.append(float(stepper.step(stepper.precision.to_device(batch), step)[0]))
                saver.save(State(step=20, feed=feed.state_dict(), precision={}), model, optimizer)
            saver.finish()
            saver.close()
            own = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}  # type: ignore[attr-defined]
            loaded = load_model(folder).model.state_dict()
        finally:
            distributed.destroy_process_group()
        same = own.keys() == loaded.keys() and all(torch.equal(own[name], loaded[name]) for name in own)
        is_sharded = (folder / "checkpoints/step-00000020/model").is_dir()
        told = f"sharded on disk {is_sharded}, {len(own)} tensors the same without shards: {same}, "
        self.say(
            "fsdp2", is_sharded and same and losses[-1] < losses[0], told + f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
        )

    def recompute(self) -> None:
        """Activation checkpointing: the same losses, dropout and all, with less memory."""
        changes = ("train.max_steps=10", "train.batch=256", "train.micro_batch=0", "model.layers=8", "data.length=256")
        changes = changes if self.device == "cuda" else ("train.max_steps=10",)
        kept, again = self.whole("kept", *changes), self.whole("again", *changes, "train.recompute=true")
        peaks = [
            max(line.get("gpu_memory", 0) for line in read_metrics(self.folder / name)) for name in ("kept", "again")
        ]
        less = peaks[1] < peaks[0] or self.device == "cpu"
        apart = _apart(kept, again)
        told = f"losses at most {apart:.1e} apart, peak {peaks[1] / 2**30:.2f} instead of {peaks[0] / 2**30:.2f} GiB"
        self.say("recompute", apart < 1e-6 and less, told, peaks=peaks)

    def compile(self) -> None:
        """A compiled step computes what the plain one does, and its checkpoint has the same names."""
        changes = ("train.max_steps=10", "model.dropout=0.0")
        plain, compiled = self.whole("plain", *changes), self.whole("compiled", *changes, "train.compile=true")
        apart = _apart(plain, compiled)
        names = self.weights("plain").keys() == self.weights("compiled").keys()
        self.say("compile", apart < 1e-4 and names, f"losses at most {apart:.1e} apart over 10 steps, names {names}")

    def queue(self) -> None:
        """A step on fed batches queues its kernels and waits for none of them; torch tells where one does."""
        series, text = (
            {"store": str(self.make_series()), "target": ["e", "b"]},
            {"store": str(self.folder / "store"), "length": 64},
        )
        models: dict[str, Any] = {
            "gpt": {"data": text, "model": {"kind": "gpt"}},
            "gpt bf16, micro-batches": {"data": text, "model": {"kind": "gpt"}, "train": {"precision": "bf16", "micro_batch": 8}},
            "lstm": {"data": series, "model": {"kind": "lstm", "dropout": 0.1}},
            "transformer": {"data": series, "model": {"kind": "transformer", "dropout": 0.1}},
        }  # fmt: skip
        device = torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")
        waits = {}
        for name, values in models.items():
            values["train"] = {"batch": 32, "max_steps": 100, "tensorboard": False, **values.get("train", {})}
            trainer = Trainer(parse_config(values), self.folder / f"queue {name}", World(0, 1, device))
            batches = iter(trainer.feed)
            try:
                for step in range(1, 21):
                    if step == 6 and self.device == "cuda":
                        torch.cuda.set_sync_debug_mode("error")
                    trainer.stepper.step(trainer.precision.to_device(next(batches)), step)
            except RuntimeError as error:
                waits[name] = str(error).splitlines()[0]
            finally:
                if self.device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
                trainer.close()
        told = "; ".join(f"{name}: {why}" for name, why in waits.items()) or f"no wait in steps of {', '.join(models)}"
        self.say("queue", not waits, told)

    def packed(self) -> None:
        """Packed documents: none sees another, and runs cost less than a mask."""
        is_cuda = self.device == "cuda"
        length, blocks, sizes = (8192, 4, (6, 8, 512)) if is_cuda else (256, 2, (1, 2, 32))
        rng = np.random.default_rng(0)
        lengths = np.minimum(rng.lognormal(np.log(length / 14), 1.0, 400).astype(np.int64) + 2, length)
        tokens = rng.integers(0, VOCABULARY, lengths.sum()).astype(np.uint16)
        view = mr.Packed(mr.from_arrays({"tokens": tokens}, np.append(0, np.cumsum(lengths))), length=length)
        batch = {name: torch.from_numpy(own).to(self.device) for name, own in view[np.arange(blocks)].items()}
        marks = batch["document"], batch["place"]
        torch.manual_seed(0)
        depth, heads, width = sizes
        model = GPT(vocabulary=VOCABULARY, length=length, layers=depth, heads=heads, width=width).to(self.device)
        is_first, other = batch["document"] == 0, batch["x"].clone()
        other[is_first] = (other[is_first] + 1) % VOCABULARY
        usual, found = layers.varlen, {}
        try:
            for way in ("runs", "mask"):
                if way == "mask":
                    layers.varlen = lambda: None  # type: ignore[assignment, return-value]
                with torch.autocast(self.device, dtype=torch.bfloat16):
                    with torch.no_grad():
                        before, after = model.logits(batch["x"], *marks), model.logits(other, *marks)
                    apart = torch.equal(before[~is_first], after[~is_first])
                    seen = not torch.equal(before[is_first], after[is_first])
                    loss, rate = self._rate(model, batch)
                found[way] = {"apart": apart and seen, "loss": loss, "tokens_per_s": rate}
        finally:
            layers.varlen = usual
        runs, mask = found["runs"], found["mask"]
        near = abs(runs["loss"] - mask["loss"]) < 0.01 * abs(mask["loss"])
        has_runs = is_cuda and usual() is not None
        rates = {way: f"{own['tokens_per_s']:,.0f} tokens/s" for way, own in found.items()}
        told = f"bits of others stay: {runs['apart']} and {mask['apart']}; loss {runs['loss']:.5f} and {mask['loss']:.5f}; "
        told += f"{rates['runs']} by {'runs' if has_runs else 'a mask too'}, {rates['mask']} by a mask"
        self.say("packed", runs["apart"] and mask["apart"] and near and (has_runs or not is_cuda), told, **found)

    def _rate(self, model: GPT, batch: dict[str, Tensor]) -> tuple[float, float]:
        """The loss, and tokens per second of passes forward and back."""
        started, count, loss = 0.0, 8 if self.device == "cuda" else 1, torch.zeros(())
        for step in range(count + 2):  # the first two warm up
            if step == 2:
                started = time.perf_counter()
            loss = model(batch)
            loss.backward()
            model.zero_grad()
            if self.device == "cuda":
                torch.cuda.synchronize()
        return float(loss.detach()), count * batch["x"].numel() / (time.perf_counter() - started)


def _apart(some: dict[int, float], others: dict[int, float]) -> float:
    """The largest relative difference of losses, step by step."""
    assert some.keys() == others.keys()
    return max(abs(some[step] - others[step]) / abs(others[step]) for step in some)


@contextlib.contextmanager
def little_memory(gib: float) -> Iterator[None]:
    """Within the block other processes find this much of the GPU's memory."""
    torch.cuda.empty_cache()
    held = torch.empty(torch.cuda.mem_get_info()[0] - int(gib * 2**30), dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del held
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("gpu_train_check.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", help=f"some of {','.join(KINDS)}")
    options = parser.parse_args()
    wanted = (
        options.only.split(",")
        if options.only
        else [kind for kind in KINDS if options.device == "cuda" or kind != "oom"]
    )
    base = "/dev/shm" if Path("/dev/shm").exists() and shutil.disk_usage("/dev/shm").free > 2 << 30 else None
    folder = Path(tempfile.mkdtemp(dir=base, prefix="check-"))
    if options.device == "cpu":
        torch.set_num_threads(1)
    try:
        checks = Checks(folder, options.device)
        for kind in wanted:
            began = time.perf_counter()
            try:
                getattr(checks, kind.replace("-", "_"))()
            except Exception as error:  # noqa: BLE001 - the others are still checked
                checks.say(kind, False, f"{type(error).__name__}: {error}")
            print(f"     ({kind}: {time.perf_counter() - began:.0f} s)", flush=True)
    finally:
        shutil.rmtree(folder)
    where = {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "torch": torch.__version__}
    options.out.write_text(json.dumps({"machine": {**where, **machine()}, "checks": checks.found}, indent=1) + "\n")
    print(f"saved {options.out}")
    sys.exit(not all(each["held"] for each in checks.found))


if __name__ == "__main__":
    main()
