"""What is measured of a machine, a process and a GPU: numbers that have meaning, and None where nobody knows."""

from __future__ import annotations

import io
import mmap
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from millrace.meter import machine, usage
from millrace.meter.usage import GpuUsage, Usage


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(8 << 20))
    with path.open() as opened:
        os.fsync(opened.fileno())
    return path


def test_rates_are_differences_per_second():
    early = Usage(10.0, 1.0, 0.5, 3, 100, 1000, None)
    late = Usage(12.0, 4.0, 0.1, 5, 300, 9000, 7)
    found = late.rates(early)
    assert found == {
        "cpu_cores": 1.5, "feed_cores": 0.0, "disk_faults_per_s": 1.0, "faults_per_s": 100.0, "disk_read_per_s": 4000.0,
    }  # fmt: skip
    assert late.rates(replace(early, refaults=5))["refaults_per_s"] == 1.0


def test_a_process_is_read(file):
    before = Usage.read()
    with mmap.mmap(-1, 1 << 24) as pages:  # new ones: an array may lie in memory that was used before
        np.frombuffer(pages, np.uint8)[::4096].sum()
    found = Usage.read().rates(before)
    assert found["cpu_cores"] > 0
    assert found["faults_per_s"] > 0


def test_cpu_of_threads_is_by_their_names():
    go, end = threading.Event(), threading.Event()

    def work():
        sum(range(300_000))
        go.set()
        end.wait()

    assert usage._cpu_of_threads("test-meter-") is None
    thread = threading.Thread(target=work, name="test-meter-0")
    thread.start()
    go.wait()
    assert usage._cpu_of_threads("test-meter-") > 0
    end.set()
    thread.join()


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    if not os.path.exists("/dev/nvidiactl"):
        assert GpuUsage.read() is None
    monkeypatch.setattr(usage, "_handle", lambda pynvml, index: 1 / 0)
    assert GpuUsage.read() is None


def test_what_lies_in_memory_is_a_share(file, tmp_path):
    file.read_bytes()
    assert machine.resident_share([file]) == 1.0
    hole = tmp_path / "hole"
    with hole.open("wb") as opened:
        opened.truncate(8 << 20)
    assert machine.resident_share([hole]) == 0.0
    assert machine.resident_share([file, hole]) == 0.5
    assert machine.resident_share([]) is None


def test_a_disk_is_read_past_memory_or_not_at_all(file, monkeypatch):
    monkeypatch.setattr(machine, "READ_S", 0.02)
    found = machine.disk_rates([file], 5000)
    if found is not None:  # tmpfs cannot
        assert found["read_bytes"] == 8192
        assert found["sequential_bytes_per_s"] > 0
        assert found["random_reads_per_s"] > 0
    assert machine.disk_rates([], 5000) is None


def test_a_machine_without_a_gpu_copies_only_in_memory():
    assert machine.memory_rate(1 << 20) > 0
    assert machine.gpu_names() == []
    assert machine.device_rate() is None


def test_time_without_a_core_grows_or_is_not_known(monkeypatch):
    before = usage.without_core_s()
    assert 0 <= before <= usage.without_core_s()
    monkeypatch.setattr("builtins.open", lambda *args: io.StringIO("7 2500000000 3\n"))
    assert usage.without_core_s() == 2.5
    monkeypatch.setattr("builtins.open", lambda *args: io.StringIO(""))
    assert usage.without_core_s() == 0.0
