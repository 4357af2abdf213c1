"""The name under which the package is installed, and what messages tell users to install."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

import millrace
from millrace import distribution
from millrace.cli import run

ROOT = Path(millrace.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site-packages folder from which the package seems to run, and the only place of metadata."""
    folder = tmp_path / "site-packages"
    (folder / "millrace").mkdir(parents=True)
    monkeypatch.setattr(distribution, "_FOLDER", str(folder / "millrace"))
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def add_metadata(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    (folder / "top_level.txt").write_text("millrace\n")


def test_the_constants_are_those_of_the_project():
    assert (PROJECT["name"], PROJECT["version"]) == (distribution.NAME, distribution.__version__)
    assert millrace.__version__ == distribution.__version__


def test_a_checkout_installs_from_its_own_folder():
    assert distribution.is_checkout()
    assert distribution.install_command("images") == "pip install '.[images]'"


@pytest.mark.parametrize(
    ("installed", "name"),
    [
        ([], "millrace-data"),  # copied sources: no metadata
        (["millrace-data"], "millrace-data"),
        (["millrace", "millrace-data"], "millrace-data"),
        (["millrace"], "millrace-data"),  # by the old name: a new install has the new one
        (["acme-millrace"], "acme-millrace"),  # packaged again by somebody
    ],
)
def test_an_install_is_extended_under_its_name(site, installed, name):
    for each in installed:
        add_metadata(site, each, "1.0")
    assert distribution.install_command("images") == f"pip install '{name}[images]'"


def test_the_command_is_quoted_for_every_shell(site, monkeypatch):
    monkeypatch.setattr(distribution, "_QUOTE", '"')  # on Windows, where cmd.exe takes no other
    assert distribution.install_command("s3") == 'pip install "millrace-data[s3]"'


def test_messages_name_extras_that_exist_and_only_by_the_command():
    sources = {path: path.read_text() for path in (ROOT / "src/millrace").rglob("*.py")}
    extras = {extra for text in sources.values() for extra in re.findall(r"install_command\(['\"](\w+)['\"]\)", text)}
    assert len(extras) >= 10
    assert extras <= set(PROJECT["optional-dependencies"])
    pages = {path: path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    pages.pop(ROOT / "CHANGELOG.md")
    by_hand = [
        path for path, text in (sources | pages).items() if re.search(r"\bmillrace\[|pip install millrace(?!-)\b", text)
    ]
    assert by_hand == []


def test_doctor_names_an_old_distribution_beside_ours(site, capsys, monkeypatch):
    add_metadata(site, "millrace-data", "0.2.0")
    assert distribution.old_distribution_advice() is None
    add_metadata(site, "millrace", "0.0.1")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(site))
    assert run(["doctor"]) == 0
    assert re.search(
        r"^old distribution +millrace 0\.0\.1 is installed beside .*pip uninstall", capsys.readouterr().out, re.M
    )


def test_metadata_that_a_build_left_in_a_checkout_is_no_old_distribution(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "src/millrace").mkdir(parents=True)
    leftovers = tmp_path / "src/millrace.egg-info"
    leftovers.mkdir()
    (leftovers / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: millrace\nVersion: 0.1.0\n")
    monkeypatch.setattr(distribution, "_FOLDER", str(tmp_path / "src/millrace"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "src")])
    assert distribution.old_distribution_advice() is None
    monkeypatch.setattr(distribution, "_FOLDER", str(tmp_path / "elsewhere/millrace"))
    assert "millrace 0.1.0" in distribution.old_distribution_advice()
