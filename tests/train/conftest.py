"""What the tests of the trainer share: small stores, small configurations, ranks as real processes."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millrace as mr
from millrace.testing.servers import free_port
from millrace.train.config import Config, parse_config

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the forkserver's children get it too


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with something to learn: each token mostly follows from the one before; 512 ids would not fit a byte."""
    path = tmp_path_factory.mktemp("tokens") / "store"
    rng = np.random.default_rng(3)
    follows = rng.permutation(200)
    columns = {"tokens": mr.Column("uint16"), "mask": mr.Column("uint8"), "key": mr.Column("string", per="record")}
    with mr.StoreWriter(
        path, kind="text", columns=columns, splits=("train", "val"), meta={"vocabulary": 200}
    ) as writer:
        for document in range(60):
            ids = np.zeros(rng.integers(30, 200), np.int64)
            for k in range(1, len(ids)):
                ids[k] = follows[ids[k - 1]] if rng.random() < 0.9 else rng.integers(200)
            # Masks leave samples with very different numbers of targets.
            mask = rng.random(len(ids)) < rng.choice([0.05, 0.5, 1.0])
            writer.append(
                {"tokens": ids, "mask": mask, "key": f"doc-{document}"}, split="val" if document % 10 == 9 else "train"
            )
    return path


@pytest.fixture(scope="session")
def waves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Series that can be forecast: noisy waves, split by time."""
    path = tmp_path_factory.mktemp("waves") / "store"
    rng = np.random.default_rng(5)
    columns = {
        "values": mr.Column("float32", (3,)),
        "name": mr.Column("string", per="record"),
        "cuts": mr.Column("int64", (1,), per="record"),
    }
    meta = {"features": ["a", "b", "c"]}
    with mr.StoreWriter(path, kind="series", columns=columns, meta=meta, cuts=mr.Cuts(("train", "val"))) as writer:
        for sensor in range(20):
            t = np.arange(rng.integers(200, 400))
            waves = np.stack([np.sin(t / p + sensor) for p in (3.0, 5.0, 8.0)], 1)
            values = waves * (1 + sensor) + rng.normal(size=(len(t), 3)) * 0.1
            writer.append({"values": values, "name": f"sensor-{sensor:02d}", "cuts": [len(t) * 4 // 5]})
    return path


@pytest.fixture(scope="session")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target far from 0 of which half the values are missing, for one sensor a whole lookback of them."""
    import pandas

    rng = np.random.default_rng(1)
    frames = []
    for sensor in range(4):
        hours = np.arange(120)
        frame = pandas.DataFrame({"sensor": f"s{sensor}", "time": hours, "load": rng.normal(size=120) * 9 + 30})
        frame["heat"] = np.sin(hours / 4 + sensor) + 20 * sensor + 100
        frame.loc[rng.random(120) < 0.5, "heat"] = np.nan
        if sensor == 2:
            frame.loc[85:110, "heat"] = np.nan
        frames.append(frame)
    folder = tmp_path_factory.mktemp("gaps")
    pandas.concat(frames).to_parquet(folder / "t.parquet")
    mr.prepare_table(
        str(folder / "t.parquet"), folder / "store", entity=("sensor",), time="time", features=("heat", "load"),
        target=("heat",), nulls="mask", val_last=0.2,
    )  # fmt: skip
    return folder / "store"


def nano(store: Path, **changes: Any) -> dict[str, Any]:
    """A configuration of a model that steps in milliseconds; changes are ``train__max_steps=40``."""
    values: dict[str, Any] = {
        "data": {"store": str(store), "length": 16, "lookback": 16, "horizon": 4},
        "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 16},
        "train": {
            "max_steps": 10,
            "batch": 12,
            "log_every": 1,
            "threads": 1,
            "seed": 7,
            "device": "cpu",
            "tensorboard": False,
        },
        "optimizer": {"lr": 1e-2, "warmup": 3},
        "checkpoint": {"every": 5},
        "evaluation": {"max_share": 0},  # all of the split
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return values


def config_of(store: Path, **changes: Any) -> Config:
    return parse_config(nano(store, **changes))


def lines(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics; one that is being written is left out."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run) if "loss" in line}


def weights(run: Path) -> dict[str, torch.Tensor]:
    from millrace.train.checkpoint import Checkpoints
    from millrace.train.tensors import read_tensors

    checkpoints = Checkpoints(run / "checkpoints")
    return read_tensors(checkpoints.folder / str(checkpoints.resolve("latest")) / "model.safetensors")


@dataclass
class Ranks:
    """Processes that train together in one run folder."""

    run: Path
    processes: list[Any] = field(default_factory=list)
    lives: int = 0  # how often a feed had started in the folder before

    def __post_init__(self) -> None:
        self.lives = self._lives()

    def _lives(self) -> int:
        path = self.run / "feed.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait(self, timeout: float = 200) -> list[int]:
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        if None in codes:
            self.kill()
            raise AssertionError(f"ranks still run after {timeout} s: {codes}\n{self.output}")
        return codes

    def finish(self) -> None:
        codes = self.wait()
        assert codes == [0] * len(codes), self.output

    def reach(self, step: int) -> None:
        """Returns when the metrics tell of a step, or the ranks have ended."""
        while self.processes[0].exitcode is None:
            # Lines of an earlier life are still there until the new one has cut them.
            if self._lives() > self.lives and max(losses(self.run), default=0) >= step:
                return
            time.sleep(0.001)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.run.parent.glob(f"{self.run.name}.rank*.log")))


@pytest.fixture(scope="session")
def forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo too: the first optimiser imports it, which takes a second and a half in every rank.
    context.set_forkserver_preload(["torch", "millrace.train.trainer", "torch.distributed.checkpoint", "torch._dynamo"])
    return context


@pytest.fixture
def start(forkserver: Any) -> Iterator[Any]:
    """``start(values, run, ranks=1)`` trains in real processes; those still alive at the end are killed.

    After step ``stand_at`` they stand still: one that is to be killed does not end before, however late the kill comes.
    """
    from train_rank import rank

    started: list[Ranks] = []

    def begin(values: dict[str, Any], run: Path, ranks: int = 1, stand_at: int = 0) -> Ranks:
        found = Ranks(run)
        run.parent.mkdir(parents=True, exist_ok=True)
        port = free_port()
        for number in range(ranks):
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            environment |= {"RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(number)}
            log = str(run.parent / f"{run.name}.rank{number}.log")
            arguments = (values, str(run), environment, log, stand_at)
            process = forkserver.Process(target=rank, args=arguments, daemon=True)
            process.start()
            found.processes.append(process)
        started.append(found)
        return found

    yield begin
    for ranks in started:
        for process in ranks.processes:
            if process.exitcode is None:
                process.kill()
                process.join()
