"""Long documents without spaces: cut between words as the tokenizer splits them, and long words in windows.

The ids are those of tiktoken on the whole document, whatever its pattern.
"""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.text import breaks, words
from millrace.text.kinds import GPT2_PATTERN
from millrace.text.load import gpt2
from millrace.text.rank_file import TiktokenTokenizer

UNITS = ["a", "ab", "A", "Ab", "é", "e\u0301", "日", "本", "。", "한", "ไท", "1", "23", "٣", " ", "  ", "\n", "\r\n", "\t",
         "\u3000", "\u2028", "'", "'s", "'LL", "’s", "!", "-", "...", "😀", "👩\u200d🚀", "\u200b", "x ", " y", ".\n", "/",
         "_"]  # fmt: skip
# Units and how often each is repeated: a text of a hundred kilobytes would say nothing where a test fails.
recipes = st.lists(
    st.tuples(st.sampled_from(UNITS), st.sampled_from([1, 1, 2, 3, 7, 40, 300, 2500])), min_size=1, max_size=12
)


def text_of(recipe):
    return "".join(unit * count for unit, count in recipe)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Pieces and windows of some hundred bytes, so that a text of some thousand has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaks, "SECTION_BYTES", 300)
        patch.setattr(words, "LONG_WORD", 200)
        patch.setattr(words, "WINDOW", 64)
        yield


def in_pieces(tokenizer, text):
    found = list(tokenizer.encode_sections(text.encode()))
    ends = [piece.stop for piece in found]
    assert ends == [*[piece.start for piece in found[1:]], len(text.encode())]
    return np.concatenate([piece.ids for piece in found]).tolist()


@pytest.fixture(scope="module", params=["millrace", "tiktoken", "tokenizers"])
def tokenizer(request):
    made = gpt2()
    made.use(request.param)
    return made


@given(recipes)
@settings(max_examples=100, deadline=None)
def test_gpt2_in_pieces_has_the_ids_of_the_whole(tokenizer, reference, recipe):
    text = text_of(recipe)
    assert in_pieces(tokenizer, text) == reference.encode(text)


@pytest.mark.parametrize("pattern", sorted(words.KNOWN))
def test_words_of_every_known_pattern_have_the_ids_of_the_whole(reference, pattern):
    whole = tiktoken.Encoding("whole", pat_str=pattern, mergeable_ranks=reference.ranks, special_tokens={})
    tokenizer = TiktokenTokenizer("own", pattern, reference.ranks, {})

    @given(recipes)
    @settings(max_examples=60, deadline=None)
    def same(recipe):
        text = text_of(recipe)
        assert in_pieces(tokenizer, text) == whole.encode_ordinary(text)

    same()


@pytest.mark.parametrize(
    "unit", ["a", " ", "日", "ab", "aab", "1", "-", "=", "\n", "é", "日本語", "hello", "e\u0301", "😀"]
)
def test_a_long_word_in_windows_has_the_ids_of_the_whole(tokenizer, reference, unit):
    for end in ("", "x", " x", "。"):
        text = unit * (12_000 // len(unit)) + end
        assert in_pieces(tokenizer, text) == reference.encode(text)


def test_random_letters_in_windows_have_the_ids_of_the_whole(tokenizer, reference):
    letters = np.random.default_rng(7).integers(97, 103, (20, 9000), np.uint8)
    for row in letters:
        text = row.tobytes().decode()
        assert in_pieces(tokenizer, text) == reference.encode(text)


def test_windows_grow_where_they_have_no_token_in_common():
    sizes = np.array([1, 2, 3])
    seen = []

    def encode(data):  # as if merges reached over 500 bytes
        seen.append(len(data))
        first = [] if len(data) > 500 else [1]
        threes, ones = divmod(len(data) - 2 * len(first), 3)
        return first + [2] * threes + [0] * ones

    ids = np.concatenate(list(words.word_ids(b"a" * 9001, encode, sizes)))
    assert ids.tolist() == [2] * 3000 + [0]
    assert 500 < max(seen) < 9001


def test_windows_without_a_token_in_common_are_an_error(monkeypatch):
    monkeypatch.setattr(words, "MAX_WINDOW", 4096)
    sizes = np.array([1, 2, 3])
    with pytest.raises(ValueError, match="no token in common"):
        list(words.word_ids(b"a" * 20_002, lambda data: [1] + [2] * (len(data) // 3), sizes))


def test_a_long_word_of_characters_that_encoders_disagree_on_is_not_cut():
    assert words.is_stable("日本 a1é😀")
    assert not words.is_stable("a\U0001fbff")
    assert unicodedata.category("\U0001fbff") == "Cn"
    document = ("\U0001fbff" * 3000).encode()
    assert words.words_of(GPT2_PATTERN).next(document, 0, 300) is None


def test_an_unknown_pattern_has_no_words():
    assert words.words_of(r"\w+|\W+") is None
    assert words.words_of(None) is None
