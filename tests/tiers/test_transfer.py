"""push, pull and stage against real servers: whole or not at all, resumable, checked, and without secrets in errors."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import fsspec
import numpy as np
import pytest

import millrace as mr
from millrace.cli import run as millrace
from millrace.errors import MillraceError, StoreWriteFailed
from millrace.store.remote import connect, objects
from millrace.store.remote import pull as pulling
from millrace.store.verify import verify_store
from millrace.testing import tiny_records, tiny_series, tiny_text

from .conftest import KEY, SECRET

TINY = {"records": tiny_records, "series": tiny_series, "text": tiny_text}


def large(path, megabytes=10):
    """A store whose one shard has several blocks of 4 MiB."""
    with mr.StoreWriter(path, kind="records", columns={"x": mr.Column("uint8")}) as writer:
        writer.append({"x": np.arange(megabytes << 20, dtype=np.uint32).astype(np.uint8)})
    return mr.open_store(path)


def same_files(a, b):
    names = sorted(path.relative_to(a).as_posix() for path in Path(a).rglob("*") if path.is_file())
    others = sorted(path.relative_to(b).as_posix() for path in Path(b).rglob("*") if path.is_file())
    assert names == others
    assert filecmp.cmpfiles(a, b, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("kind", TINY)
def test_what_is_pushed_and_pulled_is_the_same_store(tmp_path, s3, proxy, kind):
    store = TINY[kind](tmp_path / "store")
    sent = mr.push(tmp_path / "store", s3)
    assert sent.sent_files == sent.files == store.num_shards * len(store.layout.files)
    puts = [path.removeprefix(f"/{s3[5:]}/") for method, path in proxy.requests if method == "PUT"]
    beside = {
        f"snapshots/{store.fingerprint}.json",
        "tokenizer.json",
        "provenance.json",
    }  # no other push has written those
    assert set(puts[puts.index("store.json") + 1 :]) <= beside
    assert not beside & set(puts[: puts.index("store.json")])
    got = mr.pull(s3, tmp_path / "copy")
    assert (got.fingerprint, got.bytes) == (store.fingerprint, store.num_bytes)
    same_files(tmp_path / "store", tmp_path / "copy")
    assert verify_store(tmp_path / "copy").damage == []
    before = len(proxy.requests)
    assert mr.push(tmp_path / "store", s3).files == mr.pull(s3, tmp_path / "copy").files == 0
    assert not [request for request in proxy.requests[before:] if request[0] not in ("GET", "HEAD")]


def test_an_interrupted_push_sends_only_the_rest_and_is_no_store_before(tmp_path, s3, proxy):
    tiny_text(tmp_path / "store")
    puts = []

    def fails_after_three(method, path):
        puts.append(path) if method == "PUT" and "/shards/" in path else None
        return 403 if len(puts) > 3 and path == puts[-1] else None

    proxy.fault = fails_after_three
    with pytest.raises(MillraceError, match="403"):
        mr.push(tmp_path / "store", s3, workers=1)
    with pytest.raises(MillraceError, match="is not there"):
        mr.pull(s3, tmp_path / "copy")
    proxy.fault = lambda method, path: None
    report = mr.push(tmp_path / "store", s3)
    assert report.files - report.sent_files == 3
    mr.pull(s3, tmp_path / "copy")
    same_files(tmp_path / "store", tmp_path / "copy")


def test_another_store_at_the_url_is_refused_and_a_grown_one_is_not(tmp_path, s3, proxy):
    tiny_records(tmp_path / "other")
    with mr.StoreWriter(tmp_path / "a", kind="records", columns={"x": mr.Column("int64")}) as writer:
        writer.append({"x": np.arange(5)})
    mr.push(tmp_path / "a", s3)
    with pytest.raises(mr.ConfigError, match="holds another store"):
        mr.push(tmp_path / "other", s3)
    with mr.StoreWriter(tmp_path / "a", append=True) as writer:
        writer.append({"x": np.arange(7)})
    report = mr.push(tmp_path / "a", s3)
    assert report.files - report.sent_files == 2  # those of the first snapshot
    mr.pull(s3, tmp_path / "copy")
    assert mr.open_store(tmp_path / "copy").fingerprint == mr.open_store(tmp_path / "a").fingerprint


UNHASHED = ("provenance.json",)


@pytest.mark.parametrize("fault", [500, 503, "reset", "short", "flip"])
def test_faults_that_pass_are_overcome(tmp_path, s3, proxy, fault):
    """Each object fails twice; nothing wrong is kept."""
    large(tmp_path / "store")
    counts = {}

    def twice(method, path):
        counts[method, path] = counts.get((method, path), 0) + 1
        is_wanted = fault != "flip" or not path.endswith(UNHASHED)
        return (
            fault if counts[method, path] <= 2 and is_wanted and (method == "GET" or isinstance(fault, int)) else None
        )

    proxy.fault = twice
    mr.push(tmp_path / "store", s3)
    mr.pull(s3, tmp_path / "copy")
    same_files(tmp_path / "store", tmp_path / "copy")
    assert max(counts.values()) >= 3


@pytest.mark.parametrize("fault", [503, "reset", "short", "flip"])
def test_faults_that_stay_are_errors_that_name_the_object_and_leave_nothing(tmp_path, s3, proxy, fault, monkeypatch):
    tiny_series(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    proxy.fault = lambda method, path: fault if "/shards/" in path and path.endswith(".f32") else None
    with pytest.raises(MillraceError, match=r"prices/shards/.*f32") as caught:
        mr.pull(s3, tmp_path / "copy")
    assert isinstance(caught.value, mr.StoreCorrupt) == (fault == "flip")
    assert "attempt" in str(caught.value) or fault == "flip"
    assert not (tmp_path / "copy").exists()
    proxy.fault = lambda method, path: None
    shutil.copytree(tmp_path / "store" / "shards", tmp_path / "copy.partial" / "shards", dirs_exist_ok=True)
    changed = next((tmp_path / "copy.partial").rglob("*.f32"))
    os.chmod(changed, 0o644)
    changed.write_bytes(bytes(changed.stat().st_size))  # what is there with the right size is read again
    assert mr.pull(s3, tmp_path / "copy").sent_files == 1
    same_files(tmp_path / "store", tmp_path / "copy")
    assert not (tmp_path / "copy.partial").exists()


def test_a_pull_goes_on_where_the_last_block_was_right(tmp_path, s3, proxy, monkeypatch):
    """Three times half of the rest comes. That is progress, so the attempts are counted afresh."""
    large(tmp_path / "store", 40)
    mr.push(tmp_path / "store", s3)
    gets, starts, answer = [], [], objects.Objects.stream

    def breaks_off(method, path):
        gets.append(path) if path.endswith("x.u8") and method == "GET" else None
        return "short" if path.endswith("x.u8") and len(gets) <= 3 else None

    def note(self, name, start=0):
        starts.append(start >> 20) if name.endswith("x.u8") else None
        return answer(self, name, start)

    proxy.fault = breaks_off
    monkeypatch.setattr(objects, "ATTEMPTS", 2)
    monkeypatch.setattr(objects.Objects, "stream", note)
    mr.pull(s3, tmp_path / "copy")
    assert starts[0] == 0
    assert len(starts) == len(set(starts)) == 4
    assert starts == sorted(starts)
    assert all(start % 4 == 0 for start in starts)
    same_files(tmp_path / "store", tmp_path / "copy")


def test_http_with_and_without_ranges(tmp_path, web):
    folder, url, proxy = web
    large(folder / "store")
    gets = []

    def once(method, path):
        gets.append(path) if path.endswith("x.u8") else None
        return "short" if len(gets) == 1 else None

    proxy.fault = once
    mr.pull(f"{url}/store", tmp_path / "copy")
    same_files(folder / "store", tmp_path / "copy")
    with pytest.raises(mr.ConfigError, match="only be read"):
        mr.push(folder / "store", f"{url}/other")


@pytest.mark.parametrize("status", [401, 403])
def test_no_secret_appears_in_an_error(tmp_path, s3, proxy, status, capfd):
    tiny_series(tmp_path / "store")
    proxy.fault = lambda method, path: status
    assert millrace(["push", str(tmp_path / "store"), s3]) == 1
    assert millrace(["pull", s3, str(tmp_path / "copy")]) == 1
    with pytest.raises(MillraceError) as caught:
        mr.pull(s3, tmp_path / "copy")
    shown = (
        "".join(capfd.readouterr()) + repr(caught.value.__cause__) + repr(caught.value.__context__) + str(caught.value)
    )
    assert str(status) in shown
    assert "credentials" in shown
    assert KEY not in shown
    assert SECRET not in shown
    proxy.fault = lambda method, path: None
    mr.push(tmp_path / "store", s3)
    mr.pull(s3, tmp_path / "copy")
    assert not [
        path for path in (tmp_path / "copy").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    with pytest.raises(mr.ConfigError, match="secret") as caught:
        mr.pull(f"s3://{KEY}:{SECRET}@bucket/x", tmp_path / "other")
    assert SECRET not in str(caught.value)


def test_kill_9_in_the_middle_of_a_pull(tmp_path, s3, proxy):
    """What is there after it is no store; the next pull keeps what is whole and finishes."""
    large(tmp_path / "store", 40)
    mr.push(tmp_path / "store", s3)
    program = "import sys, millrace; millrace.pull(sys.argv[1], sys.argv[2])"
    child = subprocess.Popen([sys.executable, "-c", program, s3, str(tmp_path / "copy")])

    def killed(method, path):
        if path.endswith("x.u8"):
            child.kill()
            child.wait()
        return

    proxy.fault = killed
    assert child.wait(60) == -9
    assert not (tmp_path / "copy").exists()
    assert (tmp_path / "copy.partial").exists()
    proxy.fault = lambda method, path: None
    mr.pull(s3, tmp_path / "copy")
    same_files(tmp_path / "store", tmp_path / "copy")
    assert not (tmp_path / "copy.partial").exists()


def test_stage_copies_once_and_notices_a_changed_source(tmp_path, capsys):
    store = tiny_series(tmp_path / "store")
    command = ["stage", str(tmp_path / "store"), "--to", str(tmp_path / "fast" / "copy")]
    assert millrace([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sent_bytes"] == store.num_bytes
    same_files(tmp_path / "store", tmp_path / "fast" / "copy")
    assert millrace(command) == 0
    assert "holds this store already" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "store")
    tiny_records(tmp_path / "store")
    assert millrace(command) == 1
    assert "holds another store" in capsys.readouterr().err


@pytest.mark.parametrize("copy", [mr.pull, mr.push], ids=["pull", "push"])
def test_an_unfinished_store_of_another_command_stays(tmp_path, copy):
    """What it has written is not there a second time."""
    tiny_records(tmp_path / "store")
    writer = mr.StoreWriter(tmp_path / "copy", columns={"x": mr.Column("int64")})
    with writer.shard(0) as shard:
        shard.write({"x": np.arange(5)}, {"rows": np.array([0, 5])})
        writer.add(shard.finish())
    writer._partial._lock.release()  # as a kill does
    files = {path: path.stat().st_ino for path in (tmp_path / "copy.partial" / "shards").rglob("*")}
    assert len(files) == 3
    with pytest.raises(mr.ConfigError, match=r"copy\.partial is an unfinished store of another command; finish that"):
        copy(tmp_path / "store", tmp_path / "copy")
    assert {path: path.stat().st_ino for path in files} == files


LATE = """
import sys, threading
from millrace.store.remote.objects import Objects

def read():
    threading.main_thread().join()
    try:
        print(len(there.read("large", 1 << 30)), "bytes")
    except Exception as error:
        print(error)

there = Objects(sys.argv[1])
threading.Thread(target=read).start()
"""


def test_what_nobody_waits_for_is_not_asked_for_again(s3, proxy):
    """After Ctrl-C, or where the main thread has ended."""
    for start in (0, 1):  # the whole, and a range
        there = objects.Objects(s3)
        there.put("large", bytes(3 * objects.CHUNK_BYTES))
        stream = there.stream("large", start)
        next(stream)
        there.is_given_up = True
        with pytest.raises(mr.StoreUnreachable, match="given up, since the program ends"):
            next(stream)
    proxy.fault = lambda method, path: 503
    before = len(proxy.requests)
    with pytest.raises(mr.StoreUnreachable, match="given up, since the program ends"):
        there.read("large", 1 << 30)
    assert len(proxy.requests) - before == 1
    found = subprocess.run([sys.executable, "-c", LATE, s3], capture_output=True, text=True, timeout=100)
    assert "large: given up, since the program ends" in found.stdout
    assert len(proxy.requests) - before == 2


@pytest.mark.parametrize(
    "command", ["push {} copy", "stage {} --to copy", "pull {} copy", "stage {} --to copy --compress lz4"]
)
@pytest.mark.parametrize("name", ["train.bin", "."])
def test_the_layout_of_another_tool_is_named(tmp_path, monkeypatch, capsys, command, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign").mkdir()
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "foreign" / "train.bin")
    assert millrace(command.format(f"foreign/{name}").split()) == 1
    assert "is in the layout of another tool (" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["foreign"]


def test_a_disk_without_space_is_refused_before_anything_is_copied(tmp_path, monkeypatch):
    store = large(tmp_path / "store")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: usage._replace(free=store.num_bytes - 1))
    with pytest.raises(StoreWriteFailed, match="bytes free"):
        mr.pull(tmp_path / "store", tmp_path / "copy")
    assert not [path for path in tmp_path.rglob("*.u8") if "copy" in str(path)]


def test_a_damaged_file_is_not_pushed(tmp_path):
    tiny_series(tmp_path / "store")
    victim = next((tmp_path / "store").rglob("values.f32"))
    os.chmod(victim, 0o644)
    victim.write_bytes(bytes(victim.stat().st_size))
    with pytest.raises(mr.StoreCorrupt, match=r"values\.f32"):
        mr.push(tmp_path / "store", f"file://{tmp_path}/target")
    assert not (tmp_path / "target" / "store.json").exists()


@pytest.mark.parametrize(
    "url", ["s3://AKIA:{0}/x@bucket/a", "https://me:{0}@host/a.csv", "https://host/a.csv?X-Amz-Signature={0}"]
)
@pytest.mark.parametrize(
    "command",
    ["info {}", "prepare text {} --out b", "prepare text a.txt --out {}", "prepare text a.txt --out {} --append",
     "train nano --input {}", "stage a --to {}", "pull a {}", "verify {}", "gc {}", "push a {}", "watch {}"],
)  # fmt: skip
def test_no_secret_of_a_url_appears_anywhere(tmp_path, monkeypatch, capfd, url, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text\n")
    tiny_series(tmp_path / "a")
    assert millrace(command.format(url.format("hunter2")).split()) == 1
    shown = capfd.readouterr()
    assert shown.err.startswith("error: ")
    assert "hunter2" not in shown.err + shown.out
    assert not [path for path in tmp_path.rglob("*") if "hunter2" in str(path)]


@pytest.mark.parametrize(
    "command", ["stage {a} --to {url}", "pull {a} {url}", "push {url} {url}2", "verify {url}", "gc {url}"]
)
def test_a_url_where_a_path_is_needed_is_refused_and_makes_no_folder(tmp_path, s3, monkeypatch, capsys, command):
    tiny_series(tmp_path / "a")
    mr.push(tmp_path / "a", s3)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert millrace(command.format(a="a", url=s3).split()) == 1
    shown = capsys.readouterr()
    assert f"{s3} is a URL" in shown.err
    assert not shown.out
    assert not (tmp_path / "s3:").exists()
    with pytest.raises(mr.ConfigError, match="is a URL"):
        mr.StoreWriter(s3, columns={"x": mr.Column("int64")})


def test_answers_that_are_lost_do_not_count_as_another_push(tmp_path, s3, proxy):
    """What the server did is asked for: a second attempt finds what the first one wrote."""
    with mr.StoreWriter(tmp_path / "a", columns={"x": mr.Column("int64")}) as writer:
        writer.append({"x": np.arange(5)})
    for rows in (7, 0):
        counts = {}

        def once(method, path, counts=counts):
            counts[method, path] = counts.get((method, path), 0) + 1
            return "lost" if method in ("PUT", "POST") and counts[method, path] == 1 else None

        proxy.fault = once
        mr.push(tmp_path / "a", s3)
        assert max(counts.values()) >= 2
        assert mr.open_store(s3).fingerprint == mr.open_store(tmp_path / "a").fingerprint
        if rows:
            with mr.StoreWriter(tmp_path / "a", append=True) as writer:
                writer.append({"x": np.arange(rows)})


def test_a_slow_line_may_take_its_time_for_what_it_sends(s3, monkeypatch):
    """A server is silent until it has all of an object: that is no failure."""
    monkeypatch.setattr(connect, "READS", {"read_timeout": "1ms", "timeout": "24h"})
    for data in (bytes(100_000), lambda: iter([bytes(100_000)])):
        objects.Objects(s3).put("large", data)


INTERRUPTED = """
import os, signal, sys, threading, types
from millrace.store.remote import calls
from millrace.store.remote.transfer import in_threads
calls.GRACE_S = 0.01
signal.signal(signal.SIGINT, signal.default_int_handler)  # where it was ignored from the start
ends = threading.Event()

def silent(item=None):  # as a server is that never answers; Ctrl-C comes meanwhile
    os.kill(os.getpid(), signal.SIGINT)
    return ends.wait(60)

objects = types.SimpleNamespace(is_given_up=False)
for ask in (lambda: calls.interruptible(silent), lambda: in_threads(silent, [1], 2, objects)):
    try:
        ask()
    except KeyboardInterrupt:
        print("interrupted", ends.is_set())
ends.set()
print(objects.is_given_up)
"""


def test_ctrl_c_does_not_wait_for_a_silent_server():
    found = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=100)
    assert found.stdout.split("\n")[:3] == ["interrupted False", "interrupted False", "True"], found.stderr


def test_a_server_that_never_answers_is_an_error(s3, proxy, monkeypatch):
    monkeypatch.setattr(connect, "READS", {"read_timeout": "50ms", "timeout": "24h"})
    ends = threading.Event()
    proxy.fault = lambda method, path: ends.wait
    try:
        with pytest.raises(mr.StoreUnreachable, match=r"store\.json: the server did not answer in time \(attempt 8\)"):
            mr.open_store(s3)
        monkeypatch.setattr(objects, "PATIENCE_S", 0.0)
        with pytest.raises(mr.StoreUnreachable, match=r"did not answer in time; check the server"):
            mr.open_store(s3)
    finally:
        ends.set()


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_a_storage_that_only_fsspec_knows(tmp_path, monkeypatch, compress):
    """Its memory, for one; the calls are the same for sftp:// and hdfs://."""
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(type(files), "store", {})
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    url, store = "memory://somewhere/prices", tiny_series(tmp_path / "a")
    assert mr.push(tmp_path / "a", url, compress=compress).sent_files == mr.push(tmp_path / "a", f"{url}2").sent_files
    assert mr.push(tmp_path / "a", url, compress=compress).files == 0
    assert not [name for name in files.find("/somewhere") if name.endswith(".tmp") or "/pushes/" in name]
    remote = mr.open_store(url)
    for name, column in store.columns.items():
        assert np.array_equal(np.asarray(remote.columns[name][:]), np.asarray(column[:]))
    mr.pull(url, tmp_path / "copy")
    same_files(tmp_path / "a", tmp_path / "copy")
    tiny_text(tmp_path / "b")
    with pytest.raises(mr.ConfigError, match="holds another store"):
        mr.push(tmp_path / "b", url)
    files.pipe("/sources/a.txt", b"some text\n")
    report = mr.prepare_text(["memory://sources"], out="memory://somewhere/text", tokenizer="bytes", val=0)
    assert mr.open_store("memory://somewhere/text").num_rows == report.tokens["train"]


def test_an_fsspec_storage_that_fails_is_named_without_secrets(tmp_path, monkeypatch):
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(objects, "FIRST_WAIT_S", 0.001)

    def fails(*arguments, **options):
        raise RuntimeError("login with hunter2 failed")

    with pytest.raises(mr.StoreNotFound, match="push a store there"):
        mr.open_store("memory://nowhere")
    monkeypatch.setattr(type(files), "info", fails)
    with pytest.raises(mr.StoreUnreachable, match=r"store\.json: .*attempt 8") as caught:
        mr.open_store("memory://nowhere")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    for url in ("unheard-of://a/b", "memory://me:hunter2@a/b"):
        with pytest.raises(mr.ConfigError, match=r"fsspec knows|may be secret") as refused:
            mr.open_store(url)
        assert "hunter2" not in str(refused.value)


def test_a_missing_bucket_and_an_address_without_tls_are_named(tmp_path, s3, monkeypatch):
    tiny_series(tmp_path / "a")
    for attempt in (lambda url: mr.push(tmp_path / "a", url), mr.open_store, lambda url: mr.pull(url, tmp_path / "b")):
        with pytest.raises(mr.StoreError, match=r"^s3://no-such-bucket is not there; make the bucket first"):
            attempt("s3://no-such-bucket/prices")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(mr.ConfigError, match=r"AWS_ENDPOINT_URL is an http:// address.*AWS_ALLOW_HTTP=true"):
        mr.open_store(s3)


@pytest.mark.parametrize("kind", TINY)
def test_another_s3_server_gives_the_same(tmp_path, rclone, kind):
    store = TINY[kind](tmp_path / "store")
    assert mr.push(tmp_path / "store", rclone).sent_files == store.num_shards * len(store.layout.files)
    assert mr.push(tmp_path / "store", rclone).files == 0
    mr.pull(rclone, tmp_path / "copy")
    same_files(tmp_path / "store", tmp_path / "copy")
    remote = mr.open_store(rclone, cache_dir=tmp_path / "cache")
    for name, column in store.columns.items():
        assert np.array_equal(np.asarray(remote.columns[name][:]), np.asarray(column[:]))
