"""Forecasts of all entities as a CSV or Parquet file, written aside batch by batch, then renamed."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.store import platform
from millrace.train.prediction import Prediction

PARQUET_UNITS = ("s", "ms", "us", "ns")


class PredictionTable:
    """Columns ``entity``, ``time`` and one per target; one row for each step of each entity's horizon."""

    def __init__(self, path: Path, targets: Sequence[str], zone: str | None) -> None:
        taken = {"entity", "time"} & set(targets)
        if taken:
            raise ConfigError(f"target {min(taken)!r} has the name of another column of {path}; use --target")
        self._path, self._aside = path, path.with_name(path.name + ".partial")
        self._targets, self._zone = list(targets), zone
        self.rows = 0
        self._file: Any = None
        self._writer: Any = None

    def write(self, batch: list[Prediction], chosen: list[int]) -> None:
        if self._file is None:
            self._file = open(self._aside, "w", newline="") if self._is_csv else open(self._aside, "wb")  # noqa: SIM115 - close() does
        times = np.concatenate([each.times for each in batch])
        names = [each.entity for each in batch for _ in each.times]
        values = np.concatenate([each.values for each in batch])[:, chosen]
        if self._is_csv:
            self._write_csv(names, times, values)
        else:
            self._write_parquet(names, times, values)
        self.rows += len(names)

    @property
    def _is_csv(self) -> bool:
        return self._path.suffix == ".csv"

    def _write_csv(self, names: list[str], times: Any, values: Any) -> None:
        if self._writer is None:
            self._writer = csv.writer(self._file, lineterminator="\n")
            self._writer.writerow(["entity", "time", *self._targets])
        ending = "Z" if self._zone is not None and times.dtype.kind == "M" else ""
        for name, time, row in zip(names, times.astype(str).tolist(), values.tolist(), strict=True):
            self._writer.writerow([name, time + ending, *("" if math.isnan(value) else repr(value) for value in row)])

    def _write_parquet(self, names: list[str], times: Any, values: Any) -> None:
        import pyarrow
        import pyarrow.parquet

        is_dates = times.dtype.kind == "M"
        if is_dates and np.datetime_data(times.dtype)[0] not in PARQUET_UNITS:
            times = times.astype("datetime64[s]")
        when = pyarrow.array(times)
        if is_dates and self._zone is not None:
            when = when.cast(pyarrow.timestamp(when.type.unit, "UTC"))
        columns = [pyarrow.array(names, pyarrow.string()), when, *(pyarrow.array(column) for column in values.T)]
        table = pyarrow.table(columns, names=["entity", "time", *self._targets])
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(self._file, table.schema)
        self._writer.write_table(table)

    def finish(self) -> None:
        """Gives the finished table its name."""
        self._close()
        platform.rename(self._aside, self._path)

    def discard(self) -> None:
        """Removes what was written."""
        self._close()
        self._aside.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._writer is not None and not self._is_csv:
            self._writer.close()
        if self._file is not None:
            self._file.close()
        self._file = self._writer = None
