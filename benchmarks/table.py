"""The tables of README.md and docs/measurements.md, from the files in benchmarks/results: nobody copies figures by hand.

    python -m benchmarks.table

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; NAME is a function of `TABLES`. A test
compares what is committed with what this writes. benchmarks/chart.py draws the same `Contest`.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs/measurements.md")
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


class Entry(NamedTuple):
    """One contestant. ``times``: how many times faster Millrace was in the same run."""

    label: str
    kind: str  # "millrace", "by hand" or "library"
    rate: float
    times: float
    order: str = ""


class Contest(NamedTuple):
    title: str
    unit: str
    entries: list[Entry]  # the fastest first
    machine: dict[str, Any]

    def best(self, kind: str) -> Entry:
        return next(entry for entry in self.entries if entry.kind == kind)


# By the beginning of a key: label, kind, package whose version is shown, and what it shuffles.
DRAWN = "drawn anew each time"
NAMES = {
    "millrace": ("**Millrace**", "millrace", "", "exact, global"),
    "numpy in line": ("one numpy index per batch, in the loop", "by hand", "", DRAWN),
    "DataLoader whole batch": ("the same in a DataLoader", "by hand", "torch", DRAWN),
    "DataLoader per sample": ("DataLoader {}, one sample at a time", "library", "torch", DRAWN),
    "SPDL": ("SPDL {}, batches made by hand", "library", "spdl", DRAWN),
    "Grain": ("Grain {}", "library", "grain", "exact, global"),
    "StatefulDataLoader": ("StatefulDataLoader {}", "library", "torchdata", DRAWN),
    "torchdata nodes": ("torchdata nodes {}", "library", "torchdata", DRAWN),
    "Hugging Face datasets": ("Hugging Face datasets {}", "library", "datasets", "exact, by a list of indices"),
    "WebDataset": ("WebDataset {}", "library", "webdataset", "files, and a buffer of 1,000"),
    "LitData": ("LitData {}", "library", "litdata", "chunks, and within a chunk"),
    "MosaicML Streaming": ("MosaicML Streaming {}", "library", "mosaicml-streaming", "blocks of shards"),
    "GluonTS": ("GluonTS {}", "library", "gluonts", "one window per entity in turn, a buffer of 1,024"),
    "nanoGPT get_batch": ("`get_batch` of nanoGPT", "by hand", "", DRAWN),
}
RECORDS = {
    "millrace": ("**Millrace**", "millrace"),
    "numpy take": ("numpy take", "by hand"),
    "concatenate of slices": ("concatenate of slices", "by hand"),
    "hand-written fill": ("hand-written fill", "by hand"),
    "awkward": ("awkward", "library"),
    "DataLoader, memmap, 0 workers": ("DataLoader over a memmap, 0 workers", "library"),
    "DataLoader, memmap, 2 workers": ("DataLoader over a memmap, 2 workers", "library"),
    "DataLoader, lmdb, 0 workers": ("DataLoader over LMDB", "library"),
    "DataLoader, sqlite, 0 workers": ("DataLoader over SQLite", "library"),
}


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def number(value: float) -> str:
    """Three figures: 1,850,000, 71,200, 4.56."""
    digits = 2 - len(f"{abs(value):.0e}".split("e")[0]) + 1 - int(f"{value:.2e}".split("e")[1])
    return f"{round(value, digits):,.{max(0, digits)}f}"


def times(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:,.0f}x"


def feed(workload: str) -> Contest:
    """Windows (W1) or blocks (W2), with the other libraries of both environments."""
    entries: dict[str, Entry] = {}
    for name in ("feed_older", "feed_peers"):  # what both hold is taken from the second
        found = results(name)[workload]
        rates, versions = found["samples_per_s"], found["versions"]
        for key, (label, kind, package, order) in NAMES.items():
            for full, rate in rates.items():
                if full.partition(",")[0] == key:
                    version = versions.get(package, "").partition("+")[0].removesuffix(".0")
                    entries[key] = Entry(label.format(version), kind, rate, rates["millrace"] / rate, order)
    title = {"W1": "windows of 64 x 16 floats", "W2": "blocks of 1,024 tokens"}[workload]
    return Contest(title, "samples/s", ranked(entries), results("feed_peers")[workload]["machine"])


def records(way: str) -> Contest:
    found = results("records")
    rates = found[way]["events_per_s"]
    entries = {
        key: Entry(label, kind, rates[key], rates["millrace"] / rates[key])
        for key, (label, kind) in RECORDS.items()
        if key in rates
    }
    title = {"values": "ragged events", "padded": "events padded to 256 rows", "longest": "padded to the longest"}[way]
    return Contest(title, "events/s", ranked(entries), found["machine"])


def images() -> Contest:
    found = results("images")
    rates = {key: value["images_per_s"] for key, value in found["rates"].items()}
    ours = rates["millrace, 2 threads"]
    entries = {}
    for key, rate in rates.items():
        if "1 threads" not in key:
            kind = "millrace" if key.startswith("millrace") else "by hand" if "by hand" in key else "library"
            label = "**Millrace**" if kind == "millrace" else key.replace(" by hand, 2 threads", "")
            entries[key] = Entry(label, kind, rate, ours / rate)
    return Contest("JPEG images, 2 threads", "images/s", ranked(entries), found["machine"])


def ranked(entries: dict[str, Entry]) -> list[Entry]:
    return sorted(entries.values(), key=lambda entry: (entry.kind != "millrace", -entry.rate))


def rows(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def feed_table() -> str:
    """Both workloads side by side, with what each contestant shuffles."""
    both = [{entry.label: entry for entry in feed(name).entries} for name in ("W1", "W2")]
    body = []
    for label in dict.fromkeys([*both[0], *both[1]]):
        found = [one.get(label) for one in both]
        cells = [
            cell
            for entry in found
            for cell in ((number(entry.rate), times(entry.times)) if entry else ("-", "-"))
        ]  # fmt: skip
        body.append([label, *cells, next(entry.order for entry in found if entry)])
    head = ["", "W1: windows, samples/s", "Millrace is", "W2: blocks, samples/s", "Millrace is", "order"]
    return rows(head, body)


def readme_table() -> str:
    """Libraries only, the rate and how many times faster Millrace was beside it."""
    both = [{entry.label: entry for entry in feed(name).entries if entry.kind != "by hand"} for name in ("W1", "W2")]
    body = []
    for label in dict.fromkeys([*both[0], *both[1]]):
        found = [one.get(label) for one in both]
        cells = [f"{number(entry.rate)} ({times(entry.times)})" if entry else "-" for entry in found]
        if found[0] and found[0].kind == "millrace":
            cells = [f"**{number(entry.rate)}**" for entry in found if entry]
        body.append([label, *cells])
    return rows(["", *(feed(name).title for name in ("W1", "W2"))], body)


def records_table() -> str:
    contests = {way: {entry.label: entry for entry in records(way).entries} for way in ("values", "padded", "longest")}
    labels = [label for label, _ in RECORDS.values()]
    body = [
        [label, *(number(found[label].rate) if label in found else "-" for found in contests.values())]
        for label in labels
    ]
    return rows(["", "values + offsets", "padded to 256 rows", "padded to the longest"], body)


def images_table() -> str:
    rates = results("images")["rates"]
    names = dict.fromkeys(re.sub(r", [12] threads$", "", name) for name in rates)
    body = []
    for name in names:
        one, two = (rates.get(f"{name}, {count} threads", {}) for count in (1, 2))
        two = two or rates.get(name, {})
        cells = [number(one["images_per_s"]) if one else "-", number(two["images_per_s"])]
        body.append(["**Millrace**" if name == "millrace" else name, *cells, number(two["cpu_s_per_1000"])])
    return rows(["", "1 thread, images/s", "2 threads, images/s", "CPU seconds per 1,000"], body)


def cold_table() -> str:
    found = results("cold")["rounds"]
    labels = {
        "millrace": "**Millrace**, samples (about 8 kB of disk each)",
        "fio": "fio, random reads of 8 kB at queue depth 32",
        "DataLoader, 2 workers": "DataLoader per sample over maps, 2 workers",
        "plain map": "plain map, one thread",
        "millrace, a first pass through the page cache": "Millrace without the cgroup: through the page cache",
    }
    body = [[label, number(statistics.median(one[key] for one in found))] for key, label in labels.items()]
    return rows(["", "per second"], body)


def tables_table() -> str:
    found = results("prepare_table")["m_rows_per_s"]
    labels = {
        "millrace": "**Millrace**",
        "decode once and write": "decoding once and writing the same bytes (the limit)",
    }
    body = [[labels.get(key, key), number(rate)] for key, rate in sorted(found.items(), key=lambda item: -item[1])]
    return rows(["", "million rows/s"], body)


def summary_table() -> str:
    """One line for each kind of work: ours, the best that people write by hand, the best library."""
    contests = [feed("W1"), feed("W2"), records("values"), records("padded"), images()]
    body = [
        [f"{one.title}, {one.unit}", number(one.entries[0].rate), *(_beside(one.best(kind)) for kind in ("by hand", "library"))]
        for one in contests
    ]  # fmt: skip
    cold = {
        key: statistics.median(one[key] for one in results("cold")["rounds"]) for key in results("cold")["rounds"][0]
    }
    body.append(_line("windows from a cold disk, samples/s", cold, "millrace", "fio", "DataLoader, 2 workers"))
    table = results("prepare_table")["m_rows_per_s"]
    best = max(("pyarrow, two passes, pwrite", "polars", "duckdb"), key=table.__getitem__)
    body.append(_line("preparing a table, million rows/s", table, "millrace", "decode once and write", best))
    text = results("prepare_text")["mb_per_s"]
    script = "obvious script (tokenizers, memmap)"
    body.append(_line("preparing text with gpt2, MB/s", text, "millrace on millrace, defaults", script, "datatrove"))
    tiers = results("tiers")
    far = {key: statistics.median(values) for key, values in tiers["MB_per_s"].items()}
    far |= {"LitData": max(tiers["peers"]["litdata"]["first"].values()) * 2048 / 1e6}  # samples of 1,024 uint16
    body.append(_line("first epoch from S3, MB/s", far, "first epoch", "bare to files", "LitData"))
    handed = {key: 1e6 / us for key, us in results("workers")["transport"]["us_per_batch"].items()}
    body.append(_line("batches of 0.5 MB from a worker process, per second", handed, "feed", "by hand", "DataLoader"))
    return rows(["", "Millrace", "the best by hand, or the limit", "the best other library"], body)


def _beside(entry: Entry) -> str:
    return f"{number(entry.rate)}: {entry.label} ({times(entry.times)})"


def _line(title: str, rates: dict[str, float], ours: str, by_hand: str, library: str) -> list[str]:
    entries = [Entry(name, "", rates[name], rates[ours] / rates[name]) if name else None for name in (by_hand, library)]
    return [title, number(rates[ours]), *(_beside(entry) if entry else "-" for entry in entries)]


TABLES = {
    "summary": summary_table,
    "feed": feed_table,
    "readme": readme_table,
    "records": records_table,
    "images": images_table,
    "cold": cold_table,
    "tables": tables_table,
}


def written(text: str) -> str:
    """The page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
