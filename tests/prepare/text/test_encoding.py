"""Files of other encodings: decoded as they are read, and an error that names the option where they are not UTF-8."""

import gzip
import json

import pytest

import millrace as mr

OPTIONS = {"tokenizer": "bytes", "val": 0, "workers": 1, "dedup": "none"}
TEXTS = [f"Grüße aus Köln, café {k}" for k in range(200)]


def written(form):
    if form == "txt":
        return "\n\n".join(TEXTS)
    if form == "jsonl":
        return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    return "id,text\n" + "".join(f'{k},"{text}"\n' for k, text in enumerate(TEXTS))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-8-sig", "UTF8"])
@pytest.mark.parametrize("form", ["txt", "jsonl", "csv", "md"])
def test_files_of_an_encoding_give_the_texts_that_they_hold(tmp_path, form, encoding, is_packed):
    data = written("txt" if form == "md" else form).encode(encoding)
    path = tmp_path / (f"a.{form}.gz" if is_packed else f"a.{form}")
    path.write_bytes(gzip.compress(data) if is_packed else data)
    mr.prepare_text(str(path), tmp_path / "out", encoding=encoding, part_bytes=300, normalize=False, **OPTIONS)
    store = mr.open_store(tmp_path / "out")
    found = store.decode(store.columns["tokens"][:]).split("<|endoftext|>")[:-1]
    assert found == (["\n\n".join(TEXTS)] if form == "md" else TEXTS)


@pytest.mark.parametrize("form", ["txt", "jsonl", "csv"])
def test_what_is_not_utf8_names_file_byte_and_option(tmp_path, form):
    (tmp_path / f"a.{form}").write_bytes(written(form).encode("latin-1"))
    with pytest.raises(mr.SourceError) as caught:
        mr.prepare_text(str(tmp_path / f"a.{form}"), tmp_path / "out", **OPTIONS)
    said = str(caught.value)
    assert f"a.{form}', byte " in said
    assert "invalid utf-8" in said
    assert 'if the file is not UTF-8, name its encoding, such as encoding="latin-1"' in said


def test_utf16_names_its_option(tmp_path):
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(mr.SourceError, match='looks like UTF-16; give encoding="utf-16"'):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("name", ["latin-77", "base64", "rot13", "", "\0", 7])
def test_a_name_that_is_no_encoding_of_text_is_refused(tmp_path, name):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(mr.ConfigError, match=r"encoding=.* expected one such as utf-8"):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", encoding=name, **OPTIONS)


def test_a_file_that_is_not_of_the_encoding_is_named_with_its_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"plain " * 10 + b"\xe9")
    with pytest.raises(mr.SourceError, match=r"a\.txt', near byte 60: it is not ascii: .*; check encoding="):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", encoding="ascii", **OPTIONS)
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", encoding="ascii", on_error="replace", **OPTIONS)
    store = mr.open_store(tmp_path / "out")
    assert store.decode(store.columns["tokens"][:-1]).endswith("plain \ufffd")


def test_a_finished_store_of_an_earlier_version_is_the_same_store(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **OPTIONS)
    path = tmp_path / "out" / "provenance.json"
    made = json.loads(path.read_bytes())
    del made["plan"]["options"]["encoding"]
    path.chmod(0o644)
    path.write_text(json.dumps(made) + "\n")
    assert not mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **OPTIONS).is_new


def test_the_command_has_it(tools, tmp_path):
    (tmp_path / "a.txt").write_bytes("Grüße".encode("latin-1"))
    command = ("prepare", "text", tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bytes", "--val", "0")
    assert tools.shell(*command).returncode == 1
    assert tools.shell(*command, "--encoding", "latin-1").returncode == 0
    assert mr.open_store(tmp_path / "out").num_rows == len("Grüße".encode()) + 1
