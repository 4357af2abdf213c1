"""What goes wrong around a preparation: quarantine over appends, changed standard input, hung workers, a small disk."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

import millrace as mr
from millrace.prepare import run as room
from millrace.prepare.engines import local
from millrace.prepare.engines.engine import WorkerFailed
from millrace.testing import Fault, NotPossibleHere, count_steps, expect_no_leaks, run_forked, small_disk, tree_digest

OPTIONS = {"tokenizer": "bytes", "val": 0, "workers": 1, "on_error": "skip", "part_bytes": 60}


def quarantined(out):
    return [json.loads(line)["source"] for line in (out / "quarantine.jsonl").read_text().splitlines()]


@pytest.fixture
def bad_files(tmp_path):
    for name in "abcd":
        bad = b"" if name == "c" else b"\n\nbad \xff one\n\n" + b"x" * 80 + b"\xfe"
        (tmp_path / f"{name}.txt").write_bytes(b"good " + name.encode() + bad)
    return [str(tmp_path / f"{name}.txt") for name in "abcd"]


def test_appends_keep_the_earlier_lines_of_the_quarantine(tmp_path, bad_files):
    out = tmp_path / "out"
    mr.prepare_text(bad_files[0], out, **OPTIONS)
    for path in bad_files[1:]:
        mr.prepare_text(path, out, append=True, **OPTIONS)
    a, b, _, d = bad_files
    assert quarantined(out) == [a, a, b, b, d, d]


def test_an_append_killed_anywhere_sets_aside_once(tmp_path, bad_files):
    out = tmp_path / "out"
    mr.prepare_text(bad_files[0], out, **OPTIONS)
    shutil.copytree(out, tmp_path / "before")

    def append():
        mr.prepare_text(bad_files[1], out, append=True, **OPTIONS)

    with count_steps() as steps:
        append()
    whole = tree_digest(out)
    for at in range(len(steps), 0, -1 if os.environ.get("MILLRACE_SOAK") else -6):
        for path in (out, out.with_name("out.partial")):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "before", out)
        assert run_forked(append, fault=Fault(at, "kill")) == -9
        append()
        assert tree_digest(out) == whole, f"after a kill at step {at}, {steps[at - 1]}"


def test_many_bad_documents_do_not_gather_in_memory(tmp_path):
    """Each line of the quarantine has up to 1.4 KB; they are written as they come."""
    from millrace.prepare.text import part

    source, most = tmp_path / "a.txt", []
    source.write_bytes(b"\n".join([b"\xff" * 1000] * 3000) + b"\ngood")
    write = part.Spill.write_bytes

    def watched(self, data):
        write(self, data)
        most.append(len(self._waiting))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part.Spill, "write_bytes", watched)
        report = mr.prepare_text(
            str(source), tmp_path / "out", document="line", max_skipped=1, **{**OPTIONS, "part_bytes": 1 << 20}
        )
    assert report.dropped == {"unreadable: invalid utf-8": 3000}
    assert len(quarantined(tmp_path / "out")) == 3000
    assert max(most) < 1 << 20


NEAR = [f"w{number}" for number in np.random.default_rng(3).integers(0, 5000, 400)]


def test_an_append_finds_near_duplicates_of_old_documents(tmp_path, tools):
    options = {"tokenizer": "bytes", "val": 0, "workers": 1, "dedup": "near"}
    changed = [*NEAR[:200], "another", *NEAR[201:]]
    (tmp_path / "a.txt").write_text(" ".join(NEAR))
    (tmp_path / "b.txt").write_text(" ".join(changed) + "\n\nsomething else altogether")
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **options)
    report = mr.prepare_text(str(tmp_path / "b.txt"), tmp_path / "out", append=True, **options)
    assert report.dropped["near-duplicate"] == 1
    assert [name for name, *_ in tools.records(mr.open_store(tmp_path / "out"))] == [
        "a.txt",
        "b.txt",
    ]
    with pytest.raises(mr.ConfigError, match="made with dedup='near'; an append cannot have dedup='"):
        mr.prepare_text(str(tmp_path / "b.txt"), tmp_path / "out", append=True, **{**options, "dedup": "exact"})


def piped(tools, out, data, *more):
    return tools.shell(
        "prepare", "text", "-", "--out", out, "--tokenizer", "bytes", "--val", "0.5", *more, input=data
    )  # fmt: skip


def test_a_restart_is_given_the_same_standard_input_or_refuses(tmp_path, tools):
    out, data = tmp_path / "out", "only one document"
    stopped = piped(tools, out, data)  # a split would be empty: what was read is kept
    assert "would be empty" in stopped.stderr or "no training documents" in stopped.stderr
    for other, place in ((data + "x", len(data)), (data[:-3], len(data) - 3), ("Only one document", 0), ("", 0)):
        refused = piped(tools, out, other, "--val", "0")
        assert refused.returncode == 1
        assert f"standard input differs from byte {place} on" in refused.stderr
    done = piped(tools, out, data, "--val", "0")
    assert done.returncode == 0, done.stderr
    assert mr.open_store(out).decode(mr.open_store(out).columns["tokens"][:]) == data + "<|endoftext|>"


SLOW = """
import os, time

def hangs(text):
    while "document 7 of 1" in text:
        time.sleep(0.05)
    return True

def slow(text):
    time.sleep(0.3)
    return True

def exits(text):
    os._exit(3)
"""


@pytest.fixture
def slowly(tmp_path, monkeypatch):
    for k in range(2):
        (tmp_path / f"{k}.txt").write_text("\n\n".join(f"document {n} of {k}" for n in range(10)))
    (tmp_path / "slow_filters.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return [str(tmp_path / "0.txt"), str(tmp_path / "1.txt")]


@pytest.fixture
def started(monkeypatch):
    """Workers are waited for where they are started: on a busy machine that alone takes longer than a stall here."""
    start = local._Worker.__init__

    def waited(self, *given):
        start(self, *given)
        self.pipe.send((len, (), True))
        assert self.pipe.recv() == ("result", 0)

    monkeypatch.setattr(local._Worker, "__init__", waited)


def test_a_worker_that_hangs_is_named_with_its_slice(slowly, tmp_path, started):
    options = {**OPTIONS, "workers": 2, "part_bytes": 200, "filter": "slow_filters:hangs"}
    named = r"no progress for 4 s on part \d \('.*1\.txt' from 0.*stall_s="
    with expect_no_leaks(), pytest.raises(WorkerFailed, match=named):
        mr.prepare_text(slowly, tmp_path / "out", stall_s=4, **options)


def test_a_filter_that_ends_its_process_leaves_a_single_worker_alone(slowly, tmp_path):
    options = {**OPTIONS, "workers": 1, "filter": "slow_filters:exits"}
    with pytest.raises(WorkerFailed, match=r"exit code 3\) 3 times on part 0"):
        mr.prepare_text(slowly, tmp_path / "out", **options)


def test_a_worker_that_is_slow_but_moves_is_left_alone(slowly, tmp_path, started):
    """The part takes six seconds, its documents a third of one each."""
    options = {**OPTIONS, "workers": 2, "filter": "slow_filters:slow"}
    assert mr.prepare_text(slowly, tmp_path / "out", stall_s=5, **options).documents == {"train": 20}


def test_a_stopped_worker_is_reported(slowly, tmp_path):
    options = {**OPTIONS, "workers": 2, "part_bytes": 200, "filter": "slow_filters:hangs", "stall_s": 4}
    script = f"import millrace as mr; mr.prepare_text({slowly!r}, {str(tmp_path / 'out')!r}, **{options})"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as process:
        while len(list((tmp_path / "out.partial").glob("parts/*.tmp"))) < 1:
            assert process.poll() is None
            time.sleep(0.01)
        for child in psutil.Process(process.pid).children(recursive=True):
            if "spawn_main" in " ".join(child.cmdline()):
                child.send_signal(signal.SIGSTOP)
        said = process.communicate(timeout=60)[1]
    assert "made no progress for 4 s on part" in said


def test_a_disk_that_cannot_hold_it_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x" * 400_000)
    options = {"tokenizer": "bytes", "val": 0, "workers": 1, "normalize": False, "dedup": "none"}
    said = []
    try:
        with small_disk(700_000) as disk:
            with pytest.raises(mr.StoreWriteFailed, match=r"needs at least 800,000 bytes, [\d,]+ are free"):
                mr.prepare_text(str(tmp_path / "a.py"), disk / "out", **options)
            assert os.listdir(disk) == []
            options["dedup"] = "exact"  # it may all be one document
            with pytest.raises(mr.StoreWriteFailed, match="No space left"):
                mr.prepare_text(str(tmp_path / "a.py"), disk / "out", progress=lambda *s: said.append(s), **options)
    except NotPossibleHere as reason:
        pytest.skip(str(reason))
    stage, needed, free, _ = said[0]
    assert (stage, needed) == ("room", 1_600_000)
    assert free < needed


def test_the_command_warns_of_a_disk_that_may_be_too_small(tmp_path, monkeypatch, capsys):
    from millrace.cli.prepare_progress import TextProgress

    progress = TextProgress()
    progress("room", 10 << 30, 20 << 30, {})
    assert capsys.readouterr().err == ""
    progress("room", 20 << 30, 10 << 30, {})
    assert "20.0 GiB of disk may be needed, 10.0 GiB are free" in capsys.readouterr().err


def test_an_interrupted_run_needs_only_the_rest(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "tokens.bin").write_bytes(bytes(1000))
    assert room.check_room(tmp_path, 5000, 0, [tmp_path / "parts"])[0] == 4000
    assert room.check_room(tmp_path, 500, 0, [tmp_path / "parts"])[0] == 0
    assert room.check_room(tmp_path, 5000, 0, [])[0] == 5000  # parts of other sources are of no use


@pytest.fixture
def many(tmp_path):
    """Thirty files of some documents each, of which those of five and more are in one part."""
    folder = tmp_path / "many"
    folder.mkdir()
    for k in range(30):
        (folder / f"{k:02d} é.txt").write_text("\n\n".join(f"document {i} of {k}" for i in range(k % 4)))
    return sorted(map(str, folder.iterdir()))


@pytest.mark.parametrize("limit", ["MAX_DICTIONARY", "MAX_NAMES"])
@pytest.mark.parametrize("workers", [1, 2])
def test_sources_of_which_the_manifest_has_no_room_are_text_in_every_record(
    tmp_path, monkeypatch, many, tools, limit, workers
):
    from millrace.prepare.text.shards import columns

    options = {"tokenizer": "bytes", "part_bytes": 100, "shard_tokens": 300, "val": 0, "workers": workers}
    mr.prepare_text(many, tmp_path / "few", **options)
    monkeypatch.setattr(columns, limit, 3)
    mr.prepare_text(many[:20], tmp_path / "out", **options)
    report = mr.prepare_text(many[20:], tmp_path / "out", append=True, **options)
    assert report.is_new
    few, store = (mr.open_store(tmp_path / name, check=True) for name in ("few", "out"))
    assert (few.layout.columns["source"].dtype, store.layout.columns["source"].dtype) == ("dictionary", "string")
    assert tools.records(store) == tools.records(few)
    assert len(mr.Blocks(store, length=8)) == len(mr.Blocks(few, length=8))
    assert not mr.prepare_text(many[20:], tmp_path / "out", append=True, **options).is_new


def test_open_files_do_not_grow_with_their_number(tmp_path):
    """MILLRACE_SOAK makes it a hundred thousand."""
    count = 100_000 if os.environ.get("MILLRACE_SOAK") else 300
    for k in range(count):
        (tmp_path / "in" / str(k % 100)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / str(k % 100) / f"{k}.txt").write_text(f"file {k}")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    try:
        report = mr.prepare_text(str(tmp_path / "in"), tmp_path / "out", tokenizer="bytes", val=0, workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert report.documents == {"train": count}
    store = mr.open_store(tmp_path / "out")
    assert store.layout.columns["source"].dtype == ("string" if count > 65_536 else "dictionary")
    assert len(set(store.columns["source"][:].tolist())) == count


def test_more_sources_than_the_dictionary_of_a_store_can_take_are_refused_before_they_are_read(
    tmp_path, monkeypatch, many
):
    from millrace.prepare.text import part
    from millrace.prepare.text.shards import columns

    monkeypatch.setattr(columns, "MAX_DICTIONARY", 12)
    mr.prepare_text(many[:10], tmp_path / "out", **OPTIONS)
    monkeypatch.setattr(part.PartMaker, "run", lambda self: pytest.fail("read"))
    with pytest.raises(mr.ConfigError, match=r"13 source files with those appended; this store has room for 12"):
        mr.prepare_text(many[10:14], tmp_path / "out", append=True, **OPTIONS)  # one of them is empty, as the first
    assert not (tmp_path / "out.partial").exists()
