"""Training on long documents: the words of pieces are those of the whole, and memory has a bound."""

from __future__ import annotations

from collections import Counter

import pytest
import regex
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millrace.text import train
from millrace.text.kinds import GPT2_PATTERN
from millrace.text.train import train_bpe

UNITS = [
    "a",
    "word",
    "é",
    "日",
    "。",
    "1",
    "23",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u3000",
    "'",
    "'s",
    "'ll",
    "!",
    "-",
    "😀",
    "e\u0301",
    "x ",
    " y",
]
texts = st.lists(st.tuples(st.sampled_from(UNITS), st.sampled_from([1, 1, 1, 2, 3, 20])), max_size=120).map(
    lambda parts: "".join(unit * count for unit, count in parts)
)


def words(text):
    return Counter(regex.findall(GPT2_PATTERN, text))


@given(texts)
@settings(max_examples=300, deadline=None)
def test_pieces_have_the_words_of_the_whole(text):
    assume(max(map(len, words(text)), default=0) <= 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "TEXT_BYTES", 400)
        pieces = list(train._split(text.encode()))
    assert b"".join(pieces).decode() == text
    assert sum((words(piece.decode()) for piece in pieces), Counter()) == words(text)


def test_a_vocabulary_of_pieces_is_that_of_whole_documents(real, monkeypatch):
    documents = real[:40]
    whole = train_bpe(documents, 1000)
    monkeypatch.setattr(train, "TEXT_BYTES", 500)
    assert train_bpe(documents, 1000).to_file() == whole.to_file()


def test_a_run_without_words_is_cut(monkeypatch):
    monkeypatch.setattr(train, "TEXT_BYTES", 10_000)
    for document in ("日" * 30_000, "a" * 50_000, "a" * 50_000 + "!" * 50_000 + " "):
        pieces = list(train._split(document.encode()))
        assert b"".join(pieces).decode() == document
        assert max(len(piece.decode()) for piece in pieces[:-1]) <= train.WORD_CHARS
        assert len(pieces[-1]) <= 20_000


def test_documents_are_taken_until_their_different_words_are_enough(monkeypatch):
    monkeypatch.setattr(train, "DISTINCT_BYTES", 1000)
    alike, different = [b"the same words again " * 10] * 50, [b"word %d" % k for k in range(5000)]
    found = list(train._texts([*alike, *different]))
    assert len(alike) < len(found) < 500
