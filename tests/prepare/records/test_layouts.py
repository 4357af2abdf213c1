"""Files laid out in rarer ways: what they hold is taken as it is meant, or refused; never otherwise, and never left out
in silence."""

import io
import json
import os
import struct
import tarfile

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millrace as mr


def hdf5(path, datasets):
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data
    return path


ROWS = np.arange(6.0)
LISTS = [[], [], ROWS[:5].tolist()]


@pytest.mark.parametrize(
    ("datasets", "options", "expected"),
    [
        # One row per record; all rows in the last; as many rows as records.
        ({"hits_x": ROWS[:3], "hits_offsets": [0, 1, 2, 3], "label": [7, 8, 9]}, {}, {"hits_x": [[0], [1], [2]]}),
        ({"hits_x": ROWS[:5], "n_hits": [0, 0, 5], "label": [7, 8, 9]}, {}, {"hits_x": LISTS}),
        ({"hits_x": ROWS[:3], "n_hits": [0, 3]}, {}, {"hits_x": [[], [0, 1, 2]]}),
        ({"hits_x": ROWS[:3], "n_hits": [0, 2, 1], "label": [7, 8, 9]}, {}, {"hits_x": [[], [0, 1], [2]]}),
        ({"x": ROWS[:5], "starts": [0, 0, 5], "label": [7, 8]}, {"offsets": {"hits": "starts"}}, {"x": [[], [0, 1, 2, 3, 4]]}),
        ({"x": ROWS[:5], "many": [0, 0, 5], "label": [7, 8, 9]}, {"offsets": {"hits": "many"}}, {"x": LISTS}),
        # The last record has no rows, which only the labels say.
        ({"x": ROWS[:4], "event": [0, 0, 1, 1], "label": [7, 8, 9]}, {"offsets": {"h": "event"}}, {"x": [[0, 1], [2, 3], []]}),
        # Two axes with as many rows: the group says which is which, or --axis.
        (
            {"ev/hits/x": ROWS, "ev/hits/offsets": [0, 1, 6], "ev/tracks/p": ROWS, "ev/tracks/offsets": [0, 4, 6]}, {},
            {"ev.hits.x": [[0], [1, 2, 3, 4, 5]], "ev.tracks.p": [[0, 1, 2, 3], [4, 5]]},
        ),
        (
            {"x": ROWS, "y": ROWS, "a_offsets": [0, 1, 6], "b_offsets": [0, 4, 6]}, {"axis": {"a": ["x"], "b": ["y"]}},
            {"x": [[0], [1, 2, 3, 4, 5]], "y": [[0, 1, 2, 3], [4, 5]]},
        ),
        # A number of each record that adds up to the rows of others is no count.
        (
            {"hits_x": ROWS[:5], "hits_offsets": [0, 2, 5], "n_jets": [4, 1]}, {},
            {"hits_x": [[0, 1], [2, 3, 4]], "n_jets": [4, 1]},
        ),
        (
            {"hits_x": ROWS[:5], "hits_offsets": [0, 2, 5], "n_jets": [2, 1]},
            {},
            {"hits_x": [[0, 1], [2, 3, 4]], "n_jets": [2, 1]},
        ),
    ],
)  # fmt: skip
def test_hdf5_rows_belong_to_the_records_that_are_meant(prepare, plain, tmp_path, datasets, options, expected):
    store, _ = prepare(hdf5(tmp_path / "a.h5", datasets), **options)
    records = plain(store)
    assert {name: [record[name] for record in records] for name in expected} == expected


def test_hdf5_that_can_be_read_in_two_ways_is_refused(prepare, tmp_path):
    both = {"x": ROWS, "a_offsets": [0, 1, 6], "b_offsets": [0, 4, 6]}
    with pytest.raises(
        mr.SourceError, match=r"'x' has 6 items, as have the axes a and b; say which .* axis=\{\"a\": \"x\"\}"
    ):
        prepare(hdf5(tmp_path / "a.h5", both))
    with pytest.raises(mr.SourceError, match=r"'/a.b' and '/a/b' are both called 'a.b' here"):
        prepare(hdf5(tmp_path / "b.h5", {"a.b": [1], "a/b": [2]}))
    store, report = prepare(hdf5(tmp_path / "c.h5", {"x": [1, 2], "version": 3}))
    assert list(store.layout.columns) == ["x"]
    assert any("c.h5': version left out: one value, not one per record" in note for note in report.notes)


def test_a_null_within_a_list_of_fixed_size_refuses_its_record_alone(prepare, plain, tmp_path):
    inside = pa.array([[[1, 2]], [[3, 4], [None, 6]], [], [[7, 8]]], pa.list_(pa.list_(pa.int32(), 2)))
    nested = pa.array([[[1], [2]], [[3], [4]], None, [[5], [None]]], pa.list_(pa.list_(pa.int32(), 1), 2))
    floats = pa.array([[1.0, None]] * 4, pa.list_(pa.float32(), 2))
    for name, array, kept, bad in (("inside", inside, [0, 2, 3], 1), ("nested", nested, [0, 1], 2)):
        table = pa.table({"x": array, "f": floats, "k": range(4)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(mr.SourceError, match=rf"{name}.parquet', row {bad}: column 'x' is null or missing"):
            prepare(tmp_path / f"{name}.parquet")
        store, _ = prepare(tmp_path / f"{name}.parquet", on_error="skip")
        assert [record["k"] for record in plain(store)] == kept
        assert [record["x"] for record in plain(store)] == [array[k].as_py() for k in kept]
        assert np.isnan(store.columns["f"][:]).tolist() == [[False, True]] * len(kept)


def test_columns_of_tables_that_are_not_asked_for_may_be_anything(prepare, plain, tmp_path):
    table = pa.table(
        {
            "a": [{"x": ["t"], "xy": 1}, None, {"x": [], "xy": 3}],
            "lists": pa.array([[1], [2, 3], []], pa.list_view(pa.int8())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(mr.ConfigError, match=r"'a.x' is a list of string, and lists hold numbers alone.* leave it out"):
        prepare(tmp_path / "a.parquet")
    store, _ = prepare(tmp_path / "a.parquet", columns=["a.xy", "lists"], on_error="skip")
    assert plain(store) == [{"lists": [1], "a.xy": 1}, {"lists": [], "a.xy": 3}]


def test_names_that_cannot_be_stored_ask_for_others(prepare, plain, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"日本": [[1], [2, 3]], "A": 1, "a": 2}, ensure_ascii=False))
    with pytest.raises(mr.ConfigError, match=r"column name '日本.lengths' is not usable.* rename=\{"):
        prepare(path)
    renamed = {"日本": "jp", "日本.lengths": "jp.lengths"}
    with pytest.raises(mr.ConfigError, match=r"columns 'A' and 'a' differ only in case.* rename=\{"):
        prepare(path, rename=renamed)
    store, _ = prepare(path, rename={**renamed, "A": "b"})
    assert plain(store) == [{"jp": [1, 2, 3], "jp.lengths": [1, 2], "a": 2, "b": 1}]
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "two.parquet")
    with pytest.raises(mr.ConfigError, match="two columns are called 'a'"):
        prepare(tmp_path / "two.parquet")


def test_numbers_of_json_are_not_rounded(prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": 1}) + "\n" + json.dumps({"id": (1 << 64) - 1}))
    store, _ = prepare(path)
    assert store.columns["id"][:].tolist() == [1, (1 << 64) - 1]
    other = tmp_path / "b.jsonl"
    other.write_text('{"id": 2}')
    with pytest.raises(mr.SourceError, match=r"'id' is int64 .* and uint64 .*cast="):
        prepare([path, other])
    store, _ = prepare([other, path], cast={"id": "uint64"})
    assert store.columns["id"][:].tolist() == [2, 1, (1 << 64) - 1]
    with pytest.raises(mr.ConfigError, match="numbers below 0 and from 2\\^63, which no integer type holds"):
        prepare([{"id": -1}, {"id": 1 << 63}])


def test_a_fraction_after_many_whole_numbers_needs_a_cast(prepare, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"x": 1, "pad": "p" * 600_000})
        + "\n"
        + json.dumps({"x": 2, "pad": "p" * 600_000})
        + '\n{"x": 2.5, "pad": ""}\n'
    )
    with pytest.raises(mr.SourceError, match=r'whole numbers there, cast=\{"NAME": "float64"\} takes both'):
        prepare(path)
    store, _ = prepare(path, cast={"x": "float32"})
    assert store.columns["x"][:].tolist() == [1, 2, 2.5]


def test_texts_of_numpy_files(prepare, plain, tmp_path):
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", key="a", name="日本", x=[1])
    np.savez(tmp_path / "in" / "1.npz", key="bb", name=np.bytes_("é".encode()), x=[])
    store, _ = prepare(tmp_path / "in", cast={"x": "float32"})
    assert plain(store) == [{"key": "a", "name": "日本", "x": [1]}, {"key": "bb", "name": "é", "x": []}]
    np.savez(tmp_path / "in" / "2.npz", key="c", name=["a", "b"], x=[1])
    with pytest.raises(mr.SourceError, match=r"2.npz': array 'name' is a list of texts.*leave it out with columns="):
        prepare(tmp_path / "in", cast={"x": "float32"})


def test_numpy_files_that_cannot_be_used_are_skipped_one_by_one(prepare, tmp_path):
    (tmp_path / "in").mkdir()
    for k, arrays in enumerate([{}, {"x": [1]}, {"y": [1]}, {"x": [[1]]}, {"x": [2]}]):
        np.savez(tmp_path / "in" / f"{k}.npz", **arrays)
    (tmp_path / "in" / "0.npz").write_bytes(b"no archive")
    with pytest.raises(mr.SourceError, match=r"0.npz': it is no readable .npz"):
        prepare(tmp_path / "in")
    store, report = prepare(tmp_path / "in", on_error="skip")
    assert list(store.columns["key"]) == ["1", "4"]
    assert report.dropped == {"unreadable": 3}


@pytest.mark.parametrize("count", [300, 5])  # behind those from which the columns are taken, and among them
def test_records_from_python_are_skipped_one_by_one(tmp_path, count):
    def given():
        for k in range(count):
            yield {"x": np.arange(k % 3), "label": k}
        yield from [
            5,
            {"x": [1]},
            {"x": "text", "label": 1},
            {"x": [1], "label": 2.5},
            {"x": [1], "label": 1, "more": 2},
        ]
        yield {"x": [7], "label": -1}

    with pytest.raises(mr.SourceError, match=f'record {count}: it is int; .*on_error="skip"'):
        mr.prepare_records(given(), tmp_path / "stopped", workers=1)
    cast = {} if count > 256 else {"label": "int64"}
    report = mr.prepare_records(given(), tmp_path / "out", workers=1, on_error="skip", cast=cast)
    assert (report.records, report.dropped) == ({"train": count + 1}, {"unreadable": 5})
    assert mr.open_store(tmp_path / "out").columns["label"][:].tolist() == [*range(count), -1]
    lines = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert {line["place"] for line in lines} == {f"record {count + k}" for k in range(5)}


def test_options_that_a_format_does_not_look_at_are_refused(prepare, tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    for option, value in (("decode", 8), ("check", True), ("tree", "t"), ("offsets", {"a": "b"})):
        with pytest.raises(mr.ConfigError, match=rf"{option}=.* is for .*, and these records are parquet"):
            prepare(tmp_path / "a.parquet", **{option: value})
    with pytest.raises(mr.ConfigError, match="these records are given by Python"):
        prepare([{"x": 1}], decode=8)


def test_arrays_of_hugging_face_have_their_shapes(prepare, plain, tmp_path):
    import datasets

    features = datasets.Features(
        {
            "fixed": datasets.Array2D((2, 3), "float32"),
            "open": datasets.Array2D((None, 2), "int32"),
            "k": datasets.Value("int64"),
        }
    )
    rows = {
        "fixed": [np.full((2, 3), k).tolist() for k in range(4)], "open": [[[k, 1]] * k for k in range(4)], "k": list(range(4)),
    }  # fmt: skip
    data = datasets.Dataset.from_dict(rows, features=features)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "a.parquet")
    for source in (data, tmp_path / "saved", tmp_path / "a.parquet"):
        store, _ = prepare(source)
        assert plain(store) == [{name: values[k] for name, values in rows.items()} for k in range(4)]
        assert store.layout.columns["fixed"].shape == (2, 3)
    paths = datasets.Dataset.from_dict({"image": ["a.png"]}, features=datasets.Features({"image": datasets.Image()}))
    with pytest.raises(mr.ConfigError, match="column 'image' holds paths of files without their bytes"):
        prepare(paths)
    os.remove(next((tmp_path / "saved").glob("*.arrow")))
    data.save_to_disk(tmp_path / "two", num_shards=2)
    os.remove(tmp_path / "two" / "data-00001-of-00002.arrow")
    with pytest.raises(mr.SourceError, match=r"data-00001-of-00002.arrow', which state.json .* names, is missing"):
        prepare(tmp_path / "two")


def test_lance_tables_with_deleted_rows(prepare, tmp_path):
    lance = pytest.importorskip("lance", reason="needs Lance")
    table = lance.write_dataset(pa.table({"k": range(9)}), tmp_path / "a.lance")
    table.delete("k < 3")
    table.create_scalar_index("k", "BTREE")
    store, _ = prepare(tmp_path)
    assert store.columns["k"][:].tolist() == [3, 4, 5, 6, 7, 8]


def chunks(folder, kind, count):
    """A folder of chunks with one sample each, the number of the chunk."""
    folder.mkdir()
    names = [f"chunk-0-{k}.bin" if kind == "litdata" else f"shard.{k:05d}.mds" for k in range(count)]
    for k, name in enumerate(names):
        is_sized = kind == "litdata"  # there each sample says how long its values are
        data = (
            struct.pack("<III", 1, 12, 20 + 4 * is_sized) + (b"\x08\0\0\0" if is_sized else b"") + struct.pack("<q", k)
        )
        (folder / name).write_bytes(data)
    if kind == "litdata":
        config = {
            "compression": None,
            "data_format": ["int"],
            "data_spec": None,
            "encryption": None,
            "item_loader": "PyTreeLoader",
        }
        index = {"chunks": [{"filename": name} for name in names], "config": config}
    else:
        index = {"version": 2, "shards": [mds_shard(name) for name in names]}
    (folder / "index.json").write_text(json.dumps(index))
    return names


def mds_shard(name):
    return {
        "column_names": ["0"], "column_encodings": ["int"], "column_sizes": [8], "compression": "zstd", "format": "mds",
        "raw_data": {"basename": name}, "zip_data": {"basename": f"{name}.zstd"}, "samples": 1,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["litdata", "mds"])
def test_chunks_are_read_in_the_order_of_their_index(prepare, tmp_path, kind):
    names = chunks(tmp_path / "in", kind, 12)
    if kind == "mds":
        (tmp_path / "in" / f"{names[3]}.zstd").write_bytes(b"as a cache keeps it, beside the plain one")
    store, report = prepare(tmp_path / "in", format=kind)
    values = store.columns["0"]
    assert values[:].tolist() == list(range(12))
    assert kind == "litdata" or any("is the same shard" in note for note in report.notes)
    (tmp_path / "in" / names[5]).unlink()
    with pytest.raises(mr.SourceError, match=rf"'{names[5]}', which the index.json beside .* names, is missing"):
        prepare(tmp_path / "in", format=kind)
    store, report = prepare(tmp_path / "in", format=kind, on_error="skip")
    assert store.columns["0"][:].tolist() == [k for k in range(12) if k != 5]
    assert any(f"{names[5]!r}, which" in note for note in report.notes)


def nested():
    """Values as LitData packs them, with what they are."""

    def text(value):
        return struct.pack("<I", len(value.encode())) + value.encode()

    yield b"\x02" + struct.pack("<I2q", 2, 1, -5), [1, -5]
    yield b"\x03" + struct.pack("<Id", 1, 0.5), [0.5]
    yield b"\x04\x02\0\0\0\x01\0", [True, False]
    yield b"\x01\0\0\0\0", []
    yield b"\x01\x02\0\0\0" + text("é") + text(""), ["é", ""]
    yield b"\0" + text('[1,"x",null]'), [1, "x", None]
    yield b"\x05\x02\0\0\0" + text("a") + b"\x08" + struct.pack("<q", 7) + text("b") + b"\x0b", {"a": 7, "b": None}
    row = (
        b"\x11" + text("z") + b"\x13" + struct.pack("<d", 1.5) + b"\x14\x01" + b"\x10" + b"\x12" + struct.pack("<q", 3)
    )
    yield (
        b"\x06\x02\0\0\0\x05\0\0\0" + b"".join(map(text, "pqrst")) + row * 2,
        [{"p": "z", "q": 1.5, "r": True, "s": None, "t": 3}] * 2,
    )
    yield b'{"as": "before"}', {"as": "before"}


def write_nested(folder, values):
    folder.mkdir(exist_ok=True)
    samples = [struct.pack("<I", len(value)) + value for value in values]
    start = 4 + 4 * (len(samples) + 1)
    offsets = np.array([start, *(start + np.cumsum([len(one) for one in samples]))], "<u4")
    (folder / "chunk-0-0.bin").write_bytes(np.uint32(len(samples)).tobytes() + offsets.tobytes() + b"".join(samples))
    config = {
        "compression": None,
        "data_format": ["json"],
        "data_spec": None,
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": [{"filename": "chunk-0-0.bin"}], "config": config}))
    return folder


def test_lists_and_dicts_of_litdata_are_stored_as_json(prepare, tmp_path):
    packed, values = zip(*nested(), strict=True)
    store, _ = prepare(write_nested(tmp_path / "in", packed))
    assert [json.loads(text) for text in store.columns["0"]] == list(values)
    for data in (
        *(one[:-1] for one in packed[:-1]),
        b"\x02\xff\xff\xff\xff",
        b"\x0f",
        b"\x05\x01\0\0\0" * 5000,
        packed[0] + b"x",
    ):
        with pytest.raises(mr.SourceError, match=r"chunk-0-0.bin': a list or dict cannot be read"):
            prepare(write_nested(tmp_path / "in", [data]))


def test_images_of_a_tar_file_are_one_column_whatever_their_ending(prepare, tmp_path):
    given = [["jpg", "png"], ["png", "jpg", "webp"], ["png"]]
    for number, endings in enumerate(given):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for k, ending in enumerate(endings):
                for name in (f"{k}.{ending}", f"{k}.mask.png"):
                    data = f"{number} {name}".encode()
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    store, _ = prepare([tmp_path / f"{number}.tar" for number in range(3)])
    assert list(store.layout.columns) == ["jpg", "mask.png", "key"]
    found = [(bytes(record["jpg"]), bytes(record["mask.png"])) for record in mr.Records(store)]
    assert found == [
        (f"{number} {k}.{ending}".encode(), f"{number} {k}.mask.png".encode())
        for number, endings in enumerate(given)
        for k, ending in enumerate(endings)
    ]


def test_columns_with_names_of_batches_are_told_of(prepare, tmp_path):
    from millrace.feed.batch import Batch
    from millrace.prepare.records.read.schema import OF_BATCHES

    own = {name for name in dir(Batch) if not name.startswith("_")}
    assert own <= OF_BATCHES
    store, report = prepare([{"items": 1, "x": 2}])
    assert any("batch['items'] is the column" in note for note in report.notes)
    assert any('rename={"items": "NAME"} gives it another' in note for note in report.notes)
    (batch,) = mr.Feed(mr.Records(store), batch=1, epochs=1)
    assert batch["items"].tolist() == [1]
    _, report = prepare([{"items": 1, "x": 2}], rename={"items": "objects"})
    assert not report.notes
    np.save(tmp_path / "a.npy", np.arange(3))
    store, _ = prepare(tmp_path / "a.npy")
    (batch,) = mr.Feed(mr.Records(store), batch=1, epochs=1)
    assert batch.array.values.tolist() == [0, 1, 2]
