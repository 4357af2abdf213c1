"""The chart of README.md from the files in benchmarks/results: docs/pictures/throughput.svg and .png.

    python -m benchmarks.chart

What is drawn is also written into both files as their description, so that a test can compare it with the results.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.table import ROOT, Contest, feed, images, number, records, times

PICTURES = [ROOT / "docs/pictures" / f"throughput.{kind}" for kind in ("svg", "png")]
# Okabe and Ito's colours, which differ for colour-blind eyes too, and in brightness.
COLOURS = {"millrace": "#0072B2", "by hand": "#E69F00", "library": "#BBBBBB"}
MEANING = {"millrace": "Millrace", "by hand": "written by hand for this data", "library": "other libraries"}


def contests() -> list[Contest]:
    return [feed("W1"), feed("W2"), records("values"), images()]


def description() -> str:
    """All that the chart shows, as JSON."""
    drawn = [
        {
            "title": contest.title,
            "bars": [(_label(entry.label), number(entry.rate), times(entry.times)) for entry in contest.entries],
            "machine": contest.machine,
        }
        for contest in contests()
    ]
    return json.dumps(drawn)


def draw() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "throughput", "svg.fonttype": "none"})
    found = contests()
    tall, low = max(len(one.entries) for one in found[:2]), max(len(one.entries) for one in found[2:])
    figure, axes = plt.subplots(2, 2, figsize=(12, 8.4), height_ratios=[tall, low], layout="constrained")
    for contest, axis in zip(found, axes.flat, strict=True):
        _panel(axis, contest)
    legend = [Patch(color=COLOURS[kind], label=MEANING[kind]) for kind in COLOURS]
    figure.legend(
        handles=legend, loc="outside upper center", ncols=3, frameon=False, fontsize=10,
        title="Feeding: how many samples a second, each library at its best\n",
        title_fontproperties={"size": 13, "weight": "bold"},
    )  # fmt: skip
    figure.supxlabel(_caption(found), fontsize=8.5, color="#444444")
    for path in PICTURES:
        given = {"Description": description(), "Title": "Throughput"} | (
            {"Date": None} if path.suffix == ".svg" else {}
        )
        figure.savefig(path, dpi=130, metadata=given)
    plt.close(figure)


def _panel(axis: Any, contest: Contest) -> None:
    entries = contest.entries
    places = range(len(entries))
    axis.barh(places, [one.rate for one in entries], color=[COLOURS[one.kind] for one in entries], height=0.72)
    axis.set_yticks(places, [_label(one.label) for one in entries])
    axis.get_yticklabels()[0].set_weight("bold")
    axis.invert_yaxis()
    least, most = min(one.rate for one in entries), max(one.rate for one in entries)
    if most > 20 * least:
        axis.set_xscale("log")
        axis.set_xlim(least / 2.5, most * (most / least) ** 0.3 * 1.5)  # room for the labels
    else:
        axis.set_xlim(0, 1.3 * most)
    for place, one in zip(places, entries, strict=True):
        slower = "" if one.kind == "millrace" else f"  ({times(one.times)})"
        axis.annotate(
            f"{number(one.rate)}{slower}", (one.rate, place), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8.5, weight="bold" if one.kind == "millrace" else "normal",
        )  # fmt: skip
    axis.xaxis.set_major_formatter(lambda value, _: _short(value))
    axis.set_title(contest.title, fontsize=11, weight="bold", loc="left")
    axis.set_xlabel(f"{contest.unit}, logarithmic" if axis.get_xscale() == "log" else contest.unit, fontsize=8.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", which="major", color="#DDDDDD", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.minorticks_off()


def _short(value: float) -> str:
    """10k, 1M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _label(label: str) -> str:
    return label.replace("*", "").replace("`", "")


def _machine(contest: Contest) -> str:
    one = contest.machine
    return f"{one['cpu']}, {one['cores']} cores, {one['memory_gib']} GiB"


def _caption(found: list[Contest]) -> str:
    where = dict.fromkeys(_machine(one) for one in found)
    commits = dict.fromkeys(f"{one.machine['commit']} ({one.machine['date']})" for one in found)
    return (
        "Longer is faster. Medians of interleaved rounds on data in memory. In brackets: how many times faster Millrace"
        f" was in the same run.\n{' / '.join(where)}; commit {', '.join(commits)}"
    )


def main() -> None:
    draw()
    for path in PICTURES:
        print(f"saved {path}")


if __name__ == "__main__":
    main()
