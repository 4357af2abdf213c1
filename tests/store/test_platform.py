"""What every change of the disk goes through."""

import os

import pytest

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
