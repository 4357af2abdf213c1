"""The tables and the chart of the documentation are made from benchmarks/results."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from benchmarks import __main__ as benchmarks
from benchmarks import chart, table


@pytest.mark.parametrize("page", table.PAGES, ids=lambda page: page.name)
def test_tables_are_made_from_the_results(page: Path) -> None:
    text = page.read_text()
    assert table.MARKED.search(text)
    assert table.written(text) == text, "run python -m benchmarks.table"


def test_the_chart_is_drawn_from_the_results() -> None:
    svg, png = chart.PICTURES
    (drawn,) = ElementTree.parse(svg).iter("{http://purl.org/dc/elements/1.1/}description")
    remedy = "run python -m benchmarks.chart"
    assert drawn.text == chart.description(), remedy
    with Image.open(png) as image:
        assert image.info["Description"] == chart.description(), remedy
    words = "".join(ElementTree.parse(svg).getroot().itertext())
    for contest in chart.contests():
        for entry in contest.entries:
            assert table.number(entry.rate) in words, remedy


def test_a_benchmark_that_fails_is_left_out_with_its_reason() -> None:
    failing = [sys.executable, "-c", "import no_such_peer"]
    assert benchmarks.run("peer", failing) == {"peer": "ModuleNotFoundError: No module named 'no_such_peer'"}
    assert benchmarks.run("peer", [sys.executable, "-c", ""]) == {}
