"""``prepare`` from URLs and to URLs: the same store as on disk, whatever stops it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.cli import main, run
from millrace.errors import ConfigError, SourceError, StoreUnreachable
from millrace.prepare import elsewhere
from millrace.store.remote.objects import Objects
from tests.tiers.conftest import KEY, SECRET


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_sources(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"part-{number}.jsonl").write_text(
            "".join(
                json.dumps({"text": f"document {number} {k}", "time": k, "entity": "ab"[k % 2]}) + "\n"
                for k in range(40)
            )
        )
        lines = [f"2024-01-{k + 1:02},{'ab'[k % 2]}{number},{k * 1.5}" for k in range(28)]
        (folder / f"part-{number}.csv").write_text("time,entity,close\n" + "\n".join(lines) + "\n")


KINDS = {
    "text": (mr.prepare_text, "*.jsonl", {"tokenizer": "bytes"}),
    "table": (mr.prepare_table, "*.csv", {"entity": "entity", "time": "time"}),
    "records": (mr.prepare_records, "*.jsonl", {"split": "hash:0.2"}),
}


def upload(folder: Path, url: str) -> Objects:
    objects = Objects(url)
    for path in sorted(folder.rglob("*.*")):
        objects.put(path.relative_to(folder).as_posix(), path)
    return objects


@pytest.mark.parametrize("kind", KINDS)
def test_sources_and_store_at_urls_make_the_store_that_is_made_on_disk(tmp_path, s3, proxy, cache, kind):
    prepare, pattern, options = KINDS[kind]
    write_sources(tmp_path / "in")
    upload(tmp_path / "in", f"{s3}/in/deep")
    local = prepare(f"{tmp_path}/in/{pattern}", tmp_path / "local", workers=1, **options)
    report = prepare(f"{s3}/in/**/{pattern}", f"{s3}/store", workers=1, **options)
    assert (report.path, report.is_new) == (f"{s3}/store", True)
    assert any(str(cache / "prepare") in note and f"{s3}/store" in note for note in report.notes)
    mr.pull(f"{s3}/store", tmp_path / "back")
    there, here = mr.open_store(tmp_path / "back"), mr.open_store(tmp_path / "local")
    for name in here.columns:
        if name != "source":
            assert np.array_equal(np.asarray(there.columns[name]), np.asarray(here.columns[name])), name
    assert local.fingerprint == there.fingerprint or kind == "text"  # a token store names its sources
    provenance = (tmp_path / "back" / "provenance.json").read_text()
    assert f"{s3}/in/deep/part-0" in provenance
    assert SECRET not in provenance
    assert KEY not in provenance
    assert not list((cache / "prepare").glob("*"))  # nothing stays behind

    again = prepare(f"{s3}/in/**/{pattern}", f"{s3}/store", workers=1, **options)
    assert (again.is_new, again.fingerprint, again.path) == (False, report.fingerprint, f"{s3}/store")
    Objects(f"{s3}/in/deep").put(f"part-3{pattern[1:]}", (tmp_path / "in" / f"part-0{pattern[1:]}").read_bytes())
    with pytest.raises(ConfigError, match=rf"{s3}/store is finished, but with other sources"):
        prepare(f"{s3}/in/**/{pattern}", f"{s3}/store", workers=1, **options)


def test_a_run_that_was_stopped_continues_with_what_it_has(tmp_path, s3, proxy, cache, monkeypatch):
    write_sources(tmp_path / "in")
    upload(tmp_path / "in", f"{s3}/in")
    monkeypatch.setattr(elsewhere, "push", None)  # as a kill before the push begins
    with pytest.raises(TypeError):
        mr.prepare_text(f"{s3}/in/*.jsonl", f"{s3}/store", tokenizer="bytes", workers=1)
    monkeypatch.undo()
    monkeypatch.setenv("MILLRACE_CACHE", str(cache))
    proxy.fault = lambda method, path: 403 if method == "PUT" and path.endswith("store.json") else None
    for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}", "AWS_ALLOW_HTTP": "true",
                        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnreachable, match="403") as caught:
        mr.prepare_text(f"{s3}/in/*.jsonl", f"{s3}/store", tokenizer="bytes", workers=1)
    assert SECRET not in str(caught.value)
    assert KEY not in str(caught.value)
    proxy.fault, before = (lambda method, path: None), len(proxy.requests)
    report = mr.prepare_text(f"{s3}/in/*.jsonl", f"{s3}/store", tokenizer="bytes", workers=1)
    sent = [path for method, path in proxy.requests[before:] if method in ("PUT", "POST")]
    assert not [path for path in sent if "/shards/" in path]  # they were there
    assert not proxy_gets(proxy, before, "/in/part")  # nor is any source fetched again
    assert mr.open_store(f"{s3}/store").fingerprint == report.fingerprint
    assert not list((cache / "prepare").glob("*"))


def test_kill_9_in_the_middle_of_the_push_and_the_same_command_again(tmp_path, s3, proxy, cache):
    write_sources(tmp_path / "in")
    command = [sys.executable, "-m", "millrace", "prepare", "table", f"{tmp_path}/in/*.csv", "--entity", "entity"]
    command += ["--time", "time", "--workers", "1", "--out"]
    child = subprocess.Popen([*command, f"{s3}/store"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    puts = []

    def killed(method, path):
        puts.extend([path] if method == "PUT" and "/shards/" in path else [])
        if len(puts) == 3:
            child.kill()
            child.wait()

    proxy.fault = killed
    assert child.wait(100) == -9
    proxy.fault = lambda method, path: None
    there = Objects(f"{s3}/store")
    sent = there.listed("shards")
    assert sent
    assert there.describe("store.json") is None  # no store yet
    before = len(proxy.requests)
    assert run([*command[3:], f"{s3}/store"]) == 0
    assert not list((cache / "prepare").glob("*"))
    assert run([*command[3:], str(tmp_path / "local")]) == 0
    mr.pull(f"{s3}/store", tmp_path / "copy")
    names = sorted(path.relative_to(tmp_path / "local").as_posix() for path in (tmp_path / "local").rglob("*.*"))
    assert sorted(path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.*")) == names
    for name in names:
        if name != "provenance.json":  # it has the seconds
            assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name
    puts = [path.split("/store/")[1] for method, path in proxy.requests[before:] if method == "PUT"]
    assert not set(sent) & set(puts)  # nothing is sent twice


def proxy_gets(proxy, before: int, part: str) -> list[str]:
    return [path for method, path in proxy.requests[before:] if method == "GET" and part in path]


def test_sources_come_once_and_through_faults(tmp_path, s3, proxy, monkeypatch):
    write_sources(tmp_path / "in")
    upload(tmp_path / "in", f"{s3}/in")
    faults = iter([503, "reset", "short", None])
    proxy.fault = lambda method, path: next(faults, None) if method == "GET" and "/in/part" in path else None
    out = tmp_path / "store"
    with pytest.raises((ConfigError, SourceError)):  # fails after the files came
        mr.prepare_table(f"{s3}/in/*.csv", out, entity="no such column", time="time", workers=1)
    staged = sorted(path.name for path in (tmp_path / "store.sources").rglob("*.csv"))
    assert staged == ["part-0.csv", "part-1.csv", "part-2.csv"]
    before = len(proxy.requests)
    report = mr.prepare_table(
        [f"{s3}/in/part-0.csv", f"{s3}/in/part-[12].csv"], out, entity="entity", time="time", workers=1
    )
    assert report.is_new
    assert not proxy_gets(proxy, before, "/in/part")
    assert not (tmp_path / "store.sources").exists()
    expected = mr.prepare_table(f"{tmp_path}/in/*.csv", tmp_path / "local", entity="entity", time="time", workers=1)
    assert expected.fingerprint == report.fingerprint


def test_a_source_that_changes_while_it_comes_is_refused(tmp_path, s3, proxy):
    write_sources(tmp_path / "in")
    objects = upload(tmp_path / "in", f"{s3}/in")
    seen = []

    def change(method, path):
        if method == "GET" and "/in/part-1.csv" in path and not seen:
            seen.append(path)
            return lambda: objects.put("part-1.csv", b"time,entity,close\n2024-01-01,a,1\n")
        return None

    proxy.fault = change
    with pytest.raises(SourceError, match=r"part-1.csv' changed while it was downloaded"):
        mr.prepare_table(f"{s3}/in/*.csv", tmp_path / "out", entity="entity", time="time", workers=1)
    assert not list((tmp_path / "out.sources").rglob("part-1*"))
    assert objects.describe("part-1.csv")


def test_sources_over_http(tmp_path, web):
    folder, url, _ = web
    write_sources(folder / "in")
    (folder / "in" / ".hidden").write_text("x")
    report = mr.prepare_records([f"{url}/in/part-0.jsonl", f"{url}/in/part-1.jsonl"], tmp_path / "out", workers=1)
    local = mr.prepare_records(
        [f"{folder}/in/part-0.jsonl", f"{folder}/in/part-1.jsonl"], tmp_path / "local", workers=1
    )
    assert report.fingerprint == local.fingerprint
    again = mr.prepare_records([f"{url}/in/part-1.jsonl"], tmp_path / "local", append=True, workers=1)
    assert (again.is_new, again.fingerprint) == (False, local.fingerprint)  # the same file from another place
    with pytest.raises(SourceError, match=r"is not there; over http:// give single files"):
        mr.prepare_records(f"{url}/in/", tmp_path / "other", workers=1)


def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path, s3, monkeypatch, capfd):
    write_sources(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"millrace pull s3://.*append=True.*|--append to s3"):
        mr.prepare_text(f"{tmp_path}/in/*.jsonl", f"{s3}/store", append=True)
    with pytest.raises(ConfigError, match="can only be read"):
        mr.prepare_text(f"{tmp_path}/in/*.jsonl", "https://host/store")
    with pytest.raises(ConfigError, match="holds no files that fit"):
        mr.prepare_text(f"{s3}/nothing/", tmp_path / "out")
    with pytest.raises(ConfigError) as caught:
        mr.prepare_text("s3://user:hidden@bucket/in", tmp_path / "out")
    assert "hidden" not in str(caught.value)
    upload(tmp_path / "in", f"{s3}/in")
    full = os.statvfs(tmp_path)
    monkeypatch.setattr(elsewhere.shutil, "disk_usage", lambda folder: type("", (), {"free": full.f_bsize}))
    with pytest.raises(SystemExit):
        main(["prepare", "text", f"{s3}/in/", "--out", str(tmp_path / "out")])
    assert "free space there, or choose a larger disk for the store" in capfd.readouterr().err
