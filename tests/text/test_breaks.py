"""Long documents in pieces: the ids are those of the whole, for tokenizers of every make."""

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from millrace.text import breaks
from millrace.text.bpe import HuggingFaceTokenizer
from millrace.text.load import gpt2

WORDS = [
    "the",
    "cat",
    "sat",
    "12",
    "345",
    "it's",
    "Ünïcode",
    "東京",
    "x",
    "foo.bar(baz)",
    "été",
    "A",
    "<turn>",
    "don't",
]
GAPS = [" ", " ", " ", "  ", "\n", "\n\n", ", ", ".\n", " \n ", "\t", "。", "   \n"]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def text(seed, count):
    chooser = random.Random(seed)
    return "".join(chooser.choice(WORDS) + chooser.choice(GAPS) for _ in range(count))


def made(kind):
    corpus = [text(seed, 300) for seed in range(20)]
    if kind in ("wordpiece", "unigram"):
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]") if kind == "wordpiece" else models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer() if kind == "wordpiece" else pre_tokenizers.Metaspace()
        trainer = (
            trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"])
            if kind == "wordpiece"
            else trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>")
        )
    elif kind == "prefixed":  # as Llama 2: no splitting, a space before the text
        backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], max_token_length=12)
    else:
        backend = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "split")
        split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level]) if kind == "split" else level
        trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(corpus, trainer)
    if kind == "added":
        backend.add_tokens([AddedToken("<turn>", lstrip=True, rstrip=True), AddedToken("the cat")])
    return HuggingFaceTokenizer(backend.to_str().encode(), kind)


@pytest.mark.parametrize("kind", ["bytelevel", "split", "added", "wordpiece", "unigram", "prefixed"])
@pytest.mark.parametrize("fast", [True, False])
def test_the_ids_of_pieces_are_those_of_the_whole(monkeypatch, kind, fast):
    tokenizer = made(kind)
    if not fast:
        tokenizer.use("tokenizers")
    pieces = []
    monkeypatch.setattr(breaks, "SECTION_BYTES", 200)
    real = breaks.cut
    monkeypatch.setattr(breaks, "cut", lambda *a: pieces.append(list(real(*a))) or pieces[-1])
    for seed in range(30):
        document = text(seed + 100, 400)
        expected = tokenizer._backend.encode(document, add_special_tokens=False).ids
        ids, lengths = tokenizer.encode_documents([document.encode(), b"short"])
        assert ids[: lengths[0]].tolist() == expected
        assert lengths[1] == len(tokenizer.encode("short"))
        starts, stops = tokenizer.places(document.encode(), np.array(expected))
        assert starts.tolist() == sorted(starts.tolist())
        assert len(starts) == len(stops) == len(expected)
        for piece in tokenizer.encode_sections(document.encode()):
            there = (starts >= piece.start) & (starts < piece.stop)
            assert piece.ids.tolist() == np.array(expected)[there].tolist()
    assert all(len(cuts) > 5 for cuts in pieces if cuts[-1].stop > 1000)
    assert max(stop - start for cuts in pieces for start, stop, _ in cuts) < 2000


def test_what_the_fast_encoder_gives_up_on_is_encoded_in_pieces():
    """A run of a million spaces: only the piece that holds it goes to the slow encoder."""
    tokenizer, slow = gpt2(), []
    real = tokenizer._lists
    tokenizer._lists = lambda texts: slow.extend(map(len, texts)) or real(texts)
    document = text(1, 400_000) + " " * 1_100_000 + "end " + text(2, 400_000)
    ids, _ = tokenizer.encode_documents([document.encode()])
    assert tokenizer.decode(ids) == document
    assert sum(slow) < 3_500_000 < len(document)
    pieces = [
        tokenizer._fast.encode_documents([part.encode()])[0] for part in (document[:100_000], document[-100_000:])
    ]
    assert ids[: len(pieces[0]) - 5].tolist() == pieces[0][:-5].tolist()
    assert ids[len(ids) - len(pieces[1]) + 5 :].tolist() == pieces[1][5:].tolist()


def test_a_text_that_cannot_be_cut_stays_whole_up_to_a_limit(monkeypatch):
    def never(texts):
        return [[1]] * 3

    monkeypatch.setattr(breaks, "SECTION_BYTES", 100)
    monkeypatch.setattr(breaks, "WHOLE_BYTES", 1000)
    assert list(breaks.cut(b"a" * 1000, never)) == [(0, 1000, False)]
    assert list(breaks.cut(b"a b" * 300, never)) == [(0, 900, False)]
    assert list(breaks.cut(b"", never)) == [(0, 0, False)]
    with pytest.raises(breaks.Uncuttable, match="no place in 1000 bytes") as caught:
        list(breaks.cut(b"a" * 1001, never))
    assert caught.value.offset == 0
