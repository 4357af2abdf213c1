"""Cleaning: what it takes away, what it leaves, and that a second time changes nothing."""

from __future__ import annotations

import unicodedata
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import millrace as mr
from millrace.native import core
from millrace.prepare.text.clean import characters
from millrace.prepare.text.clean.characters import (
    JOINING,
    LEFT,
    MANY_BYTES,
    NUM_POINTS,
    clean,
    clean_core,
    clean_documents,
    clean_python,
    is_utf8,
    is_utf8_python,
    tables,
)
from millrace.text import breaks
from millrace.text.documents import Documents

ODD = st.sampled_from(
    "a b\t\n\r\x00\x0b\x0c\x1c\x1f\x7f\x85\x9f\xa0\u0301\u0323\u1100\u1161\u200b\u2028\u2029\u3000\ufeffé😀\uac00\u11a8"
)
odd_texts = st.lists(ODD, max_size=30).map("".join) | st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a\u0301", "á"),
        ("\u1100\u1161\u11a8", "각"),
        ("a\x00\u0301", "á"),  # a control may have stood between a letter and its accent
        ("\u212b", "Å"),
        ("ﬁ ²", "ﬁ ²"),  # NFC, not NFKC: ligatures and powers stay
        ("a\r\nb\rc\nd", "a\nb\nc\nd"),
        ("a\x0bb\x0cc\x85d\u2028e\u2029f", "a\nb\nc\nd\ne\nf"),
        ("a\x00\x01\x08\x0e\x1b\x7f\x80\x9fb\ufeff", "ab"),
        ("a\tb \t c\xa0\u3000d", "a b c d"),
        ("  a  \n  b  ", "a\nb"),
        ("a\n\n\n\n\nb", "a\n\nb"),
        ("a\n \n\t\n \nb", "a\n\nb"),
        ("\n\n a \n\n", "a"),
        (" \t\n\x00\r\n", ""),
        ("", ""),
        ("नमस्ते مرحبا 你好 👩\u200d🚀", "नमस्ते مرحبا 你好 👩\u200d🚀"),  # joiners belong to the text
    ],
)  # fmt: skip
def test_cleaning_follows_its_rules(text, cleaned):
    assert clean(text) == cleaned


@given(odd_texts)
@example("\x00 \u0301")
@example("\r\x00\n\n\u0301")
def test_cleaning_twice_is_cleaning_once(text):
    assert clean(clean(text)) == clean(text)


@given(odd_texts)
def test_clean_text_keeps_every_rule(text):
    found = clean(text)
    assert unicodedata.is_normalized("NFC", found)
    assert all(c == "\n" or unicodedata.category(c) != "Cc" for c in found)
    assert not {"\ufeff", "\u2028", "\u2029"} & set(found)
    assert "\n\n\n" not in found
    assert all(line == " ".join(line.split()) for line in found.split("\n"))
    assert found == found.strip()
    assert found.encode().decode() == found  # no lone surrogates


@given(odd_texts)
def test_nothing_but_white_space_controls_and_marks_is_lost(text):
    def kept(value: str) -> str:
        plain = "".join(c for c in value if unicodedata.category(c) != "Cc" and c != "\ufeff" and not c.isspace())
        return unicodedata.normalize("NFC", plain)

    assert kept(clean(text)) == kept(text)


def test_clean_ascii_is_what_clean_text_is_without_its_shortcut():
    assert clean("a\tb") == clean("a\tb\u3000") == "a b"


def test_no_normalize_keeps_the_bytes(tmp_path):
    data = b" \tdef f():\r\n\r\n\n\n    return 'a\xcc\x81\xe2\x80\xa8\x00' \x7f\n\n\n"
    (tmp_path / "a.py").write_bytes(data)
    mr.prepare_text(str(tmp_path / "a.py"), tmp_path / "out", tokenizer="bytes", normalize=False, val=0, workers=1)
    tokens = mr.open_store(tmp_path / "out").columns["tokens"][:]
    assert bytes(tokens[:-1].tolist()) == data
    mr.prepare_text(str(tmp_path / "a.py"), tmp_path / "clean", tokenizer="bytes", val=0, workers=1)
    tokens = mr.open_store(tmp_path / "clean").columns["tokens"][:]
    assert bytes(tokens[:-1].tolist()).decode() == clean(data.decode())


UTF8 = [
    b"plain ascii",
    "é".encode(),
    "€".encode(),
    "😀".encode(),
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe0\x80\x80",
]
BLANKS = st.lists(st.sampled_from("abcd \t\n"), max_size=30).map("".join)
WORDS = st.lists(
    st.sampled_from(["word", "longer-words", "a", "~", " ", " ", " ", "  ", "\t", "\n", "\x7f", "\x1f"]), max_size=20
).map("".join)
JOINED = [
    "한",
    "ᄒ",
    "ᅡ",
    "ᆫ",
    "e\u0301",
    "\u09c7",
    "\u09be",
    "\u1100\u1161",
    "\u0f71",
    "\u212b",
    "\u200d",
    "\xad",
    "\ufeff",
    "\xa0",
]
PLAIN = ["é", "ñandú", "日本", "“", "–", "…", "🙂", " ", "  ", "\n", "\n\n", "a", "longer words"]
LETTERS = st.lists(st.sampled_from([*JOINED, *PLAIN]) | st.sampled_from(PLAIN), max_size=20).map("".join)
GAPS = st.sampled_from([b"\n", b"\n\n", b"\r\n\r\n", b"\n\n\n\n", b"\n\r\n"])


@given(st.lists(st.tuples(BLANKS | WORDS | LETTERS | odd_texts, GAPS), min_size=1), GAPS)
@example([("a", b"\n"), (" \t", b"\n"), ("b ", b"\r\n\r\n"), ("\n \n \nc\n\n \n\nd", b"\n"), ("é\x00", b"\n")], b"\n")
def test_many_documents_are_cleaned_like_each(some, before):
    data, starts, ends = before, [], []
    for text, gap in some:
        starts.append(len(data))
        data += text.encode()
        ends.append(len(data))
        data += gap
    expected = [clean(text).encode() for text, _ in some]
    documents = Documents(data, np.array(starts), np.array(ends))
    assert list(clean_python(documents)) == expected
    assert list(clean_python(Documents.of([text.encode() for text, _ in some]))) == expected
    if core:
        assert list(clean_core(documents)) == expected
        with mock.patch("millrace.prepare.text.clean.characters.MANY_BYTES", 0):  # with tables of characters
            assert list(clean_core(documents)) == expected


@pytest.mark.parametrize("cleaner", [clean_python, pytest.param(clean_core, marks=pytest.mark.needs_core)])
def test_what_lies_between_documents_is_no_part_of_them(cleaner):
    data = b"  one\xff\x00gap two \n\n\nthree four\n"
    documents = Documents(data, np.array([0, 11, 24]), np.array([5, 15, 24]), np.array([7, 8, 9]), None, 3)
    cleaned = cleaner(documents)
    assert list(cleaned) == [b"one", b"two", b""]
    assert (cleaned.offsets.tolist(), cleaned.piece_of) == ([7, 8, 9], 3)
    assert list(cleaner(Documents(b"ab", np.array([0, 1]), np.array([1, 2])))) == [b"a", b"b"]  # nothing between
    assert list(cleaner(Documents.of([]))) == []


@pytest.mark.needs_core
@pytest.mark.parametrize(
    ("starts", "ends"), [([-1], [1]), ([0], [4]), ([2], [1]), ([0], [1, 2]), ([0, 1], [1]), ([2**62], [2**62])]
)
def test_documents_outside_of_their_text_are_refused_by_the_core(starts, ends):
    with pytest.raises(ValueError, match="outside of their text"):
        core.measure((b"abc", np.array(starts), np.array(ends)))


@given(
    st.lists(st.sampled_from(UTF8) | st.binary(max_size=9), max_size=8).map(b"".join),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_what_is_utf8_is_what_python_decodes(data, cut, end):
    first, last = min(cut, len(data)), max(min(cut, len(data)), len(data) - end)
    assert is_utf8(data, first, last) == is_utf8_python(data, first, last)


@pytest.mark.needs_core
def test_every_pair_of_first_bytes_is_valid_or_not_as_python_says():
    tails = (b"", b"\x80", b"\x80\x80", b"a", b"\xbf\xbf")
    for first in range(256):
        for second in range(256):
            for tail in tails:
                data = bytes([first, second]) + tail
                try:
                    data.decode()
                    valid = True
                except UnicodeDecodeError:
                    valid = False
                assert core.is_utf8(data, 0, len(data)) == valid, data
    with pytest.raises(ValueError, match="outside"):
        core.is_utf8(b"abc", 0, 4)


NEIGHBOURS = (
    "{}",
    "a{}b",
    "e{}\u0301",
    "e\u0301{}",
    "\u1112{}\u11ab",
    "\u09c7{}",
    "q\u0323{}\u0301",
    "q\u0301{}\u0323",
    "q\x00{} x",
    "\r{}\n",
)


@pytest.mark.needs_core
@pytest.mark.parametrize("beside", NEIGHBOURS)
def test_every_character_is_cleaned_by_the_core_as_by_python(beside):
    points = [*range(0xD800), *range(0xE000, NUM_POINTS), *range(NUM_POINTS, 0x110000, 61), *range(0x2F7F0, 0x2FA20)]
    texts = [beside.format(chr(point)) for point in points]
    tables()
    found = clean_core(Documents.of([text.encode() for text in texts]))
    wrong = [(text, one) for text, one in zip(texts, found, strict=True) if one != clean(text).encode()]
    assert wrong == []


def by_core(text, table):
    """The document, or None where the core leaves it to Python."""
    found, _, _, others = core.clean_documents(
        Documents.of([text if isinstance(text, bytes) else text.encode()]).arrays, table
    )
    return None if others else found.decode()


@pytest.mark.needs_core
@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a\r\n\r\n\r\nb\x0c\x0b\rc", "a\n\nb\n\nc"),
        ("a\x00b\x7f \x01\t c\x02", "ab c"),
        ("  größer  als\n\n\n\n“日本語” 🙂 ", "größer als\n\n“日本語” 🙂"),
        ("\u3000\u3000第一\xa0 \u2003章\u2028\u2029\x85次\ufeff", "第一 章\n\n次"),
        ("नमस्ते ภาษาไทยที่ مُحَمَّد", "नमस्ते ภาษาไทยที่ مُحَمَّد"),
    ],
)
def test_the_core_needs_no_help_with_text_in_nfc(text, cleaned):
    plain, in_nfc = tables()
    assert by_core(text, plain) == by_core(text, in_nfc) == cleaned == clean(text)
    assert (by_core(text, None) is None) == (not text.isascii())


@pytest.mark.needs_core
def test_what_nfc_may_change_is_left_unless_it_was_done():
    plain, in_nfc = tables()
    for text in ("e\u0301", "e\u0301\u0323", "q\u0301\u0323", "\u1112\u1161", "\U00020000", "\u09c7\u09be"):
        assert by_core(f"plain {text}", plain) is None
        assert by_core(f"plain {text}", in_nfc) == f"plain {text}"
    assert by_core("q\x00\u0301", in_nfc) is None  # they come together
    for invalid in (
        b"\xc3",
        b"\xe2\x82",
        b"\xc0\xaf",
        b"\xe0\x80\xaf",
        b"\xed\xa0\x80",
        b"\x80",
        b"\xf5\x80\x80\x80",
        b"\xf4\x90\x80\x80",
    ):
        assert by_core(invalid, plain) is None
        assert by_core(invalid, in_nfc) is None
    with pytest.raises(ValueError, match="each character"):
        by_core(b"a", b"\1")


def test_of_many_documents_one_that_is_not_utf8_is_an_error():
    with pytest.raises(UnicodeDecodeError):
        clean_documents(Documents(b"a\n\n\xff", np.array([0, 3]), np.array([1, 4])))


@pytest.mark.needs_core
@pytest.mark.parametrize(("num_bytes", "is_made"), [(MANY_BYTES - 1, False), (MANY_BYTES, True)])
def test_tables_are_made_when_the_core_has_skipped_so_many_bytes(monkeypatch, num_bytes, is_made):
    assert MANY_BYTES == 1 << 16, "they take as long as cleaning about so much without them"
    monkeypatch.setattr(characters, "_skipped", Counter())
    tables.cache_clear()
    assert list(clean_core(Documents.of([b"plain"]))) == [b"plain"]
    text = "é".encode() + b"x" * (num_bytes - 2)
    assert list(clean_core(Documents.of([text]))) == [text]
    assert bool(tables.cache_info().currsize) is is_made


def test_tables_tell_marks_and_letters_that_join():
    anywhere, in_nfc = (np.frombuffer(table, np.uint8) for table in tables())
    for point in range(1, NUM_POINTS):
        if klass := unicodedata.combining(chr(point)):
            assert anywhere[point] in (klass, LEFT)
            assert in_nfc[point] == JOINING
    assert not anywhere[0x1100:0x1200].any()
    assert anywhere[0x10FF] == anywhere[0x1200] == characters.PLAIN


@pytest.mark.parametrize("are_long", [False, True])
@pytest.mark.parametrize(("min_chars", "count"), [(0, 4), (1, 4), (2, 3), (3, 2), (4, 1), (5, 0)])
def test_documents_of_fewer_characters_are_dropped(tmp_path, monkeypatch, min_chars, count, are_long):
    if are_long:
        monkeypatch.setattr(breaks, "SECTION_BYTES", 1)
    (tmp_path / "a.txt").write_text("é\n\néé\n\nééé\n\néééé\n\nlong enough")
    options = {"tokenizer": "bytes", "val": 0, "workers": 1, "min_chars": min_chars}
    report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **options)
    assert report.documents == {"train": count + 1}
    assert report.dropped == ({"too short": 4 - count} if count < 4 else {})
