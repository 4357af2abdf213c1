"""``RUN/metrics.jsonl``: one object per line, steps from 1; ``loss`` on training lines, ``val_loss`` on evaluation lines.

Numbers have full precision, so two runs can be compared bit for bit. On resume the file is cut after the checkpoint's step:
later steps will be done again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from millrace.distribution import install_command
from millrace.errors import ConfigError, StoreCorrupt, TrainError, reason
from millrace.store import platform
from millrace.store.plain_file import open_file
from millrace.store.strict_json import sealed, unsealed
from millrace.train.state import problem_of

NAME = "metrics.jsonl"
LINE_BYTES = 1 << 20  # of one line, which has some hundred


class Board:
    """Writes numbers to ``RUN/tensorboard``. If TensorBoard is missing it does nothing; if it fails it says so once."""

    def __init__(self, run: Path, *, step: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._writer: Any = None
        with self._harmless():
            if importlib.util.find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        with self._harmless():
            for name, value in values.items():
                if self._writer is not None and isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with self._harmless():
            if self._writer is not None:
                self._writer.close()

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
            self._writer = None
            self._say(
                f"note: TensorBoard fails ({reason(error)}), the run goes on without it; install it again, or set "
                "train.tensorboard = false"
            )


class Endpoint:
    """Serves the last of every number to Prometheus, as ``millrace_NAME``; the verdict is a label."""

    def __init__(self, address: str) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError(f"--metrics-port needs prometheus-client; {install_command('report')}") from error
        host, _, port = address.rpartition(":")
        if not port.isascii() or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"--metrics-port {address}; expected a port such as 9100, or host:port such as 0.0.0.0:9100"
            )
        self._gauges: dict[str, Any] = {}
        self._library, self._registry = prometheus_client, prometheus_client.CollectorRegistry()
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                int(port), host.strip("[]") or "127.0.0.1", self._registry
            )
        except OSError as error:
            raise ConfigError(f"--metrics-port {address} cannot be used: {error.strerror}; give another") from error
        self.url = f"http://{host or '127.0.0.1'}:{self._server.server_port}/metrics"

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in {"step": step, **values}.items():
            if isinstance(value, (int, float)):
                self._gauge(name, []).set(value)
        if "verdict" in values:
            gauge = self._gauge("verdict", ["name"])
            gauge.clear()
            gauge.labels(values["verdict"]).set(1)

    def _gauge(self, name: str, labels: list[str]) -> Any:
        if name not in self._gauges:
            about = f"{name} as in metrics.jsonl"
            self._gauges[name] = self._library.Gauge(f"millrace_{name}", about, labels, registry=self._registry)
        return self._gauges[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def boards(
    run: Path, step: int, say: Callable[[str], None], tensorboard: bool, metrics_port: str | None
) -> list[Board | Endpoint]:
    """Where the numbers of a run are shown, besides its file."""
    found: list[Board | Endpoint] = [Board(run, step=step, say=say)] if tensorboard else []
    if metrics_port is not None:
        endpoint = Endpoint(metrics_port)
        say(f"metrics for Prometheus: {endpoint.url}")
        found.append(endpoint)
    return found


class Metrics:
    """Writes the lines of a run, and the same numbers to the boards."""

    def __init__(self, run: Path, *, step: int, boards: Sequence[Board | Endpoint] = ()) -> None:
        self._path, self._boards = run / NAME, boards
        with platform.writing(self._path):
            self.last_evaluation = _cut(self._path, step)
            # Without a buffer: a killed process loses nothing, and a full disk is an error at once.
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        with platform.writing(self._path):
            line: dict[str, Any] = {"step": step, **values}
            if "val_loss" in line:
                line = sealed(line)  # the best checkpoint may be chosen by it
            platform.write(self._file.fileno(), json.dumps(line, allow_nan=False).encode() + b"\n", self._path)
        for board in self._boards:
            board.write(step, values)

    def close(self) -> None:
        self._file.close()
        for board in self._boards:
            board.close()


def _cut(path: Path, step: int) -> tuple[int, float | None]:
    """Cuts the file after the last whole line of a step up to ``step``; returns step and val_loss of the last evaluation."""
    end = 0
    evaluation: tuple[int, float | None] = (0, None)
    is_later = False  # whether lines of later steps have begun, which all are cut
    for line_end, values in _lines(path, until=step):
        if is_later and values["step"] <= step:  # one wrong digit would cut all that follows it
            raise _damaged(path, end, f"a line of step {values['step']} follows one of a later step")
        is_later = values["step"] > step
        if not is_later:
            evaluation = (values["step"], values["val_loss"]) if "val_loss" in values else evaluation
            end = line_end
    if os.path.lexists(path):
        os.truncate(path, end)
    return evaluation


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run."""
    return [values for _, values in _lines(run / NAME)]


def last_saved(run: Path) -> str | None:
    """The checkpoint that a run saved last, by its lines."""
    return max((str(values["checkpoint"]) for _, values in _lines(run / NAME) if "checkpoint" in values), default=None)


def _lines(path: Path, until: float = math.inf) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every whole line with the byte at which it ends; a kill may have left a part of another. No file: no lines.

    What cannot be read ends the lines where a step after ``until`` came before it: a lost machine leaves such an end.
    """
    if not os.path.lexists(path):
        return
    end = step = 0
    try:
        with open_file(str(path), follow=True) as (fd, _), open(fd, "rb", closefd=False) as file:
            while (line := file.readline(LINE_BYTES)).endswith(b"\n"):
                values, _ = unsealed(json.loads(line))
                if type(values["step"]) is not int or type(values.get("val_loss")) not in (int, float, NoneType):
                    raise ValueError("its step or val_loss is no number")
                end, step = end + len(line), values["step"]
                yield end, values
            if len(line) == LINE_BYTES:
                raise ValueError(f"a line of {LINE_BYTES:,} bytes and more")
    except (StoreCorrupt, ValueError, KeyError, TypeError, RecursionError) as error:
        if step <= until:
            raise _damaged(path, end, problem_of(error)) from error


def _damaged(path: Path, end: int, why: str) -> TrainError:
    return TrainError(f"{path} is damaged at byte {end} ({why}); move it away, then run the same command again")
