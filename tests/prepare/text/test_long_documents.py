"""Long documents, a block at a time: cleaned, checked and counted as whole ones are."""

from __future__ import annotations

import unicodedata
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.prepare.text.clean import characters
from millrace.prepare.text.clean import long_documents as long
from millrace.prepare.text.clean.characters import (
    EMPTY_LINES,
    clean,
    clean_block,
    is_utf8_python,
    single_spaces,
    tables,
)
from millrace.testing import tree_digest
from millrace.text import breaks, words

UNITS = [" ", "  ", "\t", "\n", "\n\n", "\r\n", "\r", "\x00", "\x0b", "\u2028", "\u3000", "\xa0", "a", "e", "é", "\u0301", "\u0323",
         "日", "。", "か", "\u3099", "\u1100", "\u1161", "\u11a8", "각", "😀", "\ufeff", "<",
         "\u0338", "word", "\u09c7", "\u09be"]  # fmt: skip
texts = st.lists(st.tuples(st.sampled_from(UNITS), st.sampled_from([1, 1, 1, 2, 3, 20, 60])), max_size=30).map(
    lambda parts: "".join(unit * count for unit, count in parts)
)


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long, "BLOCK", 64)
        patch.setattr(long, "STEP", 16)
        patch.setattr(characters, "BLOCK", 64)
        yield


@given(texts)
@settings(max_examples=600, deadline=None)
def test_blocks_are_cleaned_as_the_whole(text):
    assert b"".join(block for block, _ in long.blocks(text.encode())) == text.encode()
    assert long.clean_long(text.encode()).decode() == clean(text)


@pytest.mark.parametrize("is_told", [False, True])
@given(text=texts | st.text(" \t\nab~", max_size=60))
@settings(max_examples=600, deadline=None)
def test_a_block_is_cleaned_by_the_core_as_by_python(text, is_told):
    tables() if is_told else tables.cache_clear()
    with mock.patch("millrace.prepare.text.clean.characters.MANY_BYTES", 1 << 40):
        assert clean_block(text.encode()).decode() == EMPTY_LINES.sub("\n\n", single_spaces(text))


@given(texts | st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_blocks_are_checked_and_counted_as_the_whole(text):
    document = text if isinstance(text, bytes) else text.encode()
    try:
        count = len(document.decode())
    except UnicodeDecodeError:
        assert not is_utf8_python(document, 0, len(document))
        with pytest.raises(UnicodeDecodeError):
            long.clean_long(document)
    else:
        assert is_utf8_python(document, 0, len(document))
        assert long.num_characters(document) == count


def test_no_text_is_cut_before_a_character_that_joins_with_the_one_before_it():
    """Those of other classes than 0, and all that stand second in a canonical pair."""
    seconds = {
        chr(point) for point in [*range(0x1161, 0x1176), *range(0x11A7, 0x11C3)]
    }  # of Hangul, which go by a rule
    for point in range(0x110000):
        pair = unicodedata.decomposition(chr(point)).split()
        if len(pair) == 2 and not pair[0].startswith("<"):
            seconds.add(chr(int(pair[1], 16)))
        if unicodedata.combining(chr(point)):
            seconds.add(chr(point))
    joining = [character for character in seconds if long.PLACES.search("a" + character)]
    assert joining == []
    assert [
        chr(point) for point in range(0x110000) if long.PLACES.search("a" + chr(point)) and chr(point).isspace()
    ] == []


@pytest.mark.parametrize(
    "options", [{}, {"normalize": False}, {"dedup": "near"}, {"tokenizer": "bytes"}, {"tokenizer": "char"}]
)
def test_a_store_of_long_documents_is_that_of_whole_ones(tmp_path, monkeypatch, options):
    documents = [
        "short one",
        "日本語。テキスト" * 300 + "\n" + "a" * 3000,
        "some words " * 400,
        " " * 50 + "x" * 5000,
        "end é",
    ]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    given = {"val": 0, "workers": 1, "tokenizer": "gpt2", **options}
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "whole", **given)
    monkeypatch.setattr(breaks, "SECTION_BYTES", 300)
    monkeypatch.setattr(words, "LONG_WORD", 200)
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "long", **given)
    assert tree_digest(tmp_path / "long") == tree_digest(tmp_path / "whole")


def test_a_masked_long_document_has_the_mask_of_the_whole(tmp_path, monkeypatch):
    import json

    record = {
        "text": "日本語。" * 200 + "a" * 3000 + " some words" * 300,
        "loss": [[3, 700], [790, 2000], [4000, 4001]],
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    given = {"val": 0, "workers": 1, "mask_field": "loss", "normalize": False}
    mr.prepare_text(str(tmp_path / "a.jsonl"), tmp_path / "whole", **given)
    monkeypatch.setattr(breaks, "SECTION_BYTES", 300)
    mr.prepare_text(str(tmp_path / "a.jsonl"), tmp_path / "long", **given)
    assert tree_digest(tmp_path / "long") == tree_digest(tmp_path / "whole")


def test_invalid_bytes_of_a_long_document_are_named_with_their_place(tmp_path, monkeypatch):
    monkeypatch.setattr(breaks, "SECTION_BYTES", 300)
    (tmp_path / "a.txt").write_bytes(b"first\n\n" + b"word " * 500 + b"\xff" + b" word" * 500)
    with pytest.raises(mr.SourceError, match=r"a\.txt', byte 2507: invalid utf-8 \(ff") as caught:
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", val=0, workers=1)
    assert caught.value.offset == 2507
    report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", val=0, workers=1, on_error="skip")
    assert report.documents == {"train": 1}


def test_a_document_that_the_tokenizer_cannot_take_in_pieces_is_named(tmp_path, monkeypatch):
    """A pattern that is not known, and a text that has no place to cut it at."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+|\W+"), "isolated"), level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["some text"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    backend.save(str(tmp_path / "own.json"))
    monkeypatch.setattr(breaks, "SECTION_BYTES", 300)
    monkeypatch.setattr(breaks, "WHOLE_BYTES", 3000)
    given = {"val": 0, "workers": 1, "tokenizer": str(tmp_path / "own.json")}
    (tmp_path / "a.txt").write_text("first\n\n" + "some words " * 100 + "a" * 2500)
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "in", **given)
    (tmp_path / "b.txt").write_text("first\n\n" + "some words " * 100 + "a" * 5000)
    with pytest.raises(
        mr.SourceError, match=r"b\.txt': the document at byte 7 is too .* its byte 9\d\d on its text has no place"
    ) as caught:
        mr.prepare_text(str(tmp_path / "b.txt"), tmp_path / "out", **given)
    assert caught.value.offset == 7
