"""Real servers: moto's S3, a faulty proxy before it, and plain HTTP with and without ranges."""

from __future__ import annotations

import functools
import http.client
import http.server
import logging
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from pathlib import Path

import pytest

from millrace.store.remote import objects
from millrace.testing.servers import _answers, free_port

KEY, SECRET = "AKIAMILLRACETEST", "s3cr3t/that+must=never+show"


@pytest.fixture(scope="session")
def s3_port():
    """The port of an S3 server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a server, except for what ``fault(method, path)`` says: a status, "reset", "short", "flip",
    "lost" (done, but not answered) or "whole" (no ranges)."""

    daemon_threads = True

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.upstream, self.fault, self.requests, self.lock = port, lambda method, path: None, [], threading.Lock()

    def handle_error(self, request, client_address):
        pass  # clients go away in the middle; that is what is tested

    def gets(self, part):
        return [path for method, path in self.requests if method == "GET" and part in path]


class _Passing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            self.server.requests.append((self.command, self.path))
            fault = self.server.fault(self.command, self.path)
        if isinstance(fault, int):
            self.answer(fault, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        if callable(fault):
            fault()
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        asked = {name: value for name, value in self.headers.items() if fault != "whole" or name.lower() != "range"}
        upstream.request(self.command, self.path, body, asked)
        response = upstream.getresponse()
        data = response.read()
        headers = {
            name: value for name, value in response.getheaders() if name.lower() not in ("connection", "date", "server")
        }
        if fault == "lost":
            self.close_connection = True
            self.connection.shutdown(2)
            return
        if self.command == "HEAD":
            self.answer(response.status, headers, b"", length=headers.get("Content-Length"))
            return
        if fault == "flip" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if fault in ("reset", "short"):
            self.answer(response.status, headers, data[: len(data) // 2], length=len(data))
            self.close_connection = True
            if fault == "reset":
                self.connection.shutdown(2)
            return
        self.answer(response.status, headers, data)

    def answer(self, status, headers, data, length=None):
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on  # noqa: N815


def serving(server):
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def proxy(s3_port):
    yield from serving(Proxy(s3_port))


@pytest.fixture
def s3(proxy, monkeypatch):
    """The URL of a folder in a new bucket, behind the proxy; credentials come from the usual variables."""
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "FIRST_WAIT_S", 0.001)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    made = urllib.request.Request(f"http://127.0.0.1:{proxy.upstream}/{bucket}", method="PUT")
    urllib.request.urlopen(made).close()
    return f"s3://{bucket}/stores/prices"


class Ranged(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, with ranges."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        found, path = (
            re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")),
            Path(self.translate_path(self.path)),
        )
        if not found or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        first, last = int(found[1]), min(int(found[2] or len(data) - 1), len(data) - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(data[first : last + 1])


class Unranged(Ranged):
    do_GET = http.server.SimpleHTTPRequestHandler.do_GET  # noqa: N815


@pytest.fixture(params=[Ranged, Unranged], ids=["ranges", "no ranges"])
def web(request, tmp_path, monkeypatch):
    """A folder and the URL of an HTTP server behind a proxy that serves it."""
    monkeypatch.setattr(objects, "FIRST_WAIT_S", 0.001)
    folder = tmp_path / "web"
    folder.mkdir()
    handler = functools.partial(request.param, directory=str(folder))
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)]
    threading.Thread(target=servers[0].serve_forever, daemon=True).start()
    servers.append(Proxy(servers[0].server_address[1]))
    threading.Thread(target=servers[1].serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{servers[1].server_address[1]}", servers[1]
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def rclone(tmp_path, monkeypatch):
    """The URL of a folder on another S3 server, rclone's."""
    port = free_port()
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    program = os.path.join(os.path.dirname(sys.executable), "rclone")
    command = [
        program,
        "serve",
        "s3",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{KEY},{SECRET}",
        tmp_path / "served",
    ]
    environment = {**os.environ, "HOME": str(tmp_path), "RCLONE_CONFIG": os.devnull}
    server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    while server.poll() is None and not _answers(port):
        time.sleep(0.01)
    yield "s3://bucket/stores/prices"
    server.kill()
    server.wait()
