"""Anonymous memory of a preparation, parent and workers together: bounded, whatever the size of input or document."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

pytestmark = pytest.mark.timeout(600)
LIMIT = 1_500_000_000
WORDS = Path(re.__file__).with_name("_parser.py").read_bytes()


def anonymous(process):
    """Anonymous bytes of a process and its children."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
        except (OSError, psutil.Error):
            continue
        total += 1024 * int(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1])
    return total


def peak(source, out, *arguments, expected=0):
    """The most memory ``millrace prepare text`` had, looked at all the time."""
    command = [sys.executable, "-m", "millrace", "prepare", "text", str(source), "--out", str(out), *arguments]
    most = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        process = psutil.Process(running.pid)
        while running.poll() is None:
            most = max(most, anonymous(process) if process.is_running() else 0)
            try:
                running.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
    assert running.returncode == expected
    return most


def write_corpus(path, megabytes):
    """Documents of about 2 KB, no two alike."""
    with open(path, "wb") as file:
        for number in range(megabytes * 500):
            start = number * 37 % (len(WORDS) - 2000)
            file.write(b"%d %s\n\n" % (number, re.sub(rb"\n\n+", b"\n", WORDS[start : start + 2000])))


@pytest.fixture
def disk_path(tmp_path_factory):
    """On disk: a corpus in /dev/shm would be memory itself."""
    return tmp_path_factory.mktemp("memory")


def test_memory_does_not_grow_with_the_input(disk_path):
    peaks = []
    for megabytes in (40, 160):
        write_corpus(disk_path / f"{megabytes}.txt", megabytes)
        given = ("--tokenizer", "bytes", "--workers", "2")  # the smaller one has too few parts for more
        peaks.append(peak(disk_path / f"{megabytes}.txt", disk_path / f"{megabytes}", *given))
        (disk_path / f"{megabytes}.txt").unlink()
    print(peaks)
    assert max(peaks) < LIMIT
    assert peaks[1] < 1.25 * peaks[0] + 30_000_000


def test_a_document_of_60_mib_stays_under_the_limit(disk_path):
    source = disk_path / "one.txt"
    line = re.sub(rb"\n\n+", b"\n", WORDS).strip() + b"\n"
    source.write_bytes((line * (60 * 2**20 // len(line) + 1))[: 60 << 20])
    found = peak(source, disk_path / "out", "--val", "0")
    print(found)
    assert found < LIMIT


def test_many_small_documents_in_one_compressed_file_stay_under_the_limit(disk_path):
    """A compressed file is one part, however many documents it holds."""
    import gzip

    source = disk_path / "lines.txt.gz"
    with gzip.open(source, "wb", compresslevel=1) as file:
        for start in range(0, 1_500_000, 100_000):
            file.write(b"".join(b"%d\n" % number for number in range(start, start + 100_000)))
    found = peak(source, disk_path / "out", "--tokenizer", "bytes", "--document", "line", "--val", "0.001")
    print(found)
    assert found < 450_000_000


@pytest.mark.soak
def test_a_long_document_on_the_slow_engine_stays_under_the_limit(disk_path):
    """Hugging Face's engine needs 140 bytes for every byte that it is given at once: 3.4 GB for this document."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.normalizer, backend.pre_tokenizer = normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([WORDS.decode()], trainer)
    backend.save(str(disk_path / "tokenizer.json"))
    source, size = disk_path / "one.txt", int(os.environ.get("MILLRACE_LONG", 24)) << 20
    line = re.sub(rb"\n\n+", b"\n", WORDS).strip() + b"\n"
    source.write_bytes((line * (size // len(line) + 1))[:size])
    found = peak(source, disk_path / "out", "--val", "0", "--tokenizer", str(disk_path / "tokenizer.json"))
    print(found)
    assert found < LIMIT


def chinese(size):
    """One word of ``size`` bytes, in which characters occur as unevenly as in a text."""
    numbers = np.minimum((np.random.default_rng(1).pareto(1.0, size // 3) * 20).astype(np.int64), 5000)
    return (0x4E00 + numbers).astype("<u4").tobytes().decode("utf-32-le").encode()


LONG = {  # bytes of a document, the ending of its file, options
    "one word": (chinese, "txt", ()),
    "spaces": (lambda size: b" " * size, "py", ("--no-normalize",)),
    "short lines": (lambda size: b"ab\n" * (size // 3), "md", ()),
    "short words": (lambda size: b"ab " * (size // 3), "md", ("--dedup", "near")),
    "a vocabulary": (lambda size: (WORDS * (size // len(WORDS) + 1))[:size], "md", ("--tokenizer", "train:500")),
}


LONGEST = ("one word", "short words", "spaces")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.soak) if kind in LONGEST else kind for kind in LONG]
)
def test_memory_is_a_few_times_the_size_of_a_document(disk_path, kind):
    """8 MiB more of it cost 30 to 80 bytes of memory for every byte where all of it was looked at together."""
    content, ending, arguments = LONG[kind]
    peaks = []
    for megabytes in (2, 10):
        source = disk_path / f"{megabytes}.{ending}"
        source.write_bytes(content(megabytes << 20))
        peaks.append(peak(source, disk_path / f"{megabytes}", "--val", "0", "--workers", "1", *arguments))
    print(peaks)
    assert peaks[1] - peaks[0] < 10 * (8 << 20)


def test_rows_of_few_long_values_stop_in_bounded_memory(disk_path, capfd):
    """A file of 400 bytes of which the rows are 20 GB."""
    import pyarrow
    from pyarrow import parquet

    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 20_000, pyarrow.int32()), pyarrow.array(["x" * 1_000_000])
    )
    parquet.write_table(
        pyarrow.table({"text": column}), disk_path / "a.parquet", compression="zstd", store_schema=False,
        dictionary_pagesize_limit=1 << 24,
    )  # fmt: skip
    assert (disk_path / "a.parquet").stat().st_size < 1000
    found = peak(disk_path / "a.parquet", disk_path / "out", "--tokenizer", "bytes", expected=1)
    print(found)
    assert found < 300_000_000
    assert "row group 0: it expands to more than 1,073,741,824 bytes" in capfd.readouterr().err.replace("\n", " ")
