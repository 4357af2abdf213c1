"""Servers and URLs as nobody wants them: a limit or a refusal that names the object, never a traceback or an endless wait."""

import functools
import http.client
import http.server
import threading

import pytest

import millrace as mr
from millrace.cli import run as millrace
from millrace.store.ownership import split_url
from millrace.store.remote import objects
from millrace.store.remote.objects import Objects
from millrace.testing import tiny_series

from .conftest import Ranged, serving


class Answer(http.server.BaseHTTPRequestHandler):
    """``server.answer(handler)`` answers every GET; ``server.seen`` holds path and headers of each."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.server.seen.append((self.path, dict(self.headers)))
        self.server.answer(self)

    def head(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(objects, "FIRST_WAIT_S", 0.001)
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    made.seen, made.daemon_threads, made.handle_error = [], True, lambda *arguments: None
    made.url = f"http://127.0.0.1:{made.server_address[1]}"
    yield from serving(made)


def test_a_server_that_dribbles_is_an_error(server, monkeypatch):
    """A thousand bytes for each half of a second, by a clock that goes on when they are asked for."""
    pieces, calls = [], [0]  # of each attempt

    def clock():
        calls[0] += 1
        if calls[0] % 2:  # the first of each two calls begins to wait
            pieces[-1].release()
        return calls[0] // 2 * 0.5

    def dribble(handler):
        for other in pieces:  # its client has gone
            other.release(1000)
        own = threading.Semaphore(0)
        pieces.append(own)
        handler.head(200, Content_Length=10**6, Last_Modified="Thu, 19 Nov 2026 10:00:00 GMT")
        while own.acquire(timeout=60):
            handler.wfile.write(bytes(1000))
            handler.wfile.flush()

    server.answer = dribble
    monkeypatch.setattr(objects, "now", clock)
    monkeypatch.setattr(objects, "CHUNK_BYTES", 1000)
    with pytest.raises(
        mr.StoreUnreachable, match=r"a/store\.json: the server sends [12],\d{3} bytes a second; .*attempt 3"
    ):
        Objects(f"{server.url}/a").read("store.json", 1 << 30)
    assert len(server.seen) == 3


def test_a_slow_moment_is_no_error(server, monkeypatch):
    """Each attempt that is too slow begins again; what came in time counts."""
    body = bytes(100_000)

    def once_slow(handler):
        handler.head(200, Content_Length=len(body), Last_Modified="Thu, 19 Nov 2026 10:00:00 GMT")
        handler.wfile.write(body)

    server.answer = once_slow
    times = iter([0.0, 100.0])
    monkeypatch.setattr(objects, "now", lambda: next(times, 100.0))
    assert Objects(f"{server.url}/a").read("store.json", 1 << 30) == body
    assert len(server.seen) == 2


def test_redirects_end_and_take_no_credentials_along(tmp_path, s3, server, monkeypatch):
    """To another host, as hubs do; what comes is compared with the hashes of the store."""
    tiny_series(tmp_path / "store")
    seen = []

    class Other(Ranged):
        def do_GET(self):  # noqa: N802
            seen.append({name.lower() for name in self.headers})
            super().do_GET()

    other = http.server.ThreadingHTTPServer(
        ("127.0.0.2", 0), functools.partial(Other, directory=str(tmp_path / "store"))
    )

    def to_other(handler):
        name = handler.path.split("/prices/")[1]
        handler.head(307, Location=f"http://127.0.0.2:{other.server_address[1]}/{name}", Content_Length=0)

    server.answer = to_other
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    for _ in serving(other):
        assert mr.pull(s3, tmp_path / "copy").fingerprint == mr.open_store(tmp_path / "store").fingerprint
    assert all("authorization" in {name.lower() for name in headers} for _, headers in server.seen)
    assert seen
    assert not any("authorization" in headers for headers in seen)
    server.answer = lambda handler: handler.head(307, Location=f"{server.url}{handler.path}", Content_Length=0)
    with pytest.raises(mr.StoreUnreachable, match=r"store\.json: the server redirects again and again"):
        mr.open_store(s3)


@pytest.mark.parametrize("key", ["in/a/../b.txt", "in/..", "in/a//b.txt", "in/./b.txt"])
def test_an_object_whose_name_is_no_path_is_named(tmp_path, s3, s3_port, key, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bucket = s3.split("/")[2]
    for name in ("in/ok.txt", key):
        connection = http.client.HTTPConnection("127.0.0.1", s3_port)
        connection.request("PUT", f"/{bucket}/{name.replace('..', '%2E%2E')}", b"text\n")
        assert connection.getresponse().status == 200
        connection.close()
    assert millrace(["prepare", "text", f"s3://{bucket}/in", "--out", "b", "--tokenizer", "bytes"]) == 1
    error = capsys.readouterr().err
    assert f"holds an object named {key!r}, which is no path" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "b").exists()


URLS = [
    "s3://[x", "http://[::1", "file://[x", "gs://[x/y", "s3://b/../x", "s3://b//x", "s3://b/./x", "://x", "s3://b/x\x07y",
    "file:///tmp/../x", "memory://[x",
]  # fmt: skip
COMMANDS = [
    "info {}", "push a {}", "pull {} c", "stage {} --to c", "prepare text {} --out b", "prepare text a.txt --out {}",
    "watch {}", "worker {} --run r", "verify {}",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_url_is_refused_in_one_line(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text\n")
    tiny_series(tmp_path / "a")
    for url in URLS if command in COMMANDS[:3] else URLS[:3:2]:
        assert millrace([word.format(url) for word in command.split()]) == 1, url
        error = capsys.readouterr().err
        assert error.startswith("error: "), url
        assert error.count("\n") == 1, url


def test_a_good_url_has_its_parts():
    for url in ("s3://bucket", "s3://bucket/a/b/", "https://host:80/a.csv", "file:///tmp/x", "sftp://me@host/a"):
        assert split_url(url).scheme == url.split(":")[0]
