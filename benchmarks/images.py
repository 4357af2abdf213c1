"""JPEG to batches: decode, random resized crop to 224, flip, normalise, float32 CHW. ``python -m benchmarks.images``

Photograph-like JPEGs of 500 x 375 at quality 90, from a store of bytes. Every contestant fills batches of 64. Those with
batches ahead are measured after as many were taken as could lie ready. CPU seconds count all threads and processes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import psutil
import simplejpeg
import torch
from PIL import Image

import millrace as mr
from benchmarks.common import interleave, medians, save, verdict

COUNT, SIZE, BATCH, DEPTH, TIMED = 256, 224, 64, 4, 8
MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
FACTOR, OFFSET = (1 / (255 * STD))[:, None, None], (-MEAN / STD)[:, None, None]
LOCAL = threading.local()


def photo(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Noise of all scales, the finer the fainter, as in photographs."""
    layers = []
    for k in range(1, 8):
        small = rng.normal(size=(3 * 2 ** (k - 1), 4 * 2 ** (k - 1), 3)).astype(np.float32) * 90 / 1.7**k
        layers.append(cv2.resize(small, (500, 375), interpolation=cv2.INTER_CUBIC))
    fine = rng.normal(size=(375, 500, 3)).astype(np.float32) * 7
    return np.clip(128 + sum(layers) + fine, 0, 255).astype(np.uint8)


def random_box(height: int, width: int) -> tuple[int, int, int, int]:
    while True:
        area = height * width * random.uniform(0.08, 1)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            return random.randint(0, height - rows), random.randint(0, width - columns), rows, columns


def normalised(small: Any, out: Any) -> None:
    """In place, without arrays between: the fastest of what numpy offers."""
    if random.random() < 0.5:
        small = small[:, ::-1]
    np.multiply(small.transpose(2, 0, 1), FACTOR, out=out)
    out += OFFSET


def with_cv2(data: Any, out: Any) -> None:
    memory = getattr(LOCAL, "memory", None)
    if memory is None:
        memory = LOCAL.memory = np.empty(500 * 375 * 3, np.uint8)
    image = simplejpeg.decode_jpeg(data, buffer=memory)
    top, left, rows, columns = random_box(*image.shape[:2])
    normalised(cv2.resize(image[top : top + rows, left : left + columns], (SIZE, SIZE)), out)


def with_pillow_resize(data: Any, out: Any) -> None:
    image = simplejpeg.decode_jpeg(data)
    top, left, rows, columns = random_box(*image.shape[:2])
    box = (left, top, left + columns, top + rows)
    normalised(np.asarray(Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)), out)


def with_pillow(data: Any, out: Any) -> None:
    image = Image.open(io.BytesIO(data.tobytes())).convert("RGB")
    top, left, rows, columns = random_box(image.height, image.width)
    box = (left, top, left + columns, top + rows)
    normalised(np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)), out)


def by_hand(images: list[Any], decode: Callable[[Any, Any], None], threads: int) -> Iterator[Any]:
    out = np.empty((BATCH, 3, SIZE, SIZE), np.float32)
    picks = itertools.cycle(range(0, COUNT - BATCH + 1, BATCH))
    with ThreadPoolExecutor(threads) if threads > 1 else contextlib.nullcontext() as pool:
        run = map if pool is None else pool.map
        for first in picks:
            list(run(decode, images[first : first + BATCH], out))
            yield out


class Images(torch.utils.data.Dataset[Any]):
    def __init__(self, images: list[Any], decode: Callable[[Any, Any], None]) -> None:
        self._images, self._decode = images, decode

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, sample: int) -> Any:
        out = np.empty((3, SIZE, SIZE), np.float32)
        self._decode(self._images[sample % COUNT], out)
        return torch.from_numpy(out), sample % 10


def loader(images: list[Any], decode: Callable[[Any, Any], None]) -> Iterator[Any]:
    sampler = itertools.count()
    return iter(
        torch.utils.data.DataLoader(Images(images, decode), BATCH, sampler=sampler, num_workers=2, prefetch_factor=2)
    )


def cpu_seconds() -> float:
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def settle() -> None:
    """Waits until the contestant before has its batches ahead ready."""
    before, now = -1.0, cpu_seconds()
    while now - before > 0.01:
        time.sleep(0.1)
        before, now = now, cpu_seconds()


class Contestant:
    """Its iterator stays; while others are measured it rests, with its batches ahead ready."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.cpu: list[float] = []

    def measure(self) -> float:
        settle()
        for _ in range(DEPTH + 1):
            next(self._batches)
        cpu, began = cpu_seconds(), time.perf_counter()
        for _ in range(TIMED):
            next(self._batches)
        seconds = time.perf_counter() - began
        self.cpu.append((cpu_seconds() - cpu) / (TIMED * BATCH) * 1000)
        return TIMED * BATCH / seconds


def main() -> None:
    cv2.setNumThreads(1)
    rng = np.random.default_rng(0)
    images = [
        np.frombuffer(simplejpeg.encode_jpeg(photo(rng), 90, colorsubsampling="420"), np.uint8) for _ in range(COUNT)
    ]
    offsets = np.concatenate(([0], np.cumsum([len(image) for image in images])))
    store = mr.from_arrays({"image": np.concatenate(images), "label": np.arange(COUNT) % 10}, offsets=offsets)
    decode = mr.images.decode(size=SIZE, normalize="imagenet")
    feeds = [mr.Feed(mr.Records(store), batch=BATCH, decode=decode, workers=n, depth=DEPTH) for n in (1, 2)]
    contestants = {f"millrace, {n} threads": Contestant(iter(feed)) for n, feed in zip((1, 2), feeds, strict=True)}
    hands = {"simplejpeg + OpenCV": with_cv2, "simplejpeg + Pillow": with_pillow_resize, "Pillow": with_pillow}
    for name, function in hands.items():
        for n in (1, 2):
            contestants[f"{name} by hand, {n} threads"] = Contestant(by_hand(images, function, n))
    contestants["DataLoader, 2 workers, Pillow"] = Contestant(loader(images, with_pillow))
    contestants["DataLoader, 2 workers, simplejpeg"] = Contestant(loader(images, with_cv2))
    rounds = interleave({name: one.measure for name, one in contestants.items()}, rounds=5)
    for feed in feeds:
        feed.close()
    rates = medians(rounds)
    cpu = medians({name: one.cpu for name, one in contestants.items()})
    mean_bytes = offsets[-1] / COUNT
    print(f"{mean_bytes:,.0f} bytes a JPEG; images/s, CPU seconds per 1,000")
    for name in rates:
        print(f"{name:40s} {rates[name]:8,.0f} {cpu[name]:8.2f}")
    verdicts = []
    for n in (1, 2):
        best = max((name for name in rates if name.endswith(f"by hand, {n} threads")), key=rates.__getitem__)
        ratio = rates[f"millrace, {n} threads"] / rates[best]
        verdicts.append(verdict(f"{n} threads, of the best by hand ({best.partition(' by')[0]})", ratio, 1))
    ours = rates["millrace, 2 threads"]
    verdicts.append(verdict("of a DataLoader with Pillow", ours / rates["DataLoader, 2 workers, Pillow"], 2))
    verdicts.append(verdict("of a DataLoader with simplejpeg", ours / rates["DataLoader, 2 workers, simplejpeg"], 1.3))
    figures = {
        name: {"images_per_s": rates[name], "cpu_s_per_1000": cpu[name], "rounds": rounds[name]} for name in rates
    }
    save("images", {"jpeg_bytes": mean_bytes, "decode": repr(decode), "rates": figures, "verdicts": verdicts})


if __name__ == "__main__":
    main()
