"""A chunk of documents in one text: whatever takes documents takes it as it takes a list."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from millrace.native import core
from millrace.text.bpe import ENCODERS, HuggingFaceTokenizer
from millrace.text.documents import Documents, Masks, hash_core, hash_python, measure_core, measure_python
from millrace.text.load import gpt2
from millrace.text.simple import BytesTokenizer, CharTokenizer, space_core, space_python

TEXTS = st.text(st.sampled_from("ab \n'stZ09_é日🙂\xa0"), max_size=40) | st.text(max_size=20)
DOCUMENTS = st.lists(st.tuples(TEXTS.map(str.encode), st.binary(max_size=3)), max_size=12)
FUNCTIONS = {
    "hash_documents": (),
    "measure": (),
    "join_with_zeros": (),
    "clean_documents": (None,),
}  # with more arguments


def chunk(some):
    """Documents with a gap after each."""
    text, starts = b"before", []
    for document, gap in some:
        starts.append(len(text))
        text += document + gap
    starts = np.array(starts, np.int64)
    return Documents(text, starts, starts + np.array([len(document) for document, _ in some], np.int64))


@given(DOCUMENTS)
def test_it_is_a_sequence_of_bytes(some):
    documents, found = [document for document, _ in some], chunk(some)
    assert list(found) == [found[k] for k in range(len(found))] == list(Documents.of(documents)) == documents
    assert list(found[1:3]) == documents[1:3]
    assert found.lengths.tolist() == [len(document) for document in documents]
    assert found.num_bytes == sum(map(len, documents))
    assert list(found.take(np.arange(0, len(documents), 2))) == documents[::2]
    assert Documents.of(found) is found


def test_a_single_document_is_not_copied():
    document = b"x" * 1000
    documents = Documents.of([document], [5], None, 3)
    assert documents.text is documents[0] is document
    assert (documents.offsets.tolist(), documents.piece_of) == ([5], 3)


SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3)


@given(st.lists(st.lists(st.tuples(st.binary(max_size=5), SPANS), min_size=1, max_size=5), min_size=1, max_size=4))
def test_joined_and_taken_ones_keep_offsets_and_masks(groups):
    documents = [document for group in groups for document, _ in group]
    spans = [np.array(pairs, np.int64).reshape(-1, 2) for group in groups for _, pairs in group]
    ends = np.cumsum([len(group) for group in groups]).tolist()
    chunks = [Documents.of(documents[a:b], range(a, b), spans[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    joined = Documents.join(chunks)
    for numbers in (np.arange(len(documents)), np.arange(len(documents))[::2]):
        taken = joined.take(numbers)
        assert list(taken) == [documents[k] for k in numbers]
        assert taken.offsets.tolist() == numbers.tolist()
        assert [taken.masks.of(k).tolist() for k in range(len(taken))] == [spans[k].tolist() for k in numbers]
    assert Documents.join(chunks[:1]) is chunks[0]


def test_pieces_stay_pieces_when_they_are_joined():
    pieces = [Documents.of([b"a"], [4], None, 4), Documents.of([b"b"], [5], None, 4)]
    joined = Documents.join(pieces)
    assert (list(joined), joined.offsets.tolist(), joined.piece_of, joined.masks) == ([b"a", b"b"], [4, 5], 4, None)
    assert joined.take(np.array([1])).piece_of == 4


def test_the_masks_of_a_document_are_its_own():
    masks = Masks(np.array([[0, 1], [2, 3], [5, 9]]), np.array([0, 2, 2, 3]))
    assert [masks.of(k).tolist() for k in range(3)] == [[[0, 1], [2, 3]], [], [[5, 9]]]


@pytest.mark.needs_core
@given(DOCUMENTS)
def test_the_core_agrees_with_its_twins(some):
    documents = chunk(some)
    assert [part.tolist() for part in measure_core(documents)] == [part.tolist() for part in measure_python(documents)]
    assert hash_core(documents) == hash_python(documents)
    assert [part.tolist() for part in space_core(documents)] == [part.tolist() for part in space_python(documents)]


@given(DOCUMENTS)
def test_characters_are_those_python_counts(some):
    lengths, characters = measure_python(chunk(some))
    assert lengths.tolist() == [len(document) for document, _ in some]
    assert characters.tolist() == [len(document.decode()) for document, _ in some]


@pytest.mark.needs_core
def test_hashes_are_those_of_xxhash():
    rng = np.random.default_rng(0)
    sizes = [*range(1200), 2047, 2048, 2049, 65_536, 100_001]
    documents = [rng.bytes(size) for size in sizes] + [bytes(size) for size in range(300)]
    assert hash_core(Documents.of(documents)) == b"".join(map(xxhash.xxh3_128_digest, documents))


@pytest.fixture(scope="module")
def tokenizers():
    file = gpt2().to_file()
    with pytest.MonkeyPatch.context() as patch:
        made = [BytesTokenizer()]
        for encoder in ENCODERS[not core :]:
            patch.setenv("MILLRACE_BPE", encoder)
            made.append(HuggingFaceTokenizer(file, "gpt2", plain_special=True))
    assert [getattr(t, "encoder", t.name) for t in made] == ["bytes", *ENCODERS[not core :]]
    return made


@given(some=DOCUMENTS)
def test_tokenizers_give_the_same_ids(tokenizers, some):
    documents, found = [document for document, _ in some], chunk(some)
    characters = CharTokenizer("a" + "".join(document.decode() for document in documents))
    for tokenizer in (*tokenizers, characters):
        expected = [np.array(part) for part in tokenizer.encode_spaced(documents)]  # the next call may write over them
        for part, other in zip(expected, tokenizer.encode_spaced(found), strict=True):
            assert np.array_equal(part, other)


def test_a_special_token_is_found_in_it():
    tokenizer = HuggingFaceTokenizer(gpt2().to_file(), "gpt2")
    some = [(b"a<|endoftext|>b", b""), (b"c<|endo", b""), (b"ftext|>", b"")]
    tokens, lengths = tokenizer.encode_spaced(chunk(some))
    expected = tokenizer.encode_with_ends([document for document, _ in some])
    assert np.array_equal(tokens, expected[0])
    assert np.array_equal(lengths, expected[1])
    assert tokens[1] == tokenizer.end


@pytest.mark.needs_core
@pytest.mark.parametrize(
    ("starts", "stops"), [([-1], [2]), ([0], [4]), ([2], [1]), ([0, 1], [1]), ([0], [1, 2]), ([2**62], [2**62])]
)
def test_the_core_refuses_documents_outside_of_their_text(starts, stops):
    given = (b"abc", np.array(starts), np.array(stops))
    for name, more in FUNCTIONS.items():
        with pytest.raises(ValueError, match="outside of their text"):
            getattr(core, name)(given, *more)
