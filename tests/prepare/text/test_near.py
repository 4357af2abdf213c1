"""Shingles: words where a text has them, bytes where it does not, and the same for a long document as for a short one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.prepare.text.clean import long_documents as long
from millrace.prepare.text.dedup import near
from millrace.prepare.text.dedup.near import bands, shingles, signatures

WORDS = ["the", "cat", "sat", "on", "a", "mat", "été", "12", "of", "wool"]


def flat(text):
    return [shingle for some in shingles(text.encode()) for shingle in some]


@given(st.lists(st.sampled_from(WORDS), max_size=200).map(" ".join))
def test_shingles_of_a_text_with_spaces_are_five_words(text):
    words = text.split()
    assert flat(text) == [" ".join(words[k : k + 5]) for k in range(max(1, len(words) - 4))]


@given(
    st.lists(st.sampled_from([*WORDS, "日本語", "\n", "。"]), max_size=80).map(" ".join)
    | st.integers(20, 90).map(lambda count: "一二三四五六七八九十" * count)
)
@settings(deadline=None)
def test_a_document_in_blocks_has_the_shingles_of_the_whole(text):
    whole = flat(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long, "BLOCK", 128)
        patch.setattr(long, "STEP", 64)
        patch.setattr(near, "BATCH", 7)
        patch.setattr(near, "is_long", lambda text: True)
        assert flat(text) == whole


def test_shingles_of_a_text_without_spaces_are_bytes_from_the_start_of_characters():
    text = "一二三四五六七八九十" * 3
    found = flat(text)
    assert found == [text[k : k + 10].encode() for k in range(21)]
    assert flat("一二三") == ["一二三"], "shorter than a shingle"


@pytest.mark.parametrize(
    "alphabet", ["".join(map(chr, range(0x4E00, 0x5200))), "".join(map(chr, range(0x0E01, 0x0E2F)))]
)
def test_near_duplicates_are_found_in_text_without_spaces(tmp_path, alphabet):
    chooser = random.Random(1)
    documents = ["".join(chooser.choices(alphabet, k=800)) for _ in range(20)]
    changed = [text[:300] + alphabet[0] + text[301:] for text in documents]
    (tmp_path / "a.txt").write_text("\n\n".join([*documents, *changed]))
    report = mr.prepare_text(
        str(tmp_path / "a.txt"), tmp_path / "out", dedup="near", val=0, tokenizer="bytes", workers=1
    )
    assert report.documents == {"train": 20}


def test_texts_of_few_letters_without_spaces_are_not_all_alike():
    """Of four letters there are few short shingles: those of 30 differ."""
    letters = np.frombuffer(b"ACGT", np.uint8)[np.random.default_rng(0).integers(0, 4, (6, 50_000))]
    found = bands(signatures([row.tobytes() for row in letters]))
    assert all(len(set(column)) == len(found) for column in found.T.tolist())
