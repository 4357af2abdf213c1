"""A page of a run that renews itself while training runs, for one person on this machine.

``millrace watch`` calls ``Watch``. It answers on the loopback address alone, only under a random name, and only with the page:
no file of the run can be asked for, and nothing can be changed.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError, MillraceError
from millrace.report.blocks import Note, Report, Section
from millrace.report.html import POLICY, page
from millrace.report.runs import METRICS, RUN, STARTS, is_run, run_report

HOST = "127.0.0.1"
RENEW_S = 2
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Watch:
    """A server of one page. ``serve`` answers until ``close``, or until it is interrupted."""

    def __init__(self, run: str, *, port: int = 0) -> None:
        if not is_run(run):
            raise ConfigError(f"{run} is not the folder of a training run (it has no {METRICS}); give what --run was")
        self._pages = _Pages(Path(run))
        token = secrets.token_urlsafe(24)
        try:
            self._server = _Server((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port {port} cannot be used ({error}); give another, or none for any free one"
            ) from error
        self._server.pages, self._server.path = self._pages, f"/{token}/"
        self._server.hosts = tuple(f"{name}:{self._server.server_port}" for name in (HOST, "localhost"))
        self.url = f"http://{HOST}:{self._server.server_port}/{token}/"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.server_close()

    def stop(self) -> None:
        """Ends ``serve`` of another thread."""
        self._server.shutdown()


class _Pages:
    """The newest page of a run; made again only when its files have changed."""

    def __init__(self, run: Path) -> None:
        self._run, self._lock = run, threading.Lock()
        self._seen: Any = None
        self._report: Report | None = None
        self._renew_s = RENEW_S

    def newest(self) -> bytes:
        with self._lock:
            seen = [_state(self._run / name) for name in (METRICS, STARTS, RUN)]
            if self._report is None or seen != self._seen:
                start = time.perf_counter()
                self._report, self._seen = self._made(), seen
                # Of a run of a million lines the page takes seconds: it is renewed more rarely, at most a tenth of the time.
                self._renew_s = max(RENEW_S, int(10 * (time.perf_counter() - start)))
            report, renew_s = self._report, self._renew_s
        written = max((state[1] for state in seen if state is not None), default=None)
        age = f" The last line came {max(0, time.time() - written):,.0f} s ago." if written is not None else ""
        now = time.strftime("%H:%M:%S")
        said = f"{report.subtitle}{age} Read at {now}, again every {renew_s} s."
        return page(replace(report, subtitle=said), refresh_s=renew_s).encode()

    def _made(self) -> Report:
        try:
            return run_report(self._run)
        except (MillraceError, OSError) as error:
            return Report(f"{self._run}", "", [Section("The run cannot be read", "", [Note(str(error))])])


def _state(path: Path) -> tuple[int, float] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False
    pages: _Pages
    path: str
    hosts: tuple[str, ...]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # a client that says nothing holds a thread no longer
    server_version, sys_version = "millrace", ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:  # a name of another site that leads here
            self._answer(HTTPStatus.FORBIDDEN, b"wrong host\n")
        elif not hmac.compare_digest(self.path.encode("latin-1", "replace"), self.server.path.encode()):
            self._answer(HTTPStatus.NOT_FOUND, b"not here: take the whole address that millrace watch printed\n")
        else:
            self._answer(HTTPStatus.OK, self.server.pages.newest())

    do_HEAD = do_GET  # noqa: N815 - the name that http.server asks for

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the terminal may be that of the training."""
