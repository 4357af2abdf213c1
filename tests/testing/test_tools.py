"""The fault tools do what they say: a tool that never strikes would let every fault test pass."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import shared_memory

import psutil
import pytest

import millrace as mr
from millrace.errors import StoreWriteFailed
from millrace.store import platform
from millrace.testing import (
    Fault,
    NotPossibleHere,
    assert_same_store,
    count_steps,
    expect_no_leaks,
    iofault,
    kill_loop,
    run_forked,
    small_disk,
    stopped,
    tiny_store,
    tiny_text,
    tree_digest,
)


@pytest.mark.parametrize("kind", ["text", "series", "records"])
def test_tiny_stores_are_always_the_same(tmp_path, kind):
    store = tiny_store(kind, tmp_path / "a")
    tiny_store(kind, tmp_path / "b")
    assert_same_store(tmp_path / "a", tmp_path / "b")
    assert store.kind == kind
    assert store.num_shards > 2
    assert len(store.splits) >= 2
    assert store.fingerprint == FINGERPRINTS[kind]


# Made once: other bits here would be other stores, on some machine or after some change.
FINGERPRINTS = {
    "text": "49e32bbde42b04d1feb3f9496de774da",
    "series": "30ae7b0dc9c7e34dbdc4ce00cc22808e",
    "records": "df19d90d2445b8cf5cf32159a12fb794",
}


def test_unknown_kind_of_tiny_store(tmp_path):
    with pytest.raises(mr.ConfigError, match="expected one of text, series, records"):
        tiny_store("images", tmp_path / "out")


def test_tree_digest_sees_everything_but_provenance(tmp_path):
    tiny_text(tmp_path / "a")
    before = tree_digest(tmp_path / "a")
    os.chmod(tmp_path / "a" / "provenance.json", 0o644)
    (tmp_path / "a" / "provenance.json").write_text("{}")
    assert tree_digest(tmp_path / "a") == before
    (tmp_path / "a" / "empty").mkdir()
    assert tree_digest(tmp_path / "a") != before


def test_different_stores_are_named_file_by_file(tmp_path):
    tiny_text(tmp_path / "a")
    tiny_text(tmp_path / "b")
    (tmp_path / "a" / "extra").touch()
    shard = tmp_path / "b" / "shards" / "train-00000" / "tokens.u16"
    shard.chmod(0o644)
    shard.write_bytes(b"")
    with pytest.raises(AssertionError, match=r"only in .*a: extra\n.*differs: shards/train-00000/tokens.u16"):
        assert_same_store(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError, match="holds nothing"):
        assert_same_store(tmp_path / "c", tmp_path / "d")


def test_iofault_strikes_once_at_its_step(tmp_path):
    with count_steps() as steps:
        tiny_text(tmp_path / "counted")
    with iofault(5, errno.EIO) as taken, pytest.raises(StoreWriteFailed):
        tiny_text(tmp_path / "out")
    assert [doing for doing, _ in taken[:5]] == [doing for doing, _ in steps[:5]]
    assert len(taken) > 5  # it cleaned up
    assert platform.before_write is None


def test_iofault_counts_one_operation(tmp_path):
    with iofault(2, errno.EIO, operation="fsync") as taken, pytest.raises(StoreWriteFailed):
        tiny_text(tmp_path / "out")
    assert [doing for doing, _ in taken] == ["fsync", "fsync"]


def test_iofault_beyond_the_last_step_does_nothing(tmp_path):
    with iofault(100_000, errno.EIO):
        tiny_text(tmp_path / "out")


@pytest.mark.parametrize(("at", "kind"), [(0, "kill"), (1, "explode")])
def test_fault_that_cannot_be_is_refused(at, kind):
    with pytest.raises(ValueError):
        Fault(at, kind)


def test_run_forked_tells_how_the_child_ended(tmp_path, capfd):
    assert run_forked(int) == 0
    assert run_forked(int, "x") == 1
    assert "invalid literal" in capfd.readouterr().err
    assert run_forked(tiny_text, tmp_path / "out", fault=Fault(3, "kill")) == -signal.SIGKILL


SCRIPT = """
import sys
from millrace.testing import tiny_text
tiny_text(sys.argv[1])
"""


def run_with_fault(tmp_path, *options: str) -> subprocess.CompletedProcess:
    (tmp_path / "script.py").write_text(SCRIPT)
    script = [str(tmp_path / "script.py"), str(tmp_path / "out")]
    command = [sys.executable, "-m", "millrace.testing.run_with_fault", *options, "--", *script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_run_with_fault_kills_or_refuses_a_script(tmp_path):
    assert run_with_fault(tmp_path, "--at", "30", "--kind", "kill").returncode == -signal.SIGKILL
    assert os.path.isdir(tmp_path / "out.partial")
    refused = run_with_fault(tmp_path, "--at", "3", "--kind", "ENOSPC", "--operation", "write")
    assert refused.returncode == 1
    assert "StoreWriteFailed" in refused.stderr
    assert run_with_fault(tmp_path, "--kind", "EWHAT").returncode == 2
    counted = run_with_fault(tmp_path, "--count")
    assert counted.returncode == 0
    assert int(counted.stderr.split()[0]) > 50
    assert mr.open_store(tmp_path / "out").kind == "text"


# It imports little: on a busy machine it must have come to its child before it is killed.
RESTLESS = """
import os, sys, time
runs, done = sys.argv[1:]
if os.path.exists(runs) and len(open(runs).readlines()) == 3:
    open(done, "w").close()
else:
    child = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
    open(runs, "a").write(f"{child}\\n")
    time.sleep(600)
"""


def test_kill_loop_kills_the_whole_group_and_then_finishes(tmp_path, capsys):
    """The command starts a child each time and finishes at its fourth run."""
    runs, done, between = tmp_path / "runs", tmp_path / "done", []
    command = [sys.executable, "-I", "-S", "-c", RESTLESS, str(runs), str(done)]
    with expect_no_leaks():
        kills = kill_loop(
            command, 20, 7, within_s=(0.3, 0.5), done=done.exists, between=lambda: between.append(done.exists())
        )
    assert len(between) == kills
    assert not any(between[:-1])  # the last may have come between the end of the work and that of the process
    assert kills >= 3
    assert done.exists()
    assert "seed=7" in capsys.readouterr().out
    for pid in map(int, runs.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_kill_loop_reports_a_command_that_fails_by_itself():
    with pytest.raises(AssertionError, match="exit code 3 before any kill"):
        kill_loop([sys.executable, "-c", "raise SystemExit(3)"], 3, 1, within_s=(30, 30))


def test_small_disk_is_small():
    try:
        with small_disk(1 << 16) as folder:
            with pytest.raises(OSError, match="No space left"):
                (folder / "file").write_bytes(bytes(1 << 17))
            kept = folder
        assert not kept.exists()
    except NotPossibleHere as reason:
        pytest.skip(str(reason))


def test_stopped_process_goes_on_afterwards():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        with stopped(process.pid):
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            with open(f"/proc/{process.pid}/stat") as file:
                assert file.read().split(")")[1].split()[0] == "T"
        assert process.communicate()[0] == b"hello\n"


def leak_a_process(undo):
    process = subprocess.Popen(["sleep", "600"])
    undo.append(lambda: (process.kill(), process.wait()))


def leak_a_descriptor(undo):
    fd = os.open("/", os.O_RDONLY)
    undo.append(lambda: os.close(fd))


def leak_a_thread(undo):
    event = threading.Event()
    threading.Thread(target=event.wait, name="forgotten").start()
    undo.append(event.set)


def leak_a_name(undo):
    path = f"/dev/shm/millrace-test-{os.getpid()}"
    open(path, "w").close()
    undo.append(lambda: os.unlink(path))


def leak_shared_memory(undo):
    memory = shared_memory.SharedMemory(create=True, size=100)
    undo.append(lambda: (memory.close(), memory.unlink()))


def leak_a_temporary_file(undo):
    folder = tempfile.mkdtemp(prefix="millrace-left-")
    undo.append(lambda: os.rmdir(folder))


@pytest.mark.parametrize(
    ("leak", "shown"),
    [
        (leak_a_process, "process .*: sleep 600"),
        (leak_a_descriptor, "(?m)descriptor .* of /$"),
        (leak_a_thread, "thread forgotten"),
        (leak_a_name, "file /dev/shm/millrace-test-"),
        (leak_shared_memory, "file /dev/shm/psm_"),
        (leak_a_temporary_file, "file .*/millrace-left-"),
    ],
)
def test_what_is_left_behind_is_listed(leak, shown):
    undo = []
    with pytest.raises(AssertionError, match=shown), expect_no_leaks(grace_s=0.1):
        leak(undo)
    undo.pop()()


OTHER_PROGRAM = """
import os, sys
from multiprocessing import shared_memory
if os.fork():
    os._exit(0)  # what goes on is nobody's child
sys.stdin.readline()
memory = shared_memory.SharedMemory(create=True, size=100)
print(memory.name, flush=True)
sys.stdin.readline()
memory.unlink()
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no folder of shared memory")
def test_shared_memory_of_another_program_is_no_leak():
    command = [sys.executable, "-c", OTHER_PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.wait()
        with expect_no_leaks(grace_s=0):
            print(file=process.stdin, flush=True)
            name = process.stdout.readline().strip()
            assert os.path.exists(f"/dev/shm/{name}")
        process.communicate("\n")


def test_what_ends_a_moment_later_is_no_leak():
    with expect_no_leaks():
        threading.Thread(target=time.sleep, args=(0.2,)).start()
