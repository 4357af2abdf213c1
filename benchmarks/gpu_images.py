"""Images on a GPU, checked and measured: needs torch, torchvision and Pillow.

    PYTHONPATH=src:. python -m benchmarks.gpu_images [--device cuda] [--count 512] [--out FILE]

Photograph-like JPEGs of 500 x 375 at quality 90, made here by Pillow. Checked: pixels decoded on the GPU against those of
the CPU, torchvision against Pillow, a second run and a resumed run against the first, a corrupt image, and every step of
``mr.augment`` on the GPU against the CPU. Measured: images/s and CPU seconds of the GPU beside the threads of a feed.
``--device cpu`` runs the same without a GPU: everything is then decoded by the CPU.
"""

from __future__ import annotations

import argparse
import io
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import millrace as mr
from benchmarks.common import machine, verdict
from millrace.errors import ConfigError
from millrace.feed.rng import Rng
from millrace.images.read import module_of
from millrace.native import core

SIZE, BATCH, SEED = 224, 64, 7
aug = mr.augment
STEPS = (
    aug.RandomFlip(), aug.RandomCrop(4), aug.ColorJitter(), aug.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
    aug.Mixup(0.4), aug.CutMix(), aug.Compose([aug.RandomCrop(4), aug.RandomFlip(), aug.ColorJitter(), aug.CutMix()]),
)  # fmt: skip


def photo(number: int) -> Any:
    """Noise of several scales, the finer the fainter, as in photographs."""
    rng = np.random.default_rng(number)
    total = np.full((375, 500, 3), 128.0)
    for k in range(1, 7):
        small = rng.normal(size=(3 * 2 ** (k - 1), 4 * 2 ** (k - 1), 3)) * 40 / 1.6**k + 128
        layer = Image.fromarray(small.clip(0, 255).astype(np.uint8)).resize((500, 375), Image.Resampling.BICUBIC)
        total += np.asarray(layer, np.float64) - 128
    return (total + rng.normal(size=total.shape) * 4).clip(0, 255).astype(np.uint8)


def jpeg(pixels: Any, **options: Any) -> Any:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **{"quality": 90, **options})
    return np.frombuffer(file.getvalue(), np.uint8)


def store_of(files: list[Any]) -> Any:
    offsets = np.concatenate(([0], np.cumsum([len(file) for file in files])))
    return mr.from_arrays({"image": np.concatenate(files), "label": np.arange(len(files)) % 10}, offsets=offsets)


def odd_files() -> list[Any]:
    """One of each kind that takes another way: grey, no subsampling, progressive, turned, CMYK, PNG, cut short."""
    exif = Image.Exif()
    exif[0x0112] = 6
    cmyk, png = io.BytesIO(), io.BytesIO()
    Image.fromarray(photo(1)).convert("CMYK").save(cmyk, "JPEG", quality=90)
    Image.fromarray(photo(1)).save(png, "PNG")
    return [
        jpeg(photo(1)[:, :, 0]), jpeg(photo(1), subsampling=0), jpeg(photo(1), progressive=True), jpeg(photo(1), exif=exif),
        np.frombuffer(cmyk.getvalue(), np.uint8), np.frombuffer(png.getvalue(), np.uint8), jpeg(photo(1))[:9000], jpeg(photo(2)),
    ]  # fmt: skip


def batches_of(store: Any, **options: Any) -> Any:
    return mr.Feed(mr.Records(store), **{"batch": BATCH, "seed": SEED, "epochs": 1, **options})


def differences(store: Any, decode: Any, device: str, batch: int = BATCH) -> Any:
    """Of each image: the mean difference between this device and the CPU, in steps of 0 to 255."""
    found = []
    with batches_of(store, decode=decode, batch=batch) as expected, batches_of(store, batch=batch) as raw:
        for theirs, given in zip(expected, raw, strict=True):
            ours = aug.decode_on_device(given, decode, device=device, seed=SEED)
            assert ours["image"].device.type == torch.device(device).type
            assert ours["label"].tolist() == theirs["label"].tolist()
            assert ours.positions.tolist() == theirs.positions.tolist()
            if "image_ok" in theirs:
                assert ours["image_ok"].tolist() == theirs["image_ok"].tolist()
            apart = (ours["image"].cpu().double() - theirs["image"].double()).abs()
            found.extend((apart.flatten(1).mean(1) * (255 if decode.dtype == "float32" else 1)).tolist())
    return np.array(found)


def check_pixels(store: Any, device: str, library: str) -> list[Any]:
    verdicts = []
    for name, options in (
        ("random crops", {}), ("centre crops", {"crop": "center"}), ("uint8, hwc", {"dtype": "uint8", "layout": "hwc"}),
    ):  # fmt: skip
        found = differences(store, mr.images.decode(size=SIZE, library=library, **options), device)
        what = f"{name}: mean difference to the CPU in steps of 255, worst image"
        verdicts.append(verdict(what, float(found.max()), 4, at_least=False))
    decode = mr.images.decode(size=SIZE, crop="center", on_error="replace", library=library)
    found = differences(store_of(odd_files()), decode, device, batch=8)
    print("     odd images (any order):", " ".join(f"{value:.2f}" for value in found))
    verdicts.append(verdict("odd images: mean difference, worst image", float(found.max()), 6, at_least=False))
    return verdicts


def check_resume(store: Any, device: str, library: str) -> list[Any]:
    """The same bytes again, from the start and from the middle, with another batch."""
    decode = mr.images.decode(size=SIZE, library=library)

    def images(feed: Any) -> dict[int, bytes]:
        found = {}
        for given in feed:
            batch = aug.decode_on_device(given, decode, device=device, seed=SEED)
            host = batch["image"].cpu().numpy()
            found |= {int(position): host[k].tobytes() for k, position in enumerate(batch.positions) if position >= 0}
        return found

    with batches_of(store) as feed:
        whole = images(feed)
    with batches_of(store, batch=16) as feed:
        first = next(iter(feed))
        state = feed.state_dict()
    rest = batches_of(store, batch=48)
    rest.load_state_dict(state)
    with rest:
        resumed = images(rest)
    same = sum(resumed[position] == whole[position] for position in resumed) / len(resumed)
    expected = len(whole) - len(first.positions)
    print(f"     resumed at position {state['position']}: {len(resumed)} of {expected} images")
    return [verdict("resumed with another batch: share of images with the same bytes", same, 1)]


def check_augment(device: str) -> list[Any]:
    """Every step on the device against numpy on the CPU."""
    rng, positions = np.random.default_rng(0), np.arange(96, 128)
    given = {"image": rng.random((32, 3, 64, 72), np.float32), "label": np.arange(32)}
    marks = {"positions": positions, "samples": positions, "valid": np.ones(32, bool)}
    worst = 0.0
    for step in STEPS:
        expected = step(mr.Batch(given, **marks), Rng(SEED, positions))
        found = aug.on_device(mr.Batch(given, **marks).to(device), step, seed=SEED)
        own = max(float(np.abs(np.asarray(found[name].cpu()) - expected[name]).max()) for name in expected)
        print(f"     {type(step).__name__}: {own:.1e}")
        worst = max(worst, own)
    return [verdict("augmentation: largest difference to the CPU", worst, 1e-5, at_least=False)]


def speed(store: Any, device: str, library: str, threads: int | None, batch: int = BATCH) -> dict[str, float]:
    """Images/s and CPU seconds per 1,000 images; without threads the device decodes."""
    decode = mr.images.decode(size=SIZE, normalize="imagenet", library=library)
    own = {"decode": decode, "workers": threads} if threads else {}
    with batches_of(store, epochs=None, batch=batch, **own) as feed:
        batches = iter(feed)

        def run() -> None:
            given = next(batches)
            if threads is None:
                aug.decode_on_device(given, decode, device=device, seed=SEED)

        for _ in range(6):
            run()
        count, cpu, began = 0, time.process_time(), time.perf_counter()
        while time.perf_counter() - began < 2 or count < 3:
            run()
            count += 1
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    found = {
        "images_per_s": count * batch / seconds,
        "cpu_s_per_1000": (time.process_time() - cpu) / (count * batch) * 1000,
    }
    name = f"{device}, batches of {batch}" if threads is None else f"{library}, {threads} threads"
    print(f"     {name}: {found['images_per_s']:,.0f} images/s, {found['cpu_s_per_1000']:.2f} CPU s per 1,000")
    return found


def libraries() -> list[str]:
    """Those that are installed, Pillow first."""
    found = []
    for name in ("pillow", "torchvision", "simplejpeg"):
        try:
            module_of(name)
            found.append(name)
        except ConfigError as error:
            print(f"     {name}: {error.__cause__}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, known = options.device, libraries()
    if device == "cuda" and "torchvision" not in known:
        raise SystemExit("torchvision is missing: nothing to check on the GPU")
    print(f"     libraries {known}, torch {torch.__version__}, the core is {'here' if core is not None else 'missing'}")
    warnings.simplefilter("ignore", UserWarning)  # that a corrupt image is replaced
    files = [jpeg(photo(k)) for k in range(min(64, options.count))]
    few, many = store_of(files), store_of([files[k % len(files)] for k in range(options.count)])
    verdicts = [*check_augment(device), *check_pixels(few, device, "pillow")]
    if "torchvision" in known:
        decode = mr.images.decode(size=SIZE, library="torchvision")
        verdicts += [
            verdict("torchvision on the CPU against Pillow, worst image", compare(few, decode), 1, at_least=False)
        ]
    verdicts += check_resume(few, device, "pillow")
    rates = {f"{device}, {batch}": speed(many, device, "pillow", None, batch) for batch in (64, 256)}
    for library in known:
        for threads in options.threads:
            rates[f"{library}, {threads}"] = speed(many, device, library, threads)
    if options.out:
        options.out.write_text(
            json.dumps({"machine": machine(), "rates": rates, "verdicts": verdicts}, indent=1) + "\n"
        )


def compare(store: Any, decode: Any) -> float:
    """The worst mean difference of an image between the library of a decode and Pillow, in steps of 255."""
    other = mr.images.decode(size=SIZE, library="pillow")
    with batches_of(store, decode=decode) as one, batches_of(store, decode=other) as two:
        pairs = [(a["image"] - b["image"]).abs().flatten(1).mean(1).max() * 255 for a, b in zip(one, two, strict=True)]
    return float(max(pairs))


if __name__ == "__main__":
    main()
