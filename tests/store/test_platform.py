"""What every change of the disk goes through."""

import os
import stat

import numpy as np
import pytest

import millrace as mr
from millrace.store import platform


def test_a_folder_that_goes_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    """As where another writer renames it between the attempt to make it and the look at what is there."""
    path, real, tries = tmp_path / "store.partial", os.mkdir, []

    def mkdir(name, *rest):
        tries.append(name)
        if len(tries) == 1:
            raise FileExistsError(17, "File exists", str(name))
        real(name, *rest)

    monkeypatch.setattr(os, "mkdir", mkdir)
    platform.make_dir(path)
    assert path.is_dir()
    platform.make_dir(path)
    assert len(tries) == 2


@pytest.mark.parametrize("what", ["file", "dangling link"])
def test_what_is_no_folder_is_in_the_way(tmp_path, what):
    path = tmp_path / "store.partial"
    path.write_text("mine") if what == "file" else path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        platform.make_dir(path)


class Syncs:
    """Notes what the disk holds for certain: the size of each file, and the names in each folder, as of their last sync."""

    def __init__(self, monkeypatch):
        self.durable, self.at_rename, self._sync = {}, {}, os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)
        monkeypatch.setattr(platform, "before_write", self._before)

    def _fsync(self, fd):
        self.durable[os.fstat(fd).st_ino] = self.state(fd)
        self._sync(fd)

    def _before(self, operation, path):
        if operation == "rename":
            self.at_rename[path] = dict(self.durable)

    @staticmethod
    def state(file):
        return set(os.listdir(file)) if stat.S_ISDIR(os.stat(file).st_mode) else {os.stat(file).st_size}

    @classmethod
    def holds(cls, durable, path):
        """Whether a file was synced with the size that it has, or a folder with all names in it."""
        return cls.state(path) <= durable.get(path.stat().st_ino, set())


@pytest.mark.parametrize("resume", [False, True])
def test_a_store_gets_its_name_when_all_that_is_in_it_is_on_the_disk(tmp_path, monkeypatch, resume):
    """What is not synced is gone when the machine stops, and a name that was given before stays."""
    out, syncs = tmp_path / "new" / "store", Syncs(monkeypatch)
    columns = {"columns": {"x": mr.Column("float32")}}
    for options, name, later in ((columns, out, []), ({"append": True}, out / "store.json", [out, out / "store.json"])):
        with mr.StoreWriter(out, shard_bytes=64, resume=resume, **options) as writer:
            for number in range(6):
                writer.append({"x": np.full(8, number, np.float32)})
        durable = syncs.at_rename[str(name)]  # when it was given the name under which readers look for it
        paths = [path for path in (out, *out.rglob("*")) if path not in later]
        assert [path for path in paths if not Syncs.holds(durable, path)] == []
        assert len(paths) > 20
    assert all(Syncs.holds(syncs.durable, path) for path in (out, out.parent, out.parent.parent))  # and the name itself


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_synced_unless_it_may_be_lost(tmp_path, monkeypatch, durable):
    syncs = Syncs(monkeypatch)
    platform.write_file(tmp_path / "file", b"data", durable=durable)
    assert syncs.durable == ({(tmp_path / "file").stat().st_ino: {4}} if durable else {})
