"""A path that is no store is answered with what to do: the command for a source, the nearest name for a mistake."""

from pathlib import Path

import pytest

import millrace as mr

TABLE = r"is a table, not a store; make one with: millrace prepare table \S+ --out STORE --entity COLUMN --time COLUMN"
WRITER = r"not a store; read it with its own library and write a store with millrace\.StoreWriter"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("x.parquet", TABLE),
        ("x.csv", TABLE),
        ("x.CSV.gz", TABLE),
        ("x.jsonl", r"is text, not a store; make one with: millrace prepare text \S+x\.jsonl --out STORE"),
        ("x.txt", r"millrace prepare text \S+x\.txt --out STORE"),
        ("x.h5", f"is a file of arrays, {WRITER}"),
        ("x.root", WRITER),
        ("x.png", f"is an image, {WRITER}"),
        ("x.jpeg", WRITER),
        ("x.tar", "is an archive, not a store; unpack it"),
        ("x.odd", "holds no store and no layout that millrace knows; docs/guide/stores.md"),
    ],
)
def test_a_source_file_is_answered_with_its_command(tmp_path: Path, name: str, answer: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(mr.StoreNotFound, match=answer):
        mr.open_store(tmp_path / name)


def test_the_command_can_be_pasted(tmp_path: Path) -> None:
    (tmp_path / "my notes.txt").write_text("x")
    with pytest.raises(mr.StoreNotFound, match=f"millrace prepare text '{tmp_path}/my notes.txt' --out"):
        mr.open_store(tmp_path / "my notes.txt")


def test_a_folder_of_sources(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "README.md"):
        (tmp_path / name).write_text("x")
    with pytest.raises(mr.StoreNotFound, match=r"is a folder of table files, not a store; .*millrace prepare table"):
        mr.open_store(tmp_path)


@pytest.mark.parametrize(
    ("names", "has"),
    [([], "the folder is empty"), (list("ab"), "it has a, b"), (list("abcdef"), "it has a, b, c, d and 2 more")],
)
def test_a_folder_of_other_things_is_listed_and_cut_only_where_it_goes_on(
    tmp_path: Path, names: list[str], has: str
) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(mr.StoreNotFound, match=rf"knows \({has}\); "):
        mr.open_store(tmp_path)


def test_a_run_is_not_a_store(tmp_path: Path) -> None:
    view = mr.Records(mr.from_arrays({"x": [1, 2]}))
    next(iter(mr.Feed(view, batch=1, device="numpy", run=tmp_path / "run")))
    with pytest.raises(mr.StoreNotFound, match=r"is the folder of a run, not a store; .*millrace explain RUN --step N"):
        mr.open_store(tmp_path / "run")


def test_a_wrong_path_names_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "data" / "prices").mkdir(parents=True)
    for wrong in ("data/pirces", "data/Prices", "date/prices", "Data/prices/"):
        with pytest.raises(mr.StoreNotFound, match=rf"does not exist; did you mean {tmp_path}/data/prices\?"):
            mr.open_store(f"{tmp_path}/{wrong}")
    with pytest.raises(mr.StoreNotFound, match="does not exist; check the path"):
        mr.open_store(tmp_path / "data" / "weather")
