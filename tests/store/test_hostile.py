"""Manifests and shard tables made to harm: one clear error each, little memory, nothing opened outside."""

import json
import os
import tracemalloc

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run
from millrace.store import manifest as manifests


def refused(victim, kind=mr.StoreCorrupt) -> str:
    """The message with which the store is refused; it names one of its files."""
    with pytest.raises(kind) as caught:
        mr.open_store(victim.path)
    assert str(caught.value.path).startswith(str(victim.path))
    assert str(caught.value.path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_forged_store_without_a_lie_opens(victim):
    victim.forge(victim.body, victim.table)
    assert mr.open_store(victim.path).num_shards > 2
    assert json.loads((victim.path / "store.json").read_bytes()) == victim.body


TOKENIZER = {
    "kind": "bytes",
    "name": "bytes",
    "vocab_size": 257,
    "end": 256,
    "file": "tokenizer.json",
    "hash": "0" * 32,
}

# Bytes that are no manifest.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-20], "is not valid JSON"),
        (lambda data: data[: len(data) // 2], "is not valid JSON"),
        (lambda data: b"", "is not valid JSON"),
        (lambda data: b"hello", "is not valid JSON"),
        (lambda data: b"\0" * 100, "is not valid JSON"),
        (lambda data: b"\xff" + data, "is not valid JSON"),
        (lambda data: data.decode().encode("utf-16"), "is not valid JSON"),
        (lambda data: data + b"{}", "is not valid JSON"),
        (lambda data: b"[]", "holds a list, expected a JSON object"),
        (lambda data: b"null", "holds a NoneType"),
        (lambda data: b"1", "holds a int"),
        (lambda data: b"{}", "missing required field"),
        (lambda data: data.replace(b'"a": [', b'"a": [NaN,'), "NaN is not a JSON number"),
        (lambda data: data.replace(b'"a": [', b'"a": [Infinity,'), "Infinity is not a JSON number"),
        (lambda data: data.replace(b'"a": [', b'"a": [-Infinity,'), "-Infinity is not a JSON number"),
        (lambda data: data.replace(b'"a": [', b'"a": [1e999,'), "1e999 is beyond any float"),
        (lambda data: data.replace(b'"a": [', b'"a": [' + b"9" * 5000 + b","), "is not valid JSON"),
        (lambda data: data.replace(b"{", b'{"kind": "text",', 1), "key 'kind' appears twice"),
        (lambda data: data.replace(b'"a": [', b'"a": 1, "a": ['), "key 'a' appears twice"),
        (lambda data: data.replace(b'"a": [', b'"a": [2,'), "was changed after it was written"),
        (lambda data: b"[" * 100_000, "is not valid JSON"),
        (lambda data: b'{"a":' * 100_000, "is not valid JSON"),
        (lambda data: data.replace(b'"a": [', b'"a": [' + b"[" * 70 + b"]" * 70 + b","), "nest deeper than 64"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused(victim, change, message):
    victim.put("store.json", change(victim.manifest))
    assert message in refused(victim)


@pytest.mark.parametrize("key", ["meta", "scaling", "tokenizer"])
def test_nesting_of_any_depth_is_an_error_of_ours(victim, key):
    for depth in [*range(50, 80), *range(80, 1200, 7)]:
        nested = json.loads("[" * min(depth, 900) + "]" * min(depth, 900))
        body = victim.body | {key: {**(TOKENIZER if key == "tokenizer" else {}), "deep": nested}}
        if depth < 900:
            victim.forge(body)
        else:
            victim.put(
                "store.json", json.dumps(body).replace("[]", "[" * (depth - 899) + "]" * (depth - 899), 1).encode()
            )
        if depth <= 62:  # the object itself and the one it lies in count too
            mr.open_store(victim.path)
        else:
            refused(victim)


@pytest.mark.timeout(60)
def test_a_duplicate_among_very_many_keys_is_found_at_once(victim):
    many = ",".join(f'"k{k}":0' for k in range(300_000))
    victim.put("store.json", f'{{{many},"k299999":1}}'.encode())
    assert "key 'k299999' appears twice" in refused(victim)


@pytest.mark.timeout(60)
def test_very_many_columns_are_refused(victim):
    body = victim.body
    body["columns"] |= {f"s{k}": {"dtype": "string", "per": "record"} for k in range(100_000)}
    victim.forge(body)
    assert "100005 columns; at most 4096" in refused(victim)


# Manifests that say what cannot be.


def at(path, value):
    """A change of one value of the manifest, e.g. ``at("totals.records", -1)``."""

    def change(body):
        *above, last = path.split(".")
        for key in above:
            body = body[key]
        body[last] = value

    return change


BAD_NAMES = ["../x", "/etc/passwd", "a/b", "a\\b", "a\0b", ".hidden", "", "..", "x" * 129, "a\n", "\ud800", "é"]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize(
    "change",
    [
        lambda body, name: body["columns"].update({name: {"dtype": "int8"}}),
        lambda body, name: body["columns"]["image"].update(axis=name),
        lambda body, name: body.update(splits=["train", name]),
        lambda body, name: body.update(splits=[name]),
        lambda body, name: body["shards"].update(name=name),
        lambda body, name: body["hashes"].update(name=name),
        lambda body, name: body["cuts"].update(splits=["train", name]),
    ],
    ids=["column", "axis", "split", "the split", "shards", "hashes", "cuts"],
)
def test_a_name_that_is_more_than_a_name_is_refused(victim, change, name):
    body = victim.body
    change(body, name)
    if "axis" in body["columns"]["image"] and body["columns"]["image"]["axis"] == name == "":
        name = "rows"  # an empty axis is the primary one: then the axes do not fit
    victim.forge(body)
    message = refused(victim)
    assert "is not usable" in message or ("$.axes" in message and name == "rows")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("version", 0), "$.version is 0; expected 1"),
        (at("version", -3), "$.version is -3"),
        (at("version", "1"), "$.version"),
        (at("version", None), "$.version"),
        (at("version", 1.5), "$.version"),
        (at("kind", "tables"), "$.kind is 'tables'"),
        (at("kind", 7), "$.kind"),
        (at("surprise", 1), "surprise"),
        (at("totals.surprise", 1), "$.totals"),
        (at("columns.x.surprise", 1), "$.columns"),
        (at("cuts.surprise", 1), "$.cuts"),
        (at("\ud800", 1), "surrogates"),
        (at("totals.shards", -1), "$.totals.shards is -1"),
        (at("totals.shards", 2**24 + 1), "$.totals.shards is 16777217"),
        (at("totals.shards", 10**30), "$.totals.shards"),
        (at("totals.shards", 2**20), "$.shards.bytes"),
        (at("totals.records", -1), "$.totals.records is -1"),
        (at("totals.records", 2**63), "$.totals.records is 9223372036854775808"),
        (at("totals.records", 2**40), "$.totals.records is 1099511627776; expected 0 to 68719476736"),
        (at("totals.records", 5), "shards add up to"),
        (at("totals.records", 6.5), "$.totals.records"),
        (at("totals.rows.rows", -5), "$.totals.rows.rows is -5"),
        (at("totals.rows.rows", 14), "shards add up to"),
        (at("totals.rows", {}), "$.totals.rows"),
        (at("totals.rows.more", 1), "$.totals.rows"),
        (at("totals.bytes", -1), "$.totals.bytes is -1"),
        (at("totals.bytes", 1), "the manifest says 1"),
        (at("shards.bytes", -8), "$.shards.bytes is -8"),
        (at("shards.bytes", 2**63), "$.shards.bytes"),
        (at("shards.bytes", 0), "$.shards.bytes is 0"),
        (at("shards.hash", "0" * 32), "its hash is not the one in the manifest"),
        (at("hashes.bytes", 9), "$.hashes.bytes is 9; expected a multiple of 8"),
        (at("hashes.bytes", 8), "8 bytes of block hashes do not match the shards"),
        (at("columns", {}), "no column"),
        (at("columns", []), "$.columns"),
        (at("columns.x.dtype", "object"), "$.columns.x: dtype 'object'; expected one of"),
        (at("columns.x.dtype", "float64"), "bytes, the manifest says"),
        (at("columns.x.shape", [0]), "shape=(0,)"),
        (at("columns.x.shape", [-2]), "shape=(-2,)"),
        (at("columns.x.shape", [2**40]), "at most 2 GiB"),
        (at("columns.x.shape", [2**31, 2**31, 2**31]), "at most 2 GiB"),
        (at("columns.x.shape", [1] * 9), "at most 8 sizes"),
        (at("columns.x.shape", "2"), "$.columns"),
        (at("columns.x.per", "shard"), "per='shard'"),
        (at("columns.key.axis", "pixels"), "axis='pixels' on a record column"),
        (at("columns.key.per", "row"), "a string column is per='record'"),
        (at("columns.x.values", ["a"]), "only 'dictionary' columns have values"),
        (at("columns.word.values", ["a", "a"]), "all different"),
        (at("columns.offsets", {"dtype": "int8"}), "taken by the offsets"),
        (at("columns.X", {"dtype": "int8"}), "differ only in case"),
        (at("axes", ["rows"]), "$.axes"),
        (at("axes", ["pixels", "rows", "key"]), "$.axes"),
        (at("splits", []), "$.splits"),
        (at("splits", ["train", "train"]), "$.splits"),
        (at("splits", "train"), "$.splits"),
        (at("cuts.column", "x"), "$.cuts.column is 'x'"),
        (at("cuts.column", "gone"), "$.cuts.column is 'gone'"),
        (at("cuts.splits", ["train"]), "$.cuts.splits"),
        (at("cuts.gap", -1), "$.cuts.gap is -1"),
        (at("parent", "../../x"), "$.parent"),
        (at("parent", "0" * 31), "$.parent"),
        (at("meta", [1]), "$.meta"),
        (at("checksum", 5), "$.checksum"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused_with_its_place(victim, change, message):
    body = victim.body
    change(body)
    checksum = body["checksum"]
    victim.forge(body)
    if not isinstance(checksum, str):
        victim.put("store.json", json.dumps(body | {"checksum": checksum}).encode())
    assert message in refused(victim)


ODD = [None, 7, -1, 1.5, True, 10**30, "", [], [1], [["a"]], {"a": 1}, "x" * 100_000]


@pytest.mark.parametrize("key", ["kind", "name", "vocab_size", "end", "hash", None])
def test_a_tokenizer_that_is_described_oddly_is_refused_at_open(victim, key):
    """Rightly signed: nobody but its maker could have written it, and yet it is no traceback."""
    victim.forge(victim.body | {"tokenizer": TOKENIZER})
    mr.open_store(victim.path)
    right = (str,) if key in ("kind", "name", "hash") else ()
    for value in [value for value in ODD if not isinstance(value, right)]:
        if key in ("vocab_size", "end") and value in (7, True):
            continue
        if key is None and value is None:
            continue
        victim.forge(victim.body | {"tokenizer": value if key is None else {**TOKENIZER, key: value}})
        assert "$.tokenizer" in refused(victim)
    if key is not None:
        victim.forge(victim.body | {"tokenizer": {name: TOKENIZER[name] for name in TOKENIZER if name != key}})
        assert f"$.tokenizer: Object missing required field `{key}`" in refused(victim)


@pytest.mark.parametrize("features", [*ODD[:7], [1], [None], [["a"]], [{"a": 1}], {"a": 1}, ["a", "a"], "x" * 100_000])
def test_features_of_a_prepared_series_that_are_no_names_are_refused_at_open(victim, features):
    body = victim.body | {"kind": "series", "scaling": {"method": "none"}}
    victim.forge(body | {"meta": {"features": ["a", "b"]}})
    mr.open_store(victim.path)
    victim.forge(body | {"meta": {"features": features}})
    message = refused(victim)
    assert "$.meta.features is " in message
    assert len(message) < 400


@pytest.mark.parametrize("features", [*ODD, [1, 2], [None, None], [["a"], ["b"]], [{}, {}]])
def test_what_else_stands_under_features_names_nothing(victim, features):
    """A store that was not prepared from a table may have anything in its meta."""
    victim.forge(victim.body | {"meta": {"features": features}})
    view = mr.Windows(mr.open_store(victim.path).split("train"), column="x", lookback=1, horizon=1)
    assert view.features is None
    assert run(["head", str(victim.path)]) == 0


@pytest.mark.parametrize("fingerprint", ["", "..", "0" * 31, "G" * 32, "0" * 32])
def test_a_fingerprint_that_is_not_of_the_contents_is_refused(victim, fingerprint):
    body = victim.body | {"fingerprint": fingerprint}
    body["checksum"] = manifests._checksum(body)
    victim.put("store.json", json.dumps(body).encode())
    message = "not that of the contents" if fingerprint == "0" * 32 else "$.fingerprint"
    assert message in refused(victim)


@pytest.mark.parametrize("version", [2, 3, 10**6, 10**30])
def test_a_later_version_asks_for_an_upgrade_whatever_else_it_holds(victim, version):
    victim.put("store.json", json.dumps({"version": version, "news": {}}).encode())
    assert f"format version {version}; this millrace reads up to 1: upgrade" in refused(victim, mr.StoreTooNew)


# Shard tables that lie, rightly hashed.


@pytest.mark.parametrize(
    ("row", "place", "value", "message"),
    [
        (0, 0, 1, "a shard of split 1, but there are 1 splits"),
        (0, 0, 2**64 - 1, "a shard of split"),
        (0, 1, 2**32, "shard number 4294967296"),
        (1, 1, 0, "two shards have one name"),
        (0, 2, 2**64 - 1, "beyond any file"),
        (0, 3, 2**63, "beyond any file"),
        (0, 3, 2**61, "beyond any file"),
        (0, 2, 3, "shards add up to"),
        (0, 4, 0, "shards add up to"),
    ],
)
def test_a_shard_table_that_lies_is_refused(victim, row, place, value, message):
    table = np.frombuffer(victim.table, "<u8").reshape(-1, victim.width).copy()
    assert table[row, place] != value
    table[row, place] = value
    victim.forge(victim.body, table.tobytes())
    assert message in refused(victim)


@pytest.mark.parametrize("place", [2, 3, 4, 5])
def test_counts_whose_sum_overflows_are_refused(victim, place):
    table = np.frombuffer(victim.table, "<u8").reshape(-1, victim.width).copy()
    table[:, place] = 2**55
    body = victim.body
    total = 2**55 * len(table)
    key = ["records", "rows", "pixels", "key"][place - 2]
    (body["totals"] if place == 2 else body["totals"]["rows"])[key] = total
    victim.forge(body, table.tobytes())
    refused(victim)


@pytest.mark.parametrize(
    "change", [lambda data: data[:-8], lambda data: data + bytes(8), lambda data: b"", lambda data: data[::-1]]
)
def test_a_table_of_another_size_or_content_is_refused(victim, change):
    victim.put("shards.bin", change(victim.table))
    message = refused(victim)
    assert "shards.bin" in message
    assert "hash" in message or f"expected {len(victim.table)}" in message


# What stands in the files' place.


@pytest.mark.parametrize("name", ["store.json", "shards.bin"])
@pytest.mark.parametrize("how", ["a link", "a broken link", "a folder", "a fifo", "missing"])
def test_a_manifest_or_table_that_is_no_plain_file_is_refused(victim, name, how):
    path = victim.path / name
    path.rename(victim.path.parent / "real")
    try:
        match how:
            case "a link":
                path.symlink_to(victim.path.parent / "real")
            case "a broken link":
                path.symlink_to("nowhere")
            case "a folder":
                path.mkdir()
            case "a fifo":
                os.mkfifo(path)
        gone = name == "store.json" and how != "a link"
        refused_by = mr.StoreNotFound if gone else mr.StoreCorrupt
        with pytest.raises(refused_by) as caught:
            mr.open_store(victim.path)
        assert caught.value.path == str(victim.path if gone else path)
    finally:
        path.rmdir() if how == "a folder" else path.unlink(missing_ok=True)


def test_the_watch_sees_what_is_opened(victim, opened, lies_inside):
    with opened() as paths:
        mr.open_store(victim.path).columns["x"][:]
    assert "store.json" in {os.path.basename(path) for path in paths}
    assert any(path.endswith("x.f32") for path in paths)
    assert all(lies_inside(path, victim.path) for path in paths)
    assert not lies_inside("../x", victim.path)


def test_a_codec_of_a_later_version_asks_for_an_upgrade(victim):
    body = victim.body
    body["codec"] = {"name": "brotli", "level": 3}
    victim.forge(body)
    with pytest.raises(mr.StoreTooNew, match=r"\$\.codec .*upgrade"):
        mr.open_store(victim.path)


@pytest.mark.parametrize("dtype", [">i8", "i8", "int", "<f4"])
def test_a_dtype_is_spelt_as_the_format_spells_it(victim, dtype):
    body = victim.body
    body["columns"]["cuts"]["dtype"] = dtype
    victim.forge(body)
    with pytest.raises(mr.StoreCorrupt, match=r"\$\.columns\.cuts"):
        mr.open_store(victim.path)


@pytest.mark.parametrize("name", ["store.json", "shards.bin"])
def test_a_huge_sparse_file_is_refused_by_its_size_before_it_is_read(victim, opened, name):
    body = victim.body
    if name == "shards.bin":
        body["shards"]["bytes"] = 1 << 40
        victim.forge(body)
    os.truncate(victim.path / name, 1 << 30 if name == "store.json" else 1 << 40)
    tracemalloc.start()
    try:
        with opened() as paths:
            message = refused(victim)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert not [path for path in paths if path.endswith("shards.bin")]
    assert "at most 33554432 bytes" in message or "$.shards.bytes is 1099511627776" in message
