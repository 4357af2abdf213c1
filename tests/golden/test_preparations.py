"""Preparations of every kind and option make what they made when they were recorded (make_preparations.py), byte for byte."""

import json
import runpy
from pathlib import Path

import pytest

MAKE = runpy.run_path(str(Path(__file__).parent / "make_preparations.py"))
RECORDED = json.loads(MAKE["RECORDED"].read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("preparations") / "sources"
    MAKE["write_sources"](base)
    return base


@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs_core
@pytest.mark.parametrize("name", list(MAKE["CASES"]))
def test_a_preparation_makes_what_it_made(name, base, tmp_path):
    assert MAKE["outcome"](MAKE["CASES"][name], base, tmp_path / "store") == RECORDED[name]


def test_every_recorded_preparation_is_made():
    assert set(RECORDED) == set(MAKE["CASES"])
