"""Preparing a table, end to end, against what people write by hand with the usual tools.

    python -m benchmarks.prepare_table [--rows 8000000] [--files 200] [--rounds 5]

Rows of 16 float32 features, 5 entities to a file, in tmpfs; two processes or two threads everywhere. Every contestant
reads all files, fits mean and deviation of each feature over all rows, and writes the scaled rows as float32. All run in
one process that has every library loaded, so that no start is counted. Only millrace also separates entities, hashes what
it writes and calls fsync, which costs nothing in tmpfs. Needs pandas, scikit-learn, polars and
duckdb, which `make bench` installs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import interleave, medians, save, verdict

FEATURES = [f"f{k}" for k in range(16)]
WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        make_table(folder / "table", options.rows, options.files)
        files = sorted((folder / "table").glob("*.parquet"))
        out = folder / "out.f32"

        def rate(work: Callable[[list[Path], Path], Any]) -> Callable[[], float]:
            def measure() -> float:
                seconds = timed(lambda: work(files, out))
                out.unlink(missing_ok=True)
                shutil.rmtree(out.with_name("store"), ignore_errors=True)
                return options.rows / seconds / 1e6

            return measure

        contestants = {
            "millrace": rate(ours),
            "decode once and write": rate(decode_and_write),
            "pyarrow, two passes, pwrite": rate(pyarrow_twice),
            "polars": rate(polars_twice),
            "duckdb": rate(duckdb_twice),
            "pandas and scikit-learn": rate(pandas_twice),
        }
        for measure in contestants.values():
            measure()  # once unmeasured: imports, and memory that the machine has to find first
        found = medians(rounds := interleave(contestants, options.rounds))
        for name, value in found.items():
            print(f"  {name}: {value:.2f} M rows/s")
        mine, rest = found["millrace"], [found[name] for name in ("pyarrow, two passes, pwrite", "polars", "duckdb")]
        promises = [
            verdict("times pandas and scikit-learn", mine / found["pandas and scikit-learn"], 3),
            verdict("times the best of pyarrow, polars, duckdb", mine / max(rest), 1.2),
            verdict(
                "time, as a multiple of decoding once and writing",
                found["decode once and write"] / mine,
                1.5,
                at_least=False,
            ),
        ]
        save(
            "prepare_table",
            {
                "rows": options.rows,
                "files": options.files,
                "m_rows_per_s": found,
                "rounds": rounds,
                "promises": promises,
            },
        )
    finally:
        shutil.rmtree(folder)


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def make_table(folder: Path, rows: int, files: int, entities: int = 5) -> None:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    rng = np.random.default_rng(0)
    each = rows // files // entities
    times = np.datetime64("2015-01-01", "us") + np.arange(each) * np.timedelta64(60, "s")
    for number in range(files):
        names = [f"E{number * entities + k:06d}" for k in range(entities)]
        columns: dict[str, Any] = {"entity": np.repeat(names, each), "time": np.tile(times, entities)}
        for k, name in enumerate(FEATURES):
            columns[name] = (rng.standard_normal(each * entities) * 3 + k).astype(np.float32)
        parquet.write_table(pyarrow.table(columns), folder / f"part-{number:04d}.parquet")


def ours(files: list[Path], out: Path) -> None:
    import millrace

    store = out.with_name("store")
    millrace.prepare_table(str(files[0].parent), store, entity="entity", time="time", workers=WORKERS)


def decode_and_write(files: list[Path], out: Path) -> None:
    """What cannot be avoided: every file decoded once, the same bytes written, no statistics."""
    from pyarrow import parquet

    offsets = _offsets(files)

    def one(number: int) -> None:
        table = parquet.read_table(files[number], columns=[*FEATURES, "time", "entity"], use_threads=False)
        _pwrite(out, offsets[number], _matrix([table[name].to_numpy() for name in FEATURES]), table["time"].to_numpy())

    _in_threads(one, len(files), out)


def pyarrow_twice(files: list[Path], out: Path) -> None:
    from pyarrow import parquet

    offsets = _offsets(files)

    def read(number: int) -> tuple[list[Any], Any]:
        table = parquet.read_table(files[number], columns=[*FEATURES, "time"], use_threads=False)
        return [table[name].to_numpy() for name in FEATURES], table["time"].to_numpy()

    with ThreadPoolExecutor(WORKERS) as pool:
        sums = list(pool.map(lambda k: _sums(read(k)[0]), range(len(files))))
    mean, std = _mean_std(sums)

    def one(number: int) -> None:
        columns, times = read(number)
        _pwrite(out, offsets[number], _matrix([(c - m) / s for c, m, s in zip(columns, mean, std, strict=True)]), times)

    _in_threads(one, len(files), out)


def polars_twice(files: list[Path], out: Path) -> None:
    import polars as pl

    stats = [pl.col(name).cast(pl.Float64).mean().alias(f"{name}_m") for name in FEATURES]
    stats += [pl.col(name).cast(pl.Float64).std(ddof=0).alias(f"{name}_s") for name in FEATURES]
    row = pl.scan_parquet([str(file) for file in files]).select(stats).collect().row(0)
    mean, std = row[: len(FEATURES)], row[len(FEATURES) :]
    offsets = _offsets(files)
    with open(out, "wb") as stream:
        for number, file in enumerate(files):
            scaled = [((pl.col(n) - m) / s).cast(pl.Float32) for n, m, s in zip(FEATURES, mean, std, strict=True)]
            frame = pl.read_parquet(file, columns=[*FEATURES, "time"])
            _pwrite_to(
                stream.fileno(), offsets[number], frame.select(scaled).to_numpy(order="c"), frame["time"].to_numpy()
            )


def duckdb_twice(files: list[Path], out: Path) -> None:
    import duckdb

    connection = duckdb.connect(config={"threads": WORKERS})
    everything = ", ".join(f"avg({n}::double), stddev_pop({n}::double)" for n in FEATURES)
    row = connection.sql(f"select {everything} from read_parquet('{files[0].parent}/*.parquet')").fetchall()[0]
    scaled = ", ".join(f"(({n} - {row[2 * k]!r}) / {row[2 * k + 1]!r})::float as {n}" for k, n in enumerate(FEATURES))
    offsets = _offsets(files)
    with open(out, "wb") as stream:
        for number, file in enumerate(files):
            found = connection.sql(f"select {scaled}, time from read_parquet('{file}')").fetchnumpy()
            _pwrite_to(stream.fileno(), offsets[number], _matrix([found[n] for n in FEATURES]), found["time"])


def pandas_twice(files: list[Path], out: Path) -> None:
    import pandas
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    for file in files:
        scaler.partial_fit(pandas.read_parquet(file, columns=FEATURES).to_numpy(np.float64))
    offsets = _offsets(files)
    with open(out, "wb") as stream:
        for number, file in enumerate(files):
            frame = pandas.read_parquet(file)
            scaled = scaler.transform(frame[FEATURES].to_numpy(np.float64)).astype(np.float32)
            _pwrite_to(stream.fileno(), offsets[number], scaled, frame["time"].to_numpy())


def _offsets(files: list[Path]) -> list[int]:
    from pyarrow import parquet

    rows = [parquet.read_metadata(file).num_rows for file in files]
    return [0, *np.cumsum(np.array(rows) * (4 * len(FEATURES) + 8)).tolist()]


def _matrix(columns: list[Any]) -> Any:
    """Columns side by side, in blocks that stay in cache."""
    matrix = np.empty((len(columns[0]), len(columns)), np.float32)
    for first in range(0, len(matrix), 2048):
        block = matrix[first : first + 2048]
        for k, column in enumerate(columns):
            block[:, k] = column[first : first + 2048]
    return matrix


def _sums(columns: list[Any]) -> Any:
    wide = [column.astype(np.float64) for column in columns]
    return np.array([[len(column), column.mean(), column.var() * len(column)] for column in wide]).T


def _mean_std(sums: list[Any]) -> tuple[Any, Any]:
    count, mean, m2 = sums[0]
    for n, m, q in sums[1:]:
        total, delta = count + n, m - mean
        mean, m2, count = mean + delta * n / total, m2 + q + delta**2 * count * n / total, total
    return mean, np.sqrt(m2 / count)


def _in_threads(work: Callable[[int], None], count: int, out: Path) -> None:
    out.touch()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(count)))


def _pwrite(out: Path, offset: int, matrix: Any, times: Any) -> None:
    fd = os.open(out, os.O_WRONLY)
    try:
        _pwrite_to(fd, offset, matrix, times)
    finally:
        os.close(fd)


def _pwrite_to(fd: int, offset: int, matrix: Any, times: Any) -> None:
    os.pwrite(fd, np.ascontiguousarray(matrix).data, offset)
    os.pwrite(fd, np.ascontiguousarray(times).view(np.int64).data, offset + matrix.nbytes)


if __name__ == "__main__":
    main()
