"""``--split`` is another way to write older options: plan, provenance and bytes are the same."""

import json
import re

import pytest

import millrace as mr
from millrace.cli import run

TABLE = {
    "time:2020-01-08": {"val_from": "2020-01-08"},
    "time:2020-01-05T12:00:00,2020-01-08": {"val_from": "2020-01-05T12:00:00", "test_from": "2020-01-08"},
    "time:,2020-01-08": {"test_from": "2020-01-08"},
    "span:0.2": {"val": 0.2},
    "span:0.2, 0.1": {"val": 0.2, "test": 0.1},
    "tail:0.1": {"val_last": 0.1},
    "tail:0,0.2": {"val_last": 0.0, "test_last": 0.2},
    "entity:0.3": {"split_by": "entity", "val": 0.3},
    "entity:0.3,0.3": {"split_by": "entity", "val": 0.3, "test": 0.3},
    "entities:e1": {"split_by": "entity", "val_entities": ["e1"]},
    "entities:e1, e3;e2": {"split_by": "entity", "val_entities": ["e1", "e3"], "test_entities": ["e2"]},
}
TEXT = {
    "hash:0.2": {"val": 0.2},
    "hash:0.2,0.3": {"val": 0.2, "test": 0.3},
    "tail:0.2": {"val": 0.2, "val_tail": True},
    "hash:0": {"val": 0.0},
}


@pytest.fixture
def sources(tmp_path):
    lines = [f"e{k},2020-01-{day:02d},{k * day}\n" for k in range(9) for day in range(1, 11)]
    (tmp_path / "a.csv").write_text("name,t,x\n" + "".join(lines))
    (tmp_path / "a.txt").write_text("".join(f"document number {k}\n\n" for k in range(40)))
    return {"table": tmp_path / "a.csv", "text": tmp_path / "a.txt"}


def prepare(kind, sources, out, **options):
    if kind == "table":
        return mr.prepare_table(str(sources[kind]), out, entity="name", time="t", workers=1, **options)
    return mr.prepare_text(str(sources[kind]), out, tokenizer="bytes", workers=1, **options)


def contents(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(("kind", "split"), [*(("table", form) for form in TABLE), *(("text", form) for form in TEXT)])
def test_a_form_gives_the_bytes_the_plan_and_the_provenance_of_the_older_options(tmp_path, sources, kind, split):
    older = (TABLE if kind == "table" else TEXT)[split]
    new, old = tmp_path / "new", tmp_path / "old"
    assert prepare(kind, sources, new, split=split).is_new
    assert prepare(kind, sources, old, **older).is_new
    assert not prepare(kind, sources, new, **older).is_new  # the plan is the same: it is complete
    found, expected = contents(new), contents(old)
    plans = [json.loads(files.pop("provenance.json"))["plan"] for files in (found, expected)]
    assert plans[0] == plans[1]
    assert found == expected


@pytest.mark.parametrize("kind", ["table", "text"])
def test_a_command_takes_it_and_refuses_it_beside_an_older_flag(tmp_path, sources, kind, capsys):
    named = ["--entity", "name", "--time", "t"] if kind == "table" else ["--tokenizer", "bytes"]
    command = ["prepare", kind, str(sources[kind]), "--out", str(tmp_path / "out"), *named, "--workers", "1"]
    assert run([*command, "--split", "tail:0.2", "--val", "0.2"]) == 2
    assert "give either --split or --val, not both" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
    assert run([*command, "--split", "tail:0.2"]) == 0
    capsys.readouterr()
    assert run([*command, *(["--val-last", "0.2"] if kind == "table" else ["--val", "0.2", "--val-tail"])]) == 0
    assert "already complete" in capsys.readouterr().out


def test_an_append_takes_the_form_of_its_store_and_no_other(tmp_path, sources):
    prepare("table", sources, tmp_path / "out", val_last=0.2)
    later = tmp_path / "later.csv"
    later.write_text("name,t,x\ne1,2020-02-01,5\n")
    with pytest.raises(mr.ConfigError, match=r"was made with val_last=0.2, which an append cannot change to 0.1"):
        mr.prepare_table(str(later), tmp_path / "out", append=True, split="tail:0.1", workers=1)
    assert mr.prepare_table(str(later), tmp_path / "out", append=True, split="tail:0.2", workers=1).added["rows"] == 1


NO_WORD = (
    " begins with no known word; expected one of time:2024-03-01,2024-06-01, span:0.1,0.1, tail:0.1,0.1, entity:0.1,0.1"
)
NO_COUNT = " needs one value, or two: the second is test; give "
NO_SHARE = " is no share; give a number from 0 to below 1, such as tail:0.1"
WRONG = {
    "tail": NO_COUNT + "tail:0.1,0.1",
    "tail:": NO_COUNT + "tail:0.1,0.1",
    "tail:0.1,0.1,0.1": NO_COUNT + "tail:0.1,0.1",
    "tail:10": ": '10'" + NO_SHARE,
    "tail:10%": ": '10%'" + NO_SHARE,
    "tail:-0.1": ": '-0.1'" + NO_SHARE,
    "tail:nan": ": 'nan'" + NO_SHARE,
    "tail:ten": ": 'ten'" + NO_SHARE,
    "0.1": NO_WORD,
    "month:3": NO_WORD,
    "tails:0.1": " begins with no known word (did you mean 'tail'?); expected one of",
    ":0.1": NO_WORD,
    "time:,": NO_COUNT + "time:2024-03-01,2024-06-01",
}


@pytest.mark.parametrize("split", WRONG)
def test_a_wrong_form_is_answered_with_the_right_ones(tmp_path, sources, split):
    with pytest.raises(mr.ConfigError, match=re.escape(f"split={split!r}{WRONG[split]}")):
        prepare("table", sources, tmp_path / "out", split=split)
    with pytest.raises(mr.ConfigError, match=r"expected one of hash:0.01,0.01, tail:0.01,0.01"):
        prepare("text", sources, tmp_path / "out", split="time:2020-01-01")


def test_two_ways_to_split_are_refused(tmp_path, sources):
    with pytest.raises(mr.ConfigError, match=r"give either split= or val_from=, not both"):
        prepare("table", sources, tmp_path / "out", split="tail:0.1", val_from="2020-01-05")
    prepare("table", sources, tmp_path / "out", split="tail:0.1", val_from=None)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("table", "tail:0.1", "tail:0.2,0.1"),
        ("table", "time:2020-01-05", "entities:e1,e3;e2"),
        ("table", "span:0.2", "entity:0.3"),
        ("text", "hash:0.2", "tail:0.2"),
    ],
)
def test_another_split_of_a_finished_store_is_named_as_it_was_given(tmp_path, sources, kind, first, second):
    prepare(kind, sources, tmp_path / "out", split=first)
    with pytest.raises(mr.ConfigError, match=re.escape(f'split= was "{first}", now "{second}"')):
        prepare(kind, sources, tmp_path / "out", split=second)


def test_a_time_and_an_entity_that_cannot_be_are_named_with_the_option(tmp_path, sources):
    with pytest.raises(mr.ConfigError, match=r"""split="time": val begins at '01/02/2024', which is no time"""):
        prepare("table", sources, tmp_path / "out", split="time:01/02/2024")
    with pytest.raises(
        mr.ConfigError, match=r"names entity 'e11', .* \(did you mean 'e1'\?\); there are 'e0', .* and 1 more"
    ):
        prepare("table", sources, tmp_path / "out", split="entities:e11")


def test_an_unknown_option_is_answered_with_the_nearest(tmp_path, sources):
    with pytest.raises(mr.ConfigError, match=r"\['tokeniser'\] \(did you mean 'tokenizer'\?\); expected .*, split,"):
        mr.prepare_text(str(sources["text"]), tmp_path / "out", tokeniser="bytes")
    with pytest.raises(mr.ConfigError, match=r"\['splits'\] \(did you mean 'split'\?\); expected .*, split,"):
        prepare("table", sources, tmp_path / "out", splits="tail:0.1")
