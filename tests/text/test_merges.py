"""The core's encoder gives tiktoken's ids on any text; what it does not know goes to another encoder."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.native import core
from millrace.text import kinds as kinds_module
from millrace.text import merges
from millrace.text.documents import Documents
from millrace.text.kinds import NUM_KINDS, UNKNOWN, ask_kinds, kinds
from millrace.text.load import gpt2
from millrace.text.merges import MergeEncoder, merges_of
from millrace.text.ranks import RankEncoder, byte_alphabet, core_merges, fast_encoder, rank_encoder
from millrace.text.tokenizer import add_ends

pytestmark = pytest.mark.needs_core
# A character that is a letter, a number, white space or none of these has other ids here than one of another class.
PROBES = ("{}'s", " {}'s", "   {}", "{}   a", "a{0}b 1{0}2 .{0}.", "\n{0}\n {0}")
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u3000"]
ENDINGS = ["'s", "'S", "'t", "'re", "'ve", "'ll", "'d", "'m", "'", "''", "'lx", "'v", "'s's", "\u2019s", "'\u017f"]
WORDS = ["a", "hello", "été", "日本語", "हिन्दी", "ǅ", "ʰ", "²", "½", "Ⅷ", "٣", "𝟘", "ﷺ", "🙂", "👨\u200d👩\u200d👧", "e\u0301",
         "\u20dd", "_", "123", "$", "<|endoftext|>", "\x00", "\x7f", "\uffff", "\U0010ffff", "\u200b", "\ufeff"]  # fmt: skip
NEWER = ["\u088f", "\ua7ce", "\U00018d95", "\U000332da"]  # letters since Unicode 17
pieces = st.tuples(
    st.sampled_from([*SPACES, *ENDINGS, *WORDS, *NEWER]), st.sampled_from([1, 1, 1, 2, 3, 17, 64, 130])
).map(lambda pair: pair[0] * pair[1]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ascii_pieces = st.sampled_from([*SPACES[:8], *ENDINGS[:13], "a", "Hello", "_", "123", ".", "\x00"])
texts = st.lists(pieces, max_size=10).map("".join) | st.lists(ascii_pieces, max_size=60).map("".join)


@pytest.fixture(scope="module")
def body():
    return gpt2()._body


@pytest.fixture(scope="module")
def exact(body):
    return rank_encoder(body)


@pytest.fixture(scope="module", params=[np.uint16, np.uint32])
def encoder(request, body, exact):
    dtype = np.dtype(request.param)
    return MergeEncoder(merges_of(body["model"], byte_alphabet()), 50256, dtype, lambda: exact)


def assert_same(encoder, exact, documents):
    expected = exact.encode_documents(documents)
    assert all(map(np.array_equal, encoder.encode_documents(documents), expected))
    spaced = encoder.encode_spaced(documents)
    assert spaced[0].dtype == encoder._dtype
    assert all(map(np.array_equal, spaced, add_ends(*expected, encoder._dtype, 50256)))


@given(st.lists(texts, max_size=6))
@example([])
@example(["", "a", ""])
@example([f"{letter}'s" for letter in NEWER])
@settings(max_examples=600, deadline=None)
def test_any_text_has_the_ids_of_tiktoken(encoder, exact, found):
    assert_same(encoder, exact, [text.encode() for text in found])


@pytest.mark.parametrize("ending", ["'s", "'ll", "'s't", "  ", " \n", "  a", "'", "12"])
@pytest.mark.parametrize("before", ["a", " ", ".", "é"])
def test_words_that_cross_a_block_have_the_ids_of_tiktoken(encoder, exact, before, ending):
    """The core looks at 64 bytes at a time."""
    documents = [(before * n + ending + rest).encode() for n in range(58, 70) for rest in ("", "x", " x", "'re", "\n")]
    assert_same(encoder, exact, documents)


def test_real_text_has_the_ids_of_tiktoken(encoder, exact, real, odd):
    for _ in range(2):  # with words that are new, then kept
        assert_same(encoder, exact, [*real, *odd])


def test_threads_may_encode_at_once(encoder, exact, at_once):
    texts = [[f"{word} {number} ".encode() * 40] for number, word in enumerate(["lorem", "ipsum", "dolor", "sit"])]
    wanted, problems = [exact.encode_documents(documents) for documents in texts], []

    def encode(mine):
        for _ in range(300):
            found = encoder.encode_documents(texts[mine])
            if not all(map(np.array_equal, found, wanted[mine])):
                problems.append(mine)

    at_once(*(partial(encode, mine) for mine in range(len(texts))))
    assert problems == []


def test_words_that_take_the_place_of_others_have_the_ids_of_tiktoken(encoder, exact):
    """Ten times as many as there are places for."""
    rng = np.random.default_rng(0)
    for size in (4, 20, 60):
        for _ in range(2):
            letters = rng.integers(97, 123, (60_000, size), np.uint8)
            letters[:, 0] = 32
            assert_same(encoder, exact, [some.tobytes() for some in np.split(letters, 60)])


@pytest.mark.parametrize("unit", ["a", " ", "\n", "-", "0123456789", "é", "日本", "ab"])
def test_long_words_have_the_ids_of_tiktoken(encoder, exact, unit):
    assert_same(encoder, exact, [unit.encode() * n + b"x" for n in (1, 8, 9, 31, 33, 127, 129, 400, 2048, 4096, 9000)])


@pytest.mark.parametrize("newest", [(15, 1, 0), (3, 2, 0)])
def test_every_character_it_knows_has_the_ids_of_tiktoken(encoder, exact, monkeypatch, newest):
    monkeypatch.setattr(kinds_module, "NEWEST", newest)
    kinds.cache_clear()
    known = np.flatnonzero(kinds() != UNKNOWN).tolist()
    assert len(known) > 60_000
    encoder._core.learn(kinds())
    for start in range(0, len(known), 2000):
        points = known[start : start + 2000]
        documents = [probe.format(chr(point)).encode() for point in points for probe in PROBES]
        counts = np.empty(len(documents), np.int64)
        encoder._core.encode(Documents.of(documents).arrays, np.empty(1 << 20, encoder._dtype), counts)
        assert counts.min() > 0, "none of them is left to another encoder"
        assert_same(encoder, exact, documents)
    kinds.cache_clear()


def test_tiktoken_says_of_every_character_what_python_says_where_they_agree():
    told = kinds()
    points = np.flatnonzero(told != UNKNOWN)
    points = points[points >= 0x80]
    some = np.unique(np.concatenate([points[::37], points[told[points] != merges.kinds()[points - 1]]]))
    assert len(some) > 2000
    assert ask_kinds(some.tolist()) == told[some].tolist()


def test_what_characters_are_that_python_does_not_tell_is_asked(body, exact):
    encoder = MergeEncoder(
        merges_of(body["model"], byte_alphabet()),
        50256,
        np.dtype("<u2"),
        lambda: pytest.fail("another encoder was made"),
    )
    unknown = np.flatnonzero(kinds() == UNKNOWN)
    unknown = unknown[(unknown < 0xD800) | (unknown > 0xDFFF)]
    rng = np.random.default_rng(0)
    points = [*rng.choice(unknown, 1500, replace=False).tolist(), *map(ord, NEWER), 0x20000, 0x2A6D6, 0xE0067, 0x10FFFF]
    for start in range(0, len(points), 100):
        some = [chr(point) for point in points[start : start + 100]]
        assert_same(encoder, exact, [b"plain", "été".encode(), *(p.format(c).encode() for c in some for p in PROBES)])


def test_very_long_words_go_to_the_next_encoder_which_is_made_then(body, exact):
    made = []
    encoder = MergeEncoder(
        merges_of(body["model"], byte_alphabet()), 50256, np.dtype("<u2"), lambda: made.append(1) or exact
    )
    newer = f"{NEWER[0]}'s".encode()
    assert_same(encoder, exact, [b"plain", "été 日本語 🙂".encode(), newer, b"a" * 4096])
    assert not made
    for document in (b"a" * 4097, newer + b"a" * 4097):
        assert_same(encoder, exact, [b"plain", document, b"", document, document, "é".encode(), newer])
    assert made == [1]


def test_documents_that_are_too_long_for_the_next_encoder_are_given_back(encoder, monkeypatch):
    monkeypatch.setattr(merges, "MAX_DOCUMENT", 5000)
    assert len(encoder.encode_spaced([b"a b" * 3000])[1]) == 1
    with pytest.raises(ValueError, match="too long"):
        encoder.encode_spaced([b"a" * 6000])


def test_gpt2_runs_on_it_and_makes_no_other(monkeypatch):
    monkeypatch.setattr(RankEncoder, "__init__", lambda *_: pytest.fail("tiktoken's core was made"))
    tokenizer = gpt2()
    assert tokenizer.encoder == "millrace"
    assert tokenizer.check([b"some text", "und größer".encode()])


@pytest.mark.parametrize("way", ["encode_documents", "encode_spaced"])
def test_a_check_that_finds_a_difference_goes_to_the_next_encoder(monkeypatch, way):
    tokenizer = gpt2()
    monkeypatch.setattr(MergeEncoder, way, lambda self, *_: (np.zeros(1, np.uint32), np.ones(1, np.int64)))
    assert tokenizer.check([b"some text"])
    assert tokenizer.encoder == "tiktoken"
    assert isinstance(tokenizer._fast, RankEncoder)


@pytest.mark.parametrize("change", [{"dropout": 0.1}, {"merges": [["a", "zzzz"]]}, {"ignore_merges": True}])
def test_a_model_that_is_more_than_its_merges_is_left_to_others(body, change):
    changed = {**body, "model": {**body["model"], **change}}
    assert not isinstance(fast_encoder(core_merges(changed), 50257, 50256, lambda: changed), MergeEncoder)


def test_a_vocabulary_that_is_too_large_is_left_to_others(body):
    merges = core_merges(body)
    large = merges._replace(merges=merges.merges + (1 << 21))
    assert fast_encoder(large, 1 << 22, 50256, lambda: body).name == "tiktoken"


def test_the_core_refuses_what_does_not_fit(body):
    found, byte_ids = merges_of(body["model"], byte_alphabet())
    for arguments in (
        (byte_ids[:-1], found, 0, 2), (byte_ids, found.reshape(-1)[:-1], 0, 2), (byte_ids, found, 0, 3),
        (byte_ids, found, 1 << 16, 2), (byte_ids, found + (1 << 21), 0, 4),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="Bpe"):
            core.Bpe(*arguments)
    bpe, counts = core.Bpe(byte_ids, found, 50256, 2), np.empty(1, np.int64)
    with pytest.raises(ValueError, match="counts"):
        bpe.encode(Documents.of([b"a", b"b"]).arrays, np.empty(1000, np.uint16), counts)
    for documents in ((b"a",), None, [b"a"], "abc"):
        with pytest.raises(TypeError):
            bpe.encode(documents, np.empty(1000, np.uint16), counts)
    with pytest.raises(ValueError, match="learn"):
        bpe.learn(bytes(NUM_KINDS - 1))
    assert bpe.encode(Documents.of([b"a" * 1000]).arrays, np.empty(1000, np.uint16), counts) == -1
    assert bpe.encode(Documents.of(["é".encode()]).arrays, np.empty(1000, np.uint16), counts) == 0
    assert counts.tolist() == [-1]
    bpe.learn(kinds())
    for invalid in (b"a\xff", b"\xc3", b"\x80", b"\xe2\x82", b"\xf0\x9f\x99"):
        assert bpe.encode(Documents.of([invalid]).arrays, np.empty(1000, np.uint16), counts) == 0, (
            "left to another, which says what is wrong"
        )
