"""--mask-field: which tokens count for the loss, against a mask worked out byte by byte."""

import io
import itertools
import json
from pathlib import Path

import hypothesis
import numpy as np
import pyarrow
import pytest
from hypothesis import strategies as st
from pyarrow import parquet

import millrace as mr
from millrace.prepare.text.clean.masks import end_counts, parse_mask, token_mask
from millrace.testing import tree_digest

OPTIONS = {"tokenizer": "bytes", "val": 0, "normalize": False, "mask_field": "loss", "workers": 1}
RECORDS = [
    {"text": "Q: two and two? A: four", "loss": [[19, 23]]},
    {"text": "all of it", "loss": True},
    {"text": "nothing", "loss": []},
    {"text": "Où? 東京 🙂 là", "loss": [[4, 6], [7, 8]]},
    {"text": "overlapping and apart", "loss": [[16, 21], [0, 4], [2, 6], [9, 9]]},
]


def counts(record):
    """Oracle: for every byte of the text whether its character counts, and whether the end does."""
    spans = [[0, len(record["text"])]] if record["loss"] is True else record["loss"] or []
    inside = [any(start <= k < stop for start, stop in spans) for k in range(len(record["text"]))]
    by_byte = [flag for flag, character in zip(inside, record["text"], strict=True) for _ in character.encode()]
    return by_byte, inside[-1]


def write(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return str(path)


def stored(store):
    tokens, mask, offsets = store.columns["tokens"][:], store.columns["mask"][:], store.offsets[:].tolist()
    return [(tokens[a:b].tolist(), mask[a:b].tolist()) for a, b in itertools.pairwise(offsets)]


def test_packed_conversations_count_only_what_the_mask_names(tmp_path):
    mr.prepare_text(write(tmp_path / "a.jsonl", RECORDS), tmp_path / "out", **OPTIONS)
    store = mr.open_store(tmp_path / "out")
    view = mr.Packed(store, length=256)
    block, found = view[0], {}
    assert len(view) == 1
    for document, target in zip(block["document"][block["mask"]], block["y"][block["mask"]], strict=True):
        found.setdefault(int(document), []).append(int(target))
    marked = [[t for t, flag in zip(tokens[1:], mask[1:], strict=True) if flag] for tokens, mask in stored(store)]
    assert sorted(found.values()) == sorted(targets for targets in marked if targets)
    assert len(found) == 4  # of one document nothing counts


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_every_byte_has_the_mask_of_its_character(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write(path, RECORDS)
    elif kind == "csv":
        import csv

        with open(path, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "loss"])
            rows.writerows([record["text"], json.dumps(record["loss"])] for record in RECORDS)
    else:
        loss = [[[0, len(r["text"])]] if r["loss"] is True else r["loss"] for r in RECORDS]
        column = pyarrow.array(loss, pyarrow.list_(pyarrow.list_(pyarrow.int64())))
        parquet.write_table(
            pyarrow.table({"loss": column, "text": [r["text"] for r in RECORDS]}), path, row_group_size=2
        )
    mr.prepare_text(str(path), tmp_path / "out", part_bytes=40, **OPTIONS)
    store = mr.open_store(tmp_path / "out")
    assert store.columns["mask"].dtype == np.uint8
    for record, (tokens, mask) in zip(RECORDS, stored(store), strict=True):
        by_byte, end = counts(record)
        assert bytes(tokens[:-1]).decode() == record["text"]
        assert mask == [*map(int, by_byte), int(end)]


def tokenizer_file(folder: Path, kind: str) -> str:
    """A small tokenizer of each make."""
    corpus = [record["text"] for record in RECORDS] * 20 + ["the cat sat  on the mat\n\n", "hello world"] * 20
    if kind == "sentencepiece":
        import sentencepiece

        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus), model_writer=model, vocab_size=90, hard_vocab_limit=False, minloglevel=2
        )
        (folder / "a.model").write_bytes(model.getvalue())
        return str(folder / "a.model")
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if kind == "wordpiece":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"])
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(corpus, trainer)
    if kind == "swallowing":
        backend.add_tokens([AddedToken("<turn>", lstrip=True, rstrip=True)])
    backend.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("tokenizer", ["gpt2", "char", "train:300", "wordpiece", "swallowing", "sentencepiece"])
def test_a_token_counts_where_any_of_its_characters_does(tmp_path, tokenizer):
    records = [*RECORDS, {"text": "the cat  <turn>  sat on", "loss": [[3, 8], [20, 23]]}]
    name = tokenizer if tokenizer in ("gpt2", "char", "train:300") else tokenizer_file(tmp_path, tokenizer)
    mr.prepare_text(write(tmp_path / "a.jsonl", records), tmp_path / "out", **{**OPTIONS, "tokenizer": name})
    store = mr.open_store(tmp_path / "out")
    for record, (tokens, mask) in zip(records, stored(store), strict=True):
        by_byte, end = counts(record)
        assert mask[-1] == end
        if tokenizer in ("gpt2", "char", "train:300"):  # exact: the bytes of each token one after the other
            at = 0
            for token, flag in zip(tokens[:-1], mask[:-1], strict=True):
                size = len(store.tokenizer.decode_bytes([token]))
                assert flag == any(by_byte[at : at + size])
                at += size
            assert at == len(by_byte)
        else:
            assert any(mask[:-1]) == any(by_byte)
            assert all(mask[:-1]) == all(by_byte)
    if tokenizer == "swallowing":
        assert [flag for _, flag in zip(*stored(store)[-1], strict=True)][-1] == 1


@hypothesis.given(
    text=st.text(st.sampled_from("abé東🙂\n"), min_size=1, max_size=20),
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4),
    sizes=st.lists(st.integers(0, 3), max_size=30),
)
def test_spans_and_tokens_of_any_size(text, spans, sizes):
    spans = [sorted((min(a, len(text)), min(b, len(text)))) for a, b in spans]
    document, parsed = text.encode(), parse_mask(text, spans)
    by_byte, end = counts({"text": text, "loss": spans})
    edges = np.minimum(np.concatenate(([0], np.cumsum(sizes))), len(document)).astype(np.int64)
    found = token_mask(parsed, edges[:-1], edges[1:])
    expected = [any(by_byte[a : max(b, a + 1)]) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    assert found.astype(bool).tolist() == expected
    assert end_counts(parsed, len(document)) == end


MALFORMED = {
    "null": (None, "it is None; expected a list"),
    "text": ("0-3", "it is '0-3'; expected a list"),
    "a number": (3, "it is 3"),
    "three numbers": ([[0, 1, 2]], r"it holds \[0, 1, 2\]"),
    "a flat list": ([0, 3], "it holds 0"),
    "floats": ([[0, 1.5]], "it holds"),
    "truths": ([[False, True]], "it holds"),
    "backwards": ([[3, 1]], r"it holds \[3, 1\]; expected places in order within the 4 characters"),
    "negative": ([[-1, 2]], ".*places in order"),
    "past the end": ([[0, 5]], ".*within the 4 characters"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_mask_stops_with_its_place_or_is_set_aside(tmp_path, what):
    value, said = MALFORMED[what]
    records = [{"text": "good", "loss": True}, {"text": "evil", "loss": value}, {"text": "fine", "loss": False}]
    source = write(tmp_path / "a.jsonl", records)
    offset = len(json.dumps(records[0])) + 1
    with pytest.raises(mr.SourceError, match=rf"a\.jsonl', byte {offset}: bad mask \('loss'\): {said}") as caught:
        mr.prepare_text(source, tmp_path / "out", **OPTIONS)
    assert caught.value.offset == offset
    assert 'fix line 2, or go on with on_error="skip"' in str(caught.value)
    report = mr.prepare_text(source, tmp_path / "out", on_error="skip", **OPTIONS)
    assert report.dropped == {"unreadable: bad mask": 1}
    assert json.loads((tmp_path / "out" / "quarantine.jsonl").read_text())["offset"] == offset
    assert mr.open_store(tmp_path / "out").num_records == 2


def test_a_missing_or_repeated_field_is_told(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    with pytest.raises(mr.SourceError, match=r"no field 'loss'; it has \['text'\]; choose one with mask_field="):
        mr.prepare_text(str(path), tmp_path / "out", **OPTIONS)
    path.write_text('{"text": "a", "loss": true, "loss": false}\n')
    with pytest.raises(mr.SourceError, match="field 'loss' is twice"):
        mr.prepare_text(str(path), tmp_path / "out", **OPTIONS)
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(mr.SourceError, match=r"no column 'loss'.*mask_field="):
        mr.prepare_text(str(tmp_path / "a.csv"), tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"normalize": True}, "mask_field= needs normalize=False"),
        ({"on_error": "replace"}, "give skip or stop"),
        ({"dedup_unit": "line"}, "masked documents stay whole"),
        ({"mask_field": "text"}, "is the text field itself"),
    ],
)
def test_what_would_move_the_text_under_its_mask_is_refused(tmp_path, options, said):
    with pytest.raises(mr.ConfigError, match=said):
        mr.prepare_text(write(tmp_path / "a.jsonl", RECORDS), tmp_path / "out", **{**OPTIONS, **options})


def test_plain_text_has_no_masks(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(mr.ConfigError, match=r"a\.txt' is plain text; only JSONL, CSV and Parquet have fields"):
        mr.prepare_text([write(tmp_path / "a.jsonl", RECORDS), str(tmp_path / "a.txt")], tmp_path / "out", **OPTIONS)


def test_the_same_text_with_another_mask_is_another_document_of_the_same_split(tmp_path):
    texts = [f"document {k}" for k in range(60)]
    records = [{"text": text, "loss": loss} for loss in (True, [[0, 3]], True) for text in texts]
    report = mr.prepare_text(write(tmp_path / "a.jsonl", records), tmp_path / "out", **{**OPTIONS, "val": 0.3})
    assert report.dropped["duplicate"] == 60
    store = mr.open_store(tmp_path / "out")
    found = {}
    for split in ("train", "val"):
        for tokens, mask in stored(store.split(split)):
            found.setdefault(bytes(tokens[:-1]), []).append((split, sum(mask)))
    assert len(found) == 60
    assert all(len({split for split, _ in where}) == 1 and len(where) == 2 for where in found.values())


def test_an_append_and_any_number_of_workers(tmp_path):
    first, second = (
        write(tmp_path / "a.jsonl", RECORDS),
        write(tmp_path / "b.jsonl", [{"text": "new", "loss": [[1, 2]]}, RECORDS[0]]),
    )
    for name, workers, part_bytes in (("one", 1, 1 << 20), ("two", 2, 60)):
        options = {**OPTIONS, "workers": workers, "part_bytes": part_bytes}
        mr.prepare_text(first, tmp_path / name, **options)
        mr.prepare_text(second, tmp_path / name, append=True, **options)
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two")
    assert stored(mr.open_store(tmp_path / "one"))[len(RECORDS) :] == [([*b"new", 256], [0, 1, 0, 0])]
    with pytest.raises(mr.ConfigError, match="made with mask_field=; give it again"):
        mr.prepare_text(second, tmp_path / "one", append=True, **{**OPTIONS, "mask_field": None})


def test_blocks_deliver_the_mask_of_y(tmp_path):
    mr.prepare_text(write(tmp_path / "a.jsonl", RECORDS * 1), tmp_path / "out", shard_tokens=30, **OPTIONS)
    store = mr.open_store(tmp_path / "out").split("train")
    mask, view = store.columns["mask"][:], mr.Blocks(store, length=7, stride=3)
    for k in range(len(view)):
        assert view[k]["mask"].tolist() == mask[3 * k + 1 : 3 * k + 8].tolist()
    batch = next(iter(mr.Feed(view, batch=4, seed=1)))
    assert batch["mask"].shape == batch["y"].shape == (4, 7)
    assert batch["mask"].tolist() == view[batch.samples]["mask"].tolist()
    assert mr.from_spec(view.spec(), mr.open_store(tmp_path / "out"))[0].keys() == {"x", "y", "mask"}


def test_the_command_takes_the_field(tmp_path, tools):
    done = tools.shell(
        "prepare", "text", write(tmp_path / "a.jsonl", RECORDS), "--out", tmp_path / "out", "--val", "0",
        "--tokenizer", "bytes", "--mask-field", "loss", "--no-normalize",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert mr.open_store(tmp_path / "out").columns["mask"][:].sum() > 0
