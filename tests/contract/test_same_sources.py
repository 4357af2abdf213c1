"""An append never adds what the store was made from: the same files under any name are skipped, changed ones refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import millrace as mr
from millrace.store import publish

KEEPS_REPEATS = {"text": {"dedup": "none"}, "table": {}, "records": {}}


def files_of(source: Any) -> list[Path]:
    paths = [Path(source)] if isinstance(source, str) else [Path(path) for path in source]
    return sorted(file for path in paths for file in (path.iterdir() if path.is_dir() else [path]))


@pytest.fixture
def first(tiny, kind, tmp_path) -> list[Path]:
    """The files of a store that is made at ``tiny.out``; repeated documents would be kept."""
    folder = tmp_path / "first"
    folder.mkdir()
    files = [Path(shutil.copy(file, folder)) for file in files_of(tiny.first)]
    name = kind.prepare.__name__.removeprefix("prepare_")
    kind.prepare(str(folder), tiny.out, **kind.tiny, **KEEPS_REPEATS[name])
    tiny.store = mr.open_store(tiny.out)
    return files


def append(tiny: Any, *paths: object, **options: Any) -> Any:
    return tiny.kind.prepare([str(path) for path in paths], tiny.out, append=True, workers=1, **options)


def linked(files: list[Path], folder: Path) -> list[Path]:
    folder.mkdir()
    for file in files:
        (folder / f"link-{file.name}").symlink_to(file)
    return [folder]


def copied(files: list[Path], folder: Path) -> list[Path]:
    folder.mkdir()
    for number, file in enumerate(files):
        shutil.copy(file, folder / f"{number}-again{file.suffix}")  # another name and time
    return [folder]


def relative(files: list[Path], folder: Path) -> list[Path]:
    return [Path(os.path.relpath(file)) for file in files]


WAYS = {"the same": lambda files, folder: files, "linked": linked, "copied": copied, "relative": relative}


@pytest.mark.parametrize("way", WAYS)
def test_sources_that_the_store_has_are_skipped_and_said(tiny, first, tmp_path, way):
    report = append(tiny, *WAYS[way](first, tmp_path / "other"))
    assert (report.is_new, report.fingerprint) == (False, tiny.store.fingerprint)
    assert any("in the store already, and skipped" in note for note in report.notes)
    assert mr.open_store(tiny.out).num_rows == tiny.store.num_rows
    assert not tiny.partial.exists()


def test_of_old_and_new_files_the_new_are_added(tiny, first, tmp_path):
    """The command of the first run, with new files beside the old: as its own error advises."""
    alone = tmp_path / "alone"
    shutil.copytree(tiny.out, alone)
    fresh = files_of(tiny.second)
    tiny.kind.prepare(tiny.second, alone, append=True, workers=1)
    for file in fresh:
        shutil.copy2(file, first[0].parent / f"z-{file.name}")
    folder = first[0].parent
    with pytest.raises(mr.ConfigError, match=r"append=True"):
        tiny.kind.prepare(str(folder), tiny.out, **tiny.kind.tiny)
    report = append(tiny, folder)
    assert report.is_new
    store, expected = mr.open_store(tiny.out), mr.open_store(alone)
    assert (store.num_rows, store.num_records) == (expected.num_rows, expected.num_records)
    for again in range(2):  # whatever is repeated, and whatever came between
        assert not append(tiny, folder).is_new, again
        assert not append(tiny, *first).is_new, again
    assert mr.open_store(tiny.out).fingerprint == report.fingerprint


def test_a_source_that_has_changed_is_refused_and_an_option_decides(tiny, first):
    changed, rows = first[0], tiny.store.num_rows
    shutil.copy(max(files_of(tiny.second), key=lambda path: path.stat().st_size), changed)
    with pytest.raises(mr.SourceError, match=r"was made from this path.*same_source=\"skip\".*same_source=\"keep\""):
        append(tiny, *first)
    assert not tiny.partial.exists()
    report = append(tiny, *first, same_source="skip")
    assert (report.is_new, mr.open_store(tiny.out).num_rows) == (False, rows)
    assert any("changed since the store was made, and skipped" in note for note in report.notes)
    assert append(tiny, changed, same_source="keep").is_new
    assert mr.open_store(tiny.out).num_rows > rows
    assert not append(tiny, changed).is_new


def test_an_append_that_was_killed_before_its_end_is_not_taken_for_done(tiny, first, monkeypatch):
    """Its line in ``provenance.json`` is there, its snapshot is not."""
    rows, write = tiny.store.num_rows, publish.platform.write_file

    def dies(path: Any, *args: Any, **more: Any) -> None:
        if Path(path).parent.name == "snapshots":
            raise KeyboardInterrupt
        write(path, *args, **more)

    monkeypatch.setattr(publish.platform, "write_file", dies)
    with pytest.raises(KeyboardInterrupt):
        append(tiny, tiny.second)
    monkeypatch.undo()
    assert append(tiny, tiny.second).is_new
    assert mr.open_store(tiny.out).num_rows > rows


def test_a_store_of_an_earlier_version_knows_its_sources_too(tiny, first, tmp_path):
    """That wrote no folder, links or members: paths count from here, sizes and ends are as good as ever."""
    provenance = tiny.out / "provenance.json"
    lines = [json.loads(line) for line in provenance.read_bytes().splitlines()]
    for line in lines:
        for name in ("folder", "links", "members", "parent"):
            line.pop(name, None)
    provenance.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert not append(tiny, *copied(first, tmp_path / "other")).is_new
    assert append(tiny, tiny.second).is_new


def images_of_one_size(folder: Path, seed: int) -> Path:
    """As an archive leaves them: names, sizes and times are alike, whatever they show."""
    images = np.random.default_rng(seed).integers(0, 256, (3, 8, 8, 3), np.uint8)
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        path = folder / f"{number:04}.bmp"
        Image.fromarray(image).save(path)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return folder


def test_a_copy_of_a_folder_of_images_is_not_added_again(tmp_path):
    """A copy has other times, and a file of the same name in a folder of another name may be any image."""
    out, first = tmp_path / "store", tmp_path / "one"
    images_of_one_size(first / "cats", 1)
    mr.prepare_records([str(first)], out, workers=1)
    copy = tmp_path / "two"
    shutil.copytree(first, copy, copy_function=shutil.copyfile)
    Image.new("RGB", (8, 8)).save(copy / "cats" / "9999.bmp")
    with pytest.raises(mr.SourceError, match=r"these names and sizes.*same_source=\"skip\".*same_source=\"keep\""):
        mr.prepare_records([str(copy)], out, append=True, workers=1)
    assert mr.prepare_records([str(copy)], out, append=True, workers=1, same_source="skip").is_new
    assert mr.open_store(out).num_records == 4


def test_other_images_of_the_same_names_sizes_and_times_are_not_left_out(tmp_path):
    out, first = tmp_path / "store", images_of_one_size(tmp_path / "one" / "cats", 1)
    mr.prepare_records([str(first)], out, workers=1)
    other = images_of_one_size(tmp_path / "two" / "cats", 2)
    with pytest.raises(mr.SourceError, match=r"these names and sizes.*same_source=\"skip\".*same_source=\"keep\""):
        mr.prepare_records([str(other)], out, append=True, workers=1)
    assert not mr.prepare_records([str(first)], out, append=True, workers=1).is_new
    (tmp_path / "three").mkdir()
    moved = shutil.move(first, tmp_path / "three" / "cats")
    assert not mr.prepare_records([str(moved)], out, append=True, workers=1, same_source="skip").is_new
    assert mr.prepare_records([str(other)], out, append=True, workers=1, same_source="keep").is_new
    assert mr.open_store(out).num_records == 6


def test_no_remedy_for_a_damaged_provenance_forgets_the_sources(tiny, first):
    (tiny.out / "provenance.json").write_bytes(b'{"plan": {"sources"')
    with pytest.raises(mr.MillraceError, match=r"provenance.json") as refused:
        append(tiny, *first)
    assert "move it away" not in str(refused.value)


def test_files_that_differ_between_their_ends_are_both_added(tmp_path):
    """As results of simulations do, which are zero at their borders; a copy of either is none of them."""
    out, results = tmp_path / "store", [tmp_path / f"run-{number}.npy" for number in range(2)]
    for number, path in enumerate(results):
        values = np.zeros((3000, 10))
        values[1000:2000] = number + 1
        np.save(path, values)
    mr.prepare_records([str(results[0])], out, workers=1)
    assert mr.prepare_records([str(results[1])], out, append=True, workers=1).is_new
    for number, path in enumerate(results):
        copy = shutil.copyfile(path, tmp_path / f"copy-{number}.npy")
        assert not mr.prepare_records([str(copy)], out, append=True, workers=1).is_new
    moved = results[0].rename(tmp_path / "moved.npy")
    assert not mr.prepare_records([str(moved)], out, append=True, workers=1).is_new
    assert mr.open_store(out).num_records == 2
