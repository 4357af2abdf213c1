"""Input that changes while a table is read, and parts of an earlier start of the machine; tests/contract has the rest."""

import os
import shutil

import numpy as np
import pandas as pd
import pytest

import millrace as mr
from millrace.prepare.table.read import part, sources
from millrace.testing import Fault, count_steps, run_forked, tree_digest


class Job:
    """Three files, and as many parts."""

    def __init__(self, folder):
        self.source, self.out = folder / "in", folder / "out"
        self.source.mkdir()
        for k in range(3):
            frame = pd.DataFrame({"name": [f"e{j % 4}" for j in range(40)], "t": 40 * k + np.arange(40)})
            frame.assign(x=np.arange(40.0)).to_parquet(self.source / f"{k}.parquet", row_group_size=40)

    def prepare(self):
        return mr.prepare_table(str(self.source), self.out, time="t", entity="name", workers=1)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 1)
    return Job(tmp_path)


@pytest.fixture
def parts_read(monkeypatch):
    """The numbers of the parts that were read, not found finished."""
    numbers, run = [], part.PartMaker.run
    monkeypatch.setattr(part.PartMaker, "run", lambda self: (numbers.append(self._task.number), run(self))[1])
    return numbers


@pytest.mark.parametrize("how", ["rewritten", "touched", "removed"])
def test_an_input_that_changes_while_it_is_read_stops_the_run(job, monkeypatch, how):
    from millrace.prepare.table.read.chunks import Reader

    batch = Reader._chunk

    def meddle(self, source, first, table):
        path = f"{job.source}/1.parquet"
        if source.file.path == path and os.path.exists(path):
            if how == "rewritten":
                pd.DataFrame({"t": [1]}).to_parquet(path + ".new")
                os.replace(path + ".new", path)
            elif how == "touched":
                os.utime(path, ns=(7, 7))
            else:
                os.rename(path, path + ".away")
        return batch(self, source, first, table)

    monkeypatch.setattr(Reader, "_chunk", meddle)
    said = {
        "rewritten": r"changed while it was prepared: [\d,]+ bytes, planned [\d,]+",
        "touched": r"changed while it was prepared: it was written again",
        "removed": r"has gone since the plan",
    }
    with pytest.raises(mr.SourceError, match=rf"1\.parquet' {said[how]}"):
        job.prepare()
    assert not job.out.exists()


def test_parts_of_an_earlier_start_of_the_machine_are_read_again(job, parts_read, monkeypatch):
    """They are not synced: only this start's are known to be whole."""
    with count_steps("rename") as steps:
        job.prepare()
    whole, total = tree_digest(job.out), len(set(parts_read))
    shutil.rmtree(job.out)
    assert run_forked(job.prepare, fault=Fault(len(steps) - 3, "kill", operation="rename")) == -9
    assert len(list(job.out.with_name("out.partial").glob("parts/*[0-9]/done.json"))) == total
    monkeypatch.setattr("millrace.store.platform.boot_id", lambda: "another")
    parts_read.clear()
    job.prepare()
    assert len(parts_read) == total
    assert tree_digest(job.out) == whole
