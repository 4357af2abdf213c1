"""gigatoken: tiktoken's ids on hard text, also where its tables of Unicode differ; bounded memory; another engine behind it."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.native import core
from millrace.text import giga
from millrace.text.giga import OTHER, GigatokenEngine
from millrace.text.load import gpt2
from millrace.text.ranks import SEPARATOR, RankEngine
from millrace.text.tokenizer import measured, with_ends

SPACES = [
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x85",
    "\xa0",
    "\u1680",
    "\u2003",
    "\u2028",
    "\u202f",
    "\u3000",
]
ENDINGS = ["'s", "'S", "'t", "'re", "'ve", "'ll", "'d", "'m", "'", "''", "'lx", "\u2019s", "'\u017f"]
WORDS = ["a", "hello", "été", "日本語", "हिन्दी", "ǅ", "ʰ", "²", "½", "Ⅷ", "٣", "𝟘", "ﷺ", "🙂", "👨\u200d👩\u200d👧",
         "e\u0301", "\u20dd", "_", "123", "$", "<|endoftext|>", "\x00", "\x7f", "\uffff", "\U0010ffff", "\ufe0f", "\u200b",
         "\ufeff", SEPARATOR]  # fmt: skip
NEWER = ["\u088f", "\ua7ce", "\U00018d95", "\U000332da"]  # letters since Unicode 17
pieces = st.tuples(st.sampled_from([*SPACES, *ENDINGS, *WORDS, *NEWER]), st.sampled_from([1, 1, 1, 2, 3, 17, 64])).map(
    lambda pair: pair[0] * pair[1]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
texts = st.lists(pieces, max_size=10).map("".join)


@pytest.fixture(scope="module")
def engines():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLRACE_BPE", "gigatoken")
        fast, exact = gpt2()._engines
    assert (type(fast), type(exact)) == (GigatokenEngine, RankEngine)
    return fast, exact


def assert_same(engines, documents):
    (ids, lengths), (exact_ids, exact_lengths) = (engine.encode_documents(documents) for engine in engines)
    assert lengths.tolist() == exact_lengths.tolist()
    assert np.array_equal(ids, exact_ids)


def assert_same_with_ends(engines, documents):
    exact = engines[1].encode_documents(documents)
    for dtype in (np.dtype(np.uint16), np.dtype(np.uint32)):
        spaced = engines[0].encode_spaced(documents, dtype, 50256)
        assert spaced[0].dtype == dtype
        assert all(map(np.array_equal, spaced, with_ends(*exact, dtype, 50256)))


@given(st.lists(texts, max_size=6))
@example([])
@example([""])
@example(["", "a", ""])
@example([f"{letter}'s" for letter in NEWER])
@settings(max_examples=400)
def test_any_text_has_the_ids_of_tiktoken(engines, found):
    assert_same(engines, [text.encode() for text in found])
    assert_same_with_ends(engines, [text.encode() for text in found])


# What may stand at the edges of documents, where the core decides what to put between them.
edges = st.sampled_from(
    ["", "a", "Z", "1", ".", "'", "'s", "\\", "~", "!", *SPACES, "\x00", "\x1f", "\x7f", "é", "\u3000"]
)


@given(st.lists(st.tuples(edges, texts, edges).map("".join), max_size=12))
@settings(max_examples=400)
def test_documents_joined_by_the_core_have_the_ids_they_have_alone(engines, found):
    assert_same_with_ends(engines, [text.encode() for text in found])


@given(st.lists(texts, max_size=6))
def test_documents_are_measured_by_the_core_as_without_it(found):
    documents = [text.encode() for text in found]
    lengths, characters = measured(documents)
    assert lengths.tolist() == list(map(len, documents))
    assert characters.tolist() == list(map(len, found))


def test_ids_that_cross_the_end_of_a_document_are_not_believed(engines, monkeypatch):
    class Shifted:
        def encode(self, data):
            return np.frombuffer(data, np.uint8).astype(np.uint32)  # no byte of its vocabulary

    monkeypatch.setattr(engines[0], "_backend", Shifted())
    assert_same_with_ends(engines, [b"something", b"else", b" and more"])


@pytest.mark.parametrize("given", [(b"one",), iter([b"one"]), None, 3, [b"one", "two"]])
def test_the_core_refuses_documents_that_are_no_list_of_bytes(given):
    for function, more in ((core.measured, ()), (core.spaced, ()), (core.joined, (b"<>",))):
        with pytest.raises(TypeError):
            function(given, *more)


@pytest.mark.parametrize(
    ("arrays", "width"), [((4, 1, 8, 0), 2), ((4, 2, 8, 1), 1), ((4, 3, 16, 0), 2), ((4, 2, 8, 0), 4)]
)
def test_the_core_refuses_arrays_that_do_not_fit(arrays, width):
    num_ids, room, num_lengths, num_kinds = arrays
    with pytest.raises(ValueError, match="do not fit"):
        core.parted(
            bytes(4 * num_ids), bytes(200), bytes(num_lengths), bytes(num_kinds), (1, 2, 3, 4), bytearray(room * width),
            width, bytearray(8),
        )  # fmt: skip


def test_letters_of_a_newer_unicode_are_left_to_tiktoken(engines, monkeypatch):
    for letter in NEWER:
        text = f"{letter}'s".encode()
        if np.array_equal(engines[0]._encode([text])[0], engines[1].encode_documents([text])[0]):
            continue  # a tiktoken that knows them too
        assert engines[0]._classes_of(letter).tolist() == [OTHER]
        assert_same(engines, [b"plain", text, b"plain", text, text])


def test_characters_of_every_script_have_the_ids_of_tiktoken(engines):
    points = [chr(point) for point in range(0x110000) if unicodedata.category(chr(point)) not in ("Cs", "Cn", "Co")][
        ::7
    ]
    shapes = ("{}", "{}'ll", "a{}", " {}", "  {} ", "1{0}1{0}a{0}")
    assert_same(engines, [shape.format(point).encode() for point in points for shape in shapes])


@pytest.mark.parametrize("unit", [b"a", b" ", b"\n", b"ab ", b"0123456789", "é".encode(), "日本".encode()])
def test_long_runs_have_the_ids_of_tiktoken(engines, unit):
    assert_same(engines, [unit * (200_000 // len(unit)) + b"x", b"y"])


def test_long_documents_are_left_to_tiktoken(engines, monkeypatch):
    monkeypatch.setattr(giga, "MAX_DOCUMENT", 10)
    seen: list[int] = []
    encode = GigatokenEngine._encode
    monkeypatch.setattr(GigatokenEngine, "_encode", lambda self, d: seen.extend(map(len, d)) or encode(self, d))
    assert_same(engines, [b"short", b"longer than ten", b"end"])
    assert seen == [5, 3]


GROWING = """
import numpy as np
from millrace.text import giga
from millrace.text.load import gpt2

(fast, exact), made = gpt2()._engines, []
renew = fast._renew
fast._renew = lambda: made.append(1) or renew()
giga.LOOK_BYTES, giga.MAX_GROWTH = 1 << 20, 16 << 20
letters = np.random.default_rng(0).integers(97, 123, (16, 1_000_000), np.uint8)  # 5 MB of growth each
letters[:, ::6] = 32
for row in letters:
    assert all(map(np.array_equal, *(engine.encode_documents([row.tobytes()]) for engine in (fast, exact))))
print(fast.name, 0 < len(made) < len(letters), made)
"""


def test_it_is_made_anew_when_it_has_grown():
    """In a process of its own: one that has just given back memory of other tests does not grow."""
    env = os.environ | {"MILLRACE_BPE": "gigatoken"}
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True, env=env, timeout=100)
    assert done.stdout.startswith("gigatoken True"), done.stdout + done.stderr


def test_ids_that_stand_for_other_text_are_not_believed(engines, monkeypatch):
    class Lossy:
        def encode(self, data):
            return np.array([262], np.uint32)  # " the"

    monkeypatch.setattr(engines[0], "_backend", Lossy())
    assert_same(engines, [b"something else"])


def test_without_gigatoken_tiktoken_is_used(monkeypatch):
    monkeypatch.setenv("MILLRACE_BPE", "gigatoken")
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    assert gpt2().engine == "tiktoken"


@pytest.mark.parametrize("engine", [*(["millrace"] if core else []), "gigatoken", "tiktoken", "tokenizers"])
def test_the_environment_names_the_fastest_engine_that_may_be_used(monkeypatch, engine):
    monkeypatch.setenv("MILLRACE_BPE", engine)
    assert gpt2().engine == engine


@pytest.mark.parametrize("way", ["encode_documents", "encode_spaced"])
def test_a_check_that_finds_a_difference_goes_to_the_next_engine(monkeypatch, way):
    monkeypatch.setenv("MILLRACE_BPE", "gigatoken")
    tokenizer = gpt2()
    monkeypatch.setattr(GigatokenEngine, way, lambda self, *_: (np.zeros(1, np.uint32), np.ones(1, np.int64)))
    assert tokenizer.check([b"some text"])
    assert tokenizer.engine == "tiktoken"
