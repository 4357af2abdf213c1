"""The feed on a GPU: steps of a forecaster fed by it, against the same steps on one batch that already lies there.

    python -m benchmarks.gpu [--out gpu.json] [--pairs 41] [--seconds 0.4] [--models LSTM] [--batches 512] [--baseline]
        [--only workers]

W1 windows (see benchmarks/feed.py): an LSTM and a transformer at batch 512 and 4096. Each pair measures the limit and
the feed one after the other, in turn first, for a short time each: steps of two milliseconds differ by a tenth from one second
to the next. Some steps before each are not counted, so that what lay ready is gone. The ratio of a pair is the feed's steps/s
over the limit's. The median is held against 0.97; every pair is reported, and between which the median lies at 95 %.
A GRU at batch 256 has a transform, in threads and in worker processes; at batch 8,192 its windows are 128 x 12 (50 MB).
``--only workers`` measures the GRU alone: two minutes instead of twenty.
``--baseline`` adds a DataLoader of whole batches with pinned memory.
"behind" is a run of 600 tiny steps with long kernels and no synchronisation, so that the loop is ahead of the GPU all the
time, with and without a transform: what next() costs then, and how much pinned memory there is.

From a bare checkout, without installing: the first line builds the core in place.

    gcc -shared -fPIC -O3 -DPy_LIMITED_API=0x030b0000 -I$(python -c "import sysconfig; print(sysconfig.get_paths()['include'])") \
        src/millrace/_core/*.c -o src/millrace/_core.abi3.so
    PYTHONPATH=src:. python -m benchmarks.gpu --out gpu.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import millrace as mr
from benchmarks import worker_functions
from benchmarks.common import machine, share, verdict
from millrace.feed.place.cuda import Gpu
from millrace.native import core

LOOKBACK, HORIZON, TARGET, FEATURES = 64, 8, 3, 16
READY = 40  # no contestant has more batches ready than these


class Lstm(nn.Module):
    def __init__(self, hidden: int = 128, layers: int = 1) -> None:
        super().__init__()
        self.body = nn.LSTM(FEATURES, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, HORIZON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.inward = nn.Linear(FEATURES, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, HORIZON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.inward(x))[:, -1])


class Gru(nn.Module):
    """Of the cases with workers: 12 features."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.body = nn.GRU(12, hidden, batch_first=True)
        self.head = nn.Linear(hidden, HORIZON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {"LSTM": Lstm, "transformer": Transformer, "GRU": Gru}


def make_store(folder: Path) -> mr.View:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((8_000_000, FEATURES), np.float32)
    cuts = np.sort(rng.choice(len(rows) - 1, 999, replace=False)) + 1
    with mr.StoreWriter(folder / "W1", kind="series", columns={"values": mr.Column("float32", (FEATURES,))}) as writer:
        writer.extend({"values": rows}, np.concatenate(([0], cuts, [len(rows)])))
    return mr.Windows(mr.open_store(folder / "W1"), lookback=LOOKBACK, horizon=HORIZON, target=[TARGET])


def check(view: mr.View) -> None:
    """What arrives on the GPU is what the view says."""
    held = []
    for _, batch in zip(range(40), mr.Feed(view, batch=512, seed=1, device="cuda"), strict=False):
        held.append(batch)
        for one in (held[-1], held[len(held) // 2]):
            wanted = view[one.samples]
            assert np.array_equal(one.x.cpu().numpy(), wanted["x"])
            assert np.array_equal(one.y.cpu().numpy(), wanted["y"])
    print("40 batches on the GPU are those of the view")


def check_threads(view: mr.View) -> None:
    """Also in a thread that has no context of its own, on every GPU, with and without a transform."""
    problems: list[BaseException] = []

    def take(device: str, transform: Any) -> None:
        try:
            feed = mr.Feed(view, batch=512, seed=1, device=device, transform=transform)
            for _, batch in zip(range(20), feed, strict=False):
                assert str(batch.x.device) == device
                assert np.array_equal(batch.x.cpu().numpy(), view[batch.samples]["x"])
            feed.close()
        except BaseException as error:  # noqa: BLE001 - raised again below
            problems.append(error)

    for index in range(torch.cuda.device_count()):
        for transform in (None, lambda batch, rng: batch):
            thread = threading.Thread(target=take, args=(f"cuda:{index}", transform))
            thread.start()
            thread.join()
            if problems:
                raise problems[0]
    print(f"the same in threads of their own, on {torch.cuda.device_count()} GPUs")


class Steps:
    """A model and its optimiser; ``run`` trains on batches and returns steps per second."""

    def __init__(self, model: str) -> None:
        torch.manual_seed(0)
        self._model = MODELS[model]().cuda()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), 1e-4, fused=True)

    def run(self, batches: Iterator[Any], count: int, before: int = 0) -> float:
        """``before`` that, some steps that are not counted."""
        for number in range(before + count):
            if number == before:
                torch.cuda.synchronize()
                started = time.perf_counter()
            batch = next(batches)
            loss = nn.functional.mse_loss(self._model(batch["x"]), batch["y"][..., 0])
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()
        torch.cuda.synchronize()
        return count / (time.perf_counter() - started)


class WholeBatch(Dataset[Any]):
    def __init__(self, view: mr.View, batch: int) -> None:
        self._view, self._batch = view, batch

    def __len__(self) -> int:
        return len(self._view) // self._batch

    def __getitem__(self, number: int) -> Any:
        samples = np.random.default_rng(number).integers(0, len(self._view), self._batch)
        found = self._view[samples]
        return {"x": torch.from_numpy(found["x"]), "y": torch.from_numpy(found["y"])}


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        for batch in loader:
            yield {name: value.cuda(non_blocking=True) for name, value in batch.items()}


def same(batch: Any) -> Iterator[Any]:
    while True:
        yield batch


def next_cost(batches: Iterator[Any], count: int = 100) -> float:
    """Microseconds of the training thread for a batch that is ready, between kernels of about a millisecond."""
    times, square = [], torch.randn(2048, 2048, device="cuda")
    for _ in range(count):
        for _ in range(6):
            square @ square
        torch.cuda.synchronize()
        started = time.perf_counter()
        batch = next(batches)
        times.append(time.perf_counter() - started)
        del batch
    return 1e6 * statistics.median(times)


class Pinned:
    """Counts the pinned memory that feeds ask for."""

    def __init__(self) -> None:
        self.asked, self.alive, self.most, self._ask = 0, 0, 0, Gpu.host_memory

    def __enter__(self) -> Pinned:
        Gpu.host_memory = lambda gpu, num_bytes: self.ask(gpu, num_bytes)  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Gpu.host_memory = self._ask  # type: ignore[method-assign]

    def ask(self, gpu: Gpu, num_bytes: int) -> Any:
        memory = self._ask(gpu, num_bytes)
        self.asked, self.alive = self.asked + 1, self.alive + num_bytes
        self.most = max(self.most, self.alive)
        weakref.finalize(memory, self.freed, num_bytes)
        return memory

    def freed(self, num_bytes: int) -> None:
        self.alive -= num_bytes


def behind(view: mr.View, size: int, *, transform: bool, count: int = 600) -> dict[str, Any]:
    """The loop queues ``count`` steps of about a millisecond each, and never waits for them by itself."""
    square, total = torch.randn(2048, 2048, device="cuda"), torch.zeros((), device="cuda", dtype=torch.float64)
    own = (lambda batch, rng: batch) if transform else None
    with Pinned() as pinned, mr.Feed(view, batch=size, seed=7, device="cuda", transform=own) as feed:
        wanted, times = 0.0, []
        for _, batch in zip(range(count), feed, strict=False):
            started = time.perf_counter()
            for _ in range(6):
                square @ square
            total += batch.x.double().sum()
            del batch
            times.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        report = feed.report()
        for _, batch in zip(range(count), mr.Feed(view, batch=size, seed=7, device="numpy"), strict=False):
            wanted += float(batch.x.sum(dtype=np.float64))
    assert report is not None
    assert abs(total.item() - wanted) < 1e-6 * count * size, (total.item(), wanted)
    found = {
        "batch": size, "transform": transform, "steps": count, "get_us": 1e6 * report.get_s / report.batches,
        "queue_us": 1e6 * statistics.median(times), "step_us": 1e6 * report.seconds / report.batches,
        "pinned_asked": pinned.asked, "pinned_bytes": pinned.most, "report": report.as_dict(),
    }  # fmt: skip
    print(
        f"  {count} steps without a wait, batch {size}{', transform' if transform else ''}: next() {found['get_us']:.0f} us of "
        f"{found['step_us']:.0f} us a step; {pinned.asked} pinned slots, {pinned.most:,} bytes"
    )
    return found


def bench(
    view: mr.View, model: str, size: int, options: argparse.Namespace, promised: float = 0.97, **feeding: Any
) -> dict[str, Any]:
    steps = Steps(model)
    with mr.Feed(view, batch=size, seed=7, device="cuda", **feeding) as feed:
        iterator = iter(feed)
        there = {name: value.clone() for name, value in next(iterator).items()}
        contestants: dict[str, Iterator[Any]] = {"limit": same(there), "feed": iterator}
        if options.baseline:
            loader = DataLoader(WholeBatch(view, size), batch_size=None, num_workers=8, pin_memory=True)
            contestants["DataLoader"] = endless(loader)
        for batches in contestants.values():
            steps.run(batches, READY)
        count = max(20, int(options.seconds * steps.run(contestants["limit"], 30)))
        pairs = []
        for number in range(options.pairs):
            names = list(contestants) if number % 2 == 0 else list(contestants)[::-1]
            pairs.append({name: steps.run(contestants[name], count, READY) for name in names})
        report, cost = feed.report(), next_cost(iterator)
    ratios = {name: share([pair[name] / pair["limit"] for pair in pairs]) for name in contestants if name != "limit"}
    way = report.way if report is not None else ""
    what = f"{model}, batch {size}, {way}: steps/s of the limit"
    found = {
        "model": model, "batch": size, "steps": count, "steps_per_s": pairs, "ratios": ratios,
        "promise": verdict(what, ratios["feed"]["median"], promised),
        "next_us": cost,
        "report": None if report is None else report.as_dict(),
    }  # fmt: skip
    loop_us = 0.0 if report is None else 1e6 * report.get_s / report.batches
    told = [
        f"{name} {own['median']:.3f} ({own['between'][0]:.3f} to {own['between'][1]:.3f})"
        for name, own in ratios.items()
    ]
    limit = statistics.median(p["limit"] for p in pairs)
    print(
        f"  limit {limit:.1f} steps/s; {', '.join(told)}; next() {found['next_us']:.0f} us, in the loop {loop_us:.0f}"
    )
    return found


def bench_workers(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A two-line transform in threads and in processes, and batches of 50 MB, which several threads must make."""
    rows = np.random.default_rng(0).standard_normal((4_000_000, 12), np.float32)
    with mr.StoreWriter(folder / "G", kind="series", columns={"values": mr.Column("float32", (12,))}) as writer:
        writer.extend({"values": rows}, np.arange(0, len(rows) + 1, 4_000))
    store = mr.open_store(folder / "G")
    small = mr.Windows(store, lookback=48, horizon=HORIZON, target=[TARGET])
    large = mr.Windows(store, lookback=128, horizon=HORIZON, target=[TARGET])
    with mr.Feed(small, batch=256, seed=1, device="cuda", transform=worker_functions.same, processes=True) as feed:
        for _, batch in zip(range(40), feed, strict=False):
            assert np.array_equal(batch.x.cpu().numpy(), small[batch.samples]["x"])
    noisy: dict[str, Any] = {"transform": worker_functions.noisy}
    return [
        bench(small, "GRU", 256, options, 0.5, **noisy),
        bench(small, "GRU", 256, options, 0.95, **noisy, processes=True),
        bench(large, "GRU", 8192, options, 0.95),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--seconds", type=float, default=0.4, help="per measurement")
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--only", choices=["workers"], help="these cases alone")
    parser.add_argument("--models", nargs="*", default=["LSTM", "transformer"], choices=["LSTM", "transformer"])
    parser.add_argument("--batches", nargs="+", type=int, default=[512, 4096])
    options = parser.parse_args()
    assert core is not None, "the C core is not built: see the first lines of this file"
    base = "/dev/shm" if Path("/dev/shm").exists() and shutil.disk_usage("/dev/shm").free > 2 << 30 else None
    folder = Path(tempfile.mkdtemp(dir=base, prefix="bench-"))
    try:
        late, found = [], []
        if options.only is None:
            view = make_store(folder)
            check(view)
            check_threads(view)
            late = [behind(view, size, transform=transform) for size in (512, 4096) for transform in (False, True)]
            found = [bench(view, model, size, options) for model in options.models for size in options.batches]
        found += bench_workers(folder, options)
    finally:
        shutil.rmtree(folder)
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **machine()}
    options.out.write_text(json.dumps({"machine": where, "figures": found, "behind": late}, indent=1) + "\n")
    print(f"saved {options.out}")


if __name__ == "__main__":
    main()
