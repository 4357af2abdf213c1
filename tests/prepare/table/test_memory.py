"""Memory of a preparation, parent and workers together: flat, whatever the number of rows; the curve is in benchmarks/."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3]))
from benchmarks.table_memory import memory_curve


@pytest.fixture
def disk_path(tmp_path_factory):
    """On disk: a table in /dev/shm would be memory itself."""
    return tmp_path_factory.mktemp("memory")


@pytest.mark.timeout(600)
def test_memory_does_not_grow_with_the_rows(disk_path):
    """Held as float32, the second size would add 320 MB to the first; two workers at their peaks at once add up to 120."""
    peaks = list(memory_curve([1_000_000, 6_000_000], disk_path, "shuffled").values())
    print(peaks)
    assert max(peaks) < 1_000_000_000
    assert peaks[1] < peaks[0] + 220_000_000


@pytest.mark.timeout(600)
def test_quartiles_a_grid_and_interpolation_stay_under_the_limit(disk_path):
    peaks = memory_curve([500_000], disk_path, "robust, per entity, grid")
    print(peaks)
    assert max(peaks.values()) < 1_000_000_000
