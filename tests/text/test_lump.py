"""Documents that lie in one text: to everything that takes documents they are those of a list."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from millrace.native import core
from millrace.text.bpe import HuggingFaceTokenizer
from millrace.text.load import gpt2
from millrace.text.lump import Lump, for_core, lengths_of, num_bytes, take
from millrace.text.simple import BytesTokenizer, CharTokenizer

pytestmark = pytest.mark.needs_core

TEXTS = st.text(st.sampled_from("ab \n'stZ09_é日🙂\xa0"), max_size=40) | st.text(max_size=20)
DOCUMENTS = st.lists(st.tuples(TEXTS.map(str.encode), st.binary(max_size=3)), max_size=12)
FUNCTIONS = {
    "hashed": (),
    "measured": (),
    "spaced": (),
    "joined": (b"<>",),
    "cleaned": (None,),
}  # and what else they take


def lump(some):
    """Documents with what stands behind each."""
    text, starts = b"before", []
    for document, gap in some:
        starts.append(len(text))
        text += document + gap
    starts = np.array(starts, np.int64)
    return Lump(text, starts, starts + np.array([len(document) for document, _ in some], np.int64))


@given(DOCUMENTS)
def test_it_is_a_sequence_of_bytes(some):
    documents, found = [document for document, _ in some], lump(some)
    assert list(found) == [found[k] for k in range(len(found))] == documents
    assert list(found[1:3]) == documents[1:3]
    assert (num_bytes(found), lengths_of(found).tolist()) == (num_bytes(documents), lengths_of(documents).tolist())
    kept = np.arange(0, len(documents), 2)
    assert list(take(found, kept)) == take(documents, kept) == documents[::2]


@given(DOCUMENTS)
def test_the_core_does_with_it_what_it_does_with_a_list(some):
    documents, found = [document for document, _ in some], lump(some)
    for name, more in FUNCTIONS.items():
        function = getattr(core, name)
        assert function(for_core(found), *more) == function(documents, *more)


def test_hashes_are_those_of_xxhash():
    rng = np.random.default_rng(0)
    sizes = [*range(1200), 2047, 2048, 2049, 65_536, 100_001]
    documents = [rng.bytes(size) for size in sizes] + [bytes(size) for size in range(300)]
    assert core.hashed(documents) == b"".join(map(xxhash.xxh3_128_digest, documents))


@pytest.fixture(scope="module")
def tokenizers():
    own = gpt2()
    with pytest.MonkeyPatch.context() as patch:
        made = [own, BytesTokenizer()]
        for engine in ("gigatoken", "tiktoken", "tokenizers"):
            patch.setenv("MILLRACE_BPE", engine)
            made.append(HuggingFaceTokenizer(own.to_file(), "gpt2", plain_special=True))
    assert [getattr(t, "engine", t.name) for t in made] == ["millrace", "bytes", "gigatoken", "tiktoken", "tokenizers"]
    return made


@given(some=DOCUMENTS)
def test_tokenizers_give_the_same_ids(tokenizers, some):
    documents, found = [document for document, _ in some], lump(some)
    characters = CharTokenizer("a" + "".join(document.decode() for document in documents))
    for tokenizer in (*tokenizers, characters):
        expected = [np.array(part) for part in tokenizer.encode_spaced(documents)]  # the next call may write over them
        for part, other in zip(expected, tokenizer.encode_spaced(found), strict=True):
            assert np.array_equal(part, other)


def test_a_special_token_is_found_in_it():
    tokenizer = HuggingFaceTokenizer(gpt2().to_file(), "gpt2")
    some = [(b"a<|endoftext|>b", b""), (b"c<|endo", b""), (b"ftext|>", b"")]
    tokens, lengths = tokenizer.encode_spaced(lump(some))
    expected = tokenizer.encode_with_ends([document for document, _ in some])
    assert np.array_equal(tokens, expected[0])
    assert np.array_equal(lengths, expected[1])
    assert tokens[1] == tokenizer.end


@pytest.mark.parametrize(
    ("starts", "stops"), [([-1], [2]), ([0], [4]), ([2], [1]), ([0, 1], [1]), ([0], [1, 2]), ([2**62], [2**62])]
)
def test_the_core_refuses_documents_outside_of_their_text(starts, stops):
    given = (b"abc", np.array(starts), np.array(stops))
    for name, more in FUNCTIONS.items():
        with pytest.raises(ValueError, match="outside of their text"):
            getattr(core, name)(given, *more)
