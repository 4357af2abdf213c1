"""Draws the pictures of ``docs/how-the-order-works.md``: python tools/order_plots.py.

It prints the figures that the page quotes.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

import millrace as mr

mpl.use("agg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parents[1] / "docs/pictures"
N, BUFFER, SEEDS, FEW = 4096, 512, 240_000, 5
BLUE, GREY, ORANGE = "#2f6fde", "#98a2b3", "#e07b22"


def buffer_shuffled(n: int, size: int, seed: int) -> Any:
    """The order of a shuffle buffer: a random one of the next ``size`` samples goes out, and the next comes in."""
    rng, buffer, out = np.random.default_rng(seed), list(range(size)), []
    for sample in range(size, n):
        place = int(rng.integers(size))
        out.append(buffer[place])
        buffer[place] = sample
    return np.array([*out, *rng.permutation(buffer)])


def orders() -> dict[str, Any]:
    places = np.arange(N)
    return {
        "Shuffled (exact)": mr.Shuffled(N, seed=7).samples(places),
        "BlockShuffled (blocks of 64, windows of 8)": mr.BlockShuffled(N, block=64, window=8, seed=7).samples(places),
        f"a shuffle buffer of {BUFFER}": buffer_shuffled(N, BUFFER, 7),
    }


def draw_places() -> None:
    """Which sample stands at which position: an even cloud, or a band."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), sharey=True, layout="constrained")
    for axis, (name, samples) in zip(axes, orders().items(), strict=True):
        axis.plot(samples, ".", markersize=1.6, color=BLUE if "Shuffled" in name else ORANGE)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("position in the epoch")
    axes[0].set_ylabel("sample")
    figure.savefig(FOLDER / "order-places.png", dpi=110)


def draw_steps() -> None:
    """How far apart neighbours in the order are, against what chance gives: 2 (1 - d)."""
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    edges = np.linspace(0, 1, 41)
    for (name, samples), colour in zip(orders().items(), (BLUE, GREY, ORANGE), strict=True):
        far = np.abs(np.diff(samples)) / N
        axis.stairs(np.histogram(far, edges, density=True)[0], edges, color=colour, label=name, linewidth=1.6)
    axis.plot([0, 1], [2, 0], "k--", linewidth=1, label="chance: 2 (1 - d)")
    axis.set(xlabel="distance d of two neighbours, as a share of the data", ylabel="density", ylim=(0, 8))
    axis.legend(fontsize=8)
    figure.savefig(FOLDER / "order-steps.svg", metadata={"Date": None})


def draw_uniform() -> float:
    """How often each of the 120 orders of 5 samples comes; returns the z of chi-square."""
    numbers = {order: k for k, order in enumerate(itertools.permutations(range(FEW)))}
    counts, places = np.zeros(len(numbers)), np.arange(FEW)
    for seed in range(SEEDS):
        counts[numbers[tuple(mr.Shuffled(FEW, seed=seed).samples(places).tolist())]] += 1
    expected = SEEDS / len(numbers)
    spread = np.sqrt(expected * (1 - 1 / len(numbers)))
    figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axis.bar(np.arange(len(numbers)), counts, color=BLUE, width=0.9)
    axis.axhspan(
        expected - 3 * spread, expected + 3 * spread, color=GREY, alpha=0.35, label="chance: 3 standard deviations"
    )
    axis.set(xlabel="the 120 orders of 5 samples", ylabel=f"times in {SEEDS:,} seeds", ylim=(0, 1.25 * expected))
    axis.legend(fontsize=8, loc="upper right")
    figure.savefig(FOLDER / "order-uniform.svg", metadata={"Date": None})
    chi = float(((counts - expected) ** 2 / expected).sum())
    free = len(numbers) - 1
    return (chi - free) / np.sqrt(2 * free)


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "millrace"
    mpl.rcParams["svg.fonttype"] = "none"
    draw_places()
    draw_steps()
    for name, samples in orders().items():
        far = np.abs(np.diff(samples)) / N
        print(f"{name}: neighbours are {far.mean():.3f} of the data apart in the mean (chance: 0.333)")
    print(f"chi-square of {SEEDS:,} orders of {FEW}: z = {draw_uniform():+.2f}")
