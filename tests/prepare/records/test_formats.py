"""Round trips: what a source library wrote, and reads itself, is in the store."""

import gzip
import importlib
import io
import json
import struct
import subprocess
import sys
import threading
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

import millrace as mr
from millrace.prepare.records.formats import root
from millrace.testing import run_forked

zstd = importlib.import_module("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
RNG = np.random.default_rng(11)
LENGTHS = [3, 0, 1, 700, 0, 2, 5, 4]  # empty and long records


def events():
    """Records with two axes, texts, vectors and numbers."""
    found = []
    for k, length in enumerate(LENGTHS):
        hits = RNG.normal(size=(length, 2)).astype(np.float32)
        found.append(
            {
                "x": hits[:, 0].tolist(), "y": hits[:, 1].tolist(), "tracks": RNG.integers(0, 99, k % 3).tolist(),
                "label": k, "weight": k / 4, "name": f"événement {k}" * (k % 4),
            }
        )  # fmt: skip
    return found


def image_bytes(k, ending="jpg", size=(40, 30)):
    pixels = RNG.integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, {"jpg": "JPEG"}.get(ending, ending))
    return file.getvalue()


@pytest.fixture
def pictures(tmp_path):
    """Two classes, one with a folder below it, and names that are no ASCII."""
    found = {}
    for name in ("chat", "été"):
        for k in range(4):
            path = tmp_path / "in" / name / ("below" if k % 2 else "") / f"im {k}.{'jpg' if k < 2 else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image_bytes(k, path.suffix[1:]))
            found[str(path.relative_to(tmp_path / "in"))] = path
    return tmp_path / "in", found


def test_an_image_folder_keeps_the_bytes_with_labels_and_keys(prepare, pictures, plain):
    folder, files = pictures
    store, report = prepare(folder)
    records = plain(store)
    assert [bytes(record["image"]) for record in records] == [files[record["key"]].read_bytes() for record in records]
    assert {record["key"] for record in records} == set(files)
    assert store.meta["classes"] == ["chat", "été"]
    assert [store.meta["classes"][record["label"]] for record in records] == [r["key"].split("/")[0] for r in records]
    assert (report.format, list(store.layout.columns)) == ("imagefolder", ["image", "label", "key"])


def test_decoded_images_are_those_of_a_feed_and_near_those_of_pillow(prepare, pictures):
    folder, files = pictures
    store, _ = prepare(folder, decode=16)
    assert store.layout.columns["image"] == mr.Column("uint8", (16, 16, 3), per="record")
    bytes_of, _ = prepare(folder)
    decode = mr.images.decode(size=16, crop="center", dtype="uint8", layout="hwc", library="pillow")
    (fed,) = mr.Feed(
        mr.Records(bytes_of), batch=len(files), epochs=1, order=mr.Sequential(len(files)), decode=decode, device="numpy"
    )
    assert np.array_equal(store.columns["image"][:], fed["image"])
    for pixels, key in zip(store.columns["image"][:], store.columns["key"][:], strict=True):
        with Image.open(files[key]) as image:
            image.draft("RGB", (16, 16))
            pillow = ImageOps.fit(image.convert("RGB"), (16, 16), Image.Resampling.BILINEAR)
        assert np.abs(pixels.astype(int) - np.asarray(pillow)).max() <= 2


@pytest.mark.parametrize(("check", "are_threads"), [(False, True), (True, False)])
def test_images_that_are_only_copied_are_read_by_threads(prepare, pictures, check, are_threads):
    """To start processes would take longer than most jobs; to decode with Pillow does not."""
    began = []

    def look(stage, done, *_):
        began.extend(thread.name for thread in threading.enumerate() if thread.name.startswith("millrace-prepare"))

    one, _ = prepare(pictures[0], part_bytes=9000, check=check)
    two, _ = prepare(pictures[0], part_bytes=9000, check=check, workers=2, progress=look)
    assert bool(began) == are_threads
    assert one.fingerprint == two.fingerprint


def arrow_table():
    rows = events()
    return pa.table(
        {
            "x": pa.array([row["x"] for row in rows], pa.list_(pa.float32())),
            "y": pa.array([row["y"] for row in rows], pa.large_list(pa.float32())),
            "tracks": pa.array([[{"id": t, "q": -t} for t in row["tracks"]] for row in rows]),
            "box": pa.array([[k, 1, 2] for k in range(len(rows))], pa.list_(pa.int16(), 3)),
            "points": pa.array([[[1.0, 2.0]] * (k % 3) for k in range(len(rows))], pa.list_(pa.list_(pa.float64(), 2))),
            "nested": pa.array([[[k], [], [1, 2]][: k % 4] for k in range(len(rows))]),
            "raw": pa.array([bytes(range(k)) for k in range(len(rows))]),
            "name": pa.array([row["name"] for row in rows]).dictionary_encode(),
            "ok": pa.array([k % 2 == 0 for k in range(len(rows))]),
            "when": pa.array(range(len(rows)), pa.timestamp("us")),
            "info": pa.array([{"n": k, "s": str(k)} for k in range(len(rows))]),
        }
    )


@pytest.mark.parametrize("form", ["parquet", "feather", "stream", "sliced"])
def test_arrow_tables_come_back_as_pyarrow_has_them(prepare, tmp_path, form, plain):
    table = arrow_table()
    if form == "parquet":
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=3)
    elif form == "feather":
        pyarrow.feather.write_feather(table, tmp_path / "t.feather", chunksize=3)
    else:
        with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            longer = pa.concat_tables([table, table, table]).combine_chunks()
            for batch in longer.slice(len(table), len(table)).to_batches() if form == "sliced" else table.to_batches(3):
                writer.write_batch(batch)
    store, _ = prepare(tmp_path, part_bytes=200, cast={"box": "int32"})
    for record, row in zip(plain(store), table.to_pylist(), strict=True):
        assert (record["x"], record["y"]) == (row["x"], row["y"])
        assert record["tracks.id"] == [track["id"] for track in row["tracks"]]
        assert record["box"] == row["box"]
        assert record["points"] == row["points"]
        assert (record["nested.lengths"], record["nested"]) == (
            [len(n) for n in row["nested"]],
            [*chain(*row["nested"])],
        )
        assert (bytes(record["raw"]), record["name"], record["ok"]) == (row["raw"], row["name"], row["ok"])
        assert record["when"] == row["when"].microsecond
        assert (record["info.n"], record["info.s"]) == (row["info"]["n"], row["info"]["s"])
    columns = store.layout.columns
    assert columns["x"].axis == columns["y"].axis != columns["tracks.id"].axis == columns["tracks.q"].axis


@pytest.mark.parametrize("packed", [False, True])
def test_json_lines_come_back_as_json_has_them(prepare, tmp_path, packed, plain):
    rows = events()
    text = (
        "\ufeff" * (not packed) + "".join(json.dumps(row) + "\n" * (1 + k % 2) for k, row in enumerate(rows)).rstrip()
    )
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    store, _ = prepare(path, part_bytes=300)
    assert plain(store) == [{**record, **row} for record, row in zip(plain(store), rows, strict=True)]


def test_hugging_face_datasets_as_a_folder_and_as_an_object(prepare, tmp_path, plain):
    import datasets

    features = datasets.Features(
        {
            "x": datasets.List(datasets.Value("float32")), "label": datasets.ClassLabel(names=["cat", "dog"]),
            "image": datasets.Image(), "name": datasets.Value("string"),
        }
    )  # fmt: skip
    pictures = [image_bytes(k, "png") for k in range(5)]
    rows = {
        "x": [[0.5] * k for k in range(5)], "label": [k % 2 for k in range(5)],
        "image": [{"bytes": data, "path": None} for data in pictures], "name": [f"n{k}" for k in range(5)],
    }  # fmt: skip
    data = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": data, "test": data.select([1, 3])}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "train" / "cache-1.arrow").write_bytes(b"of a map, which the dataset does not name")
    with pytest.raises(mr.ConfigError, match=r'DatasetDict; .* give one split, or save it .* split="folder"'):
        prepare(datasets.load_from_disk(tmp_path / "saved"))
    store, report = prepare(tmp_path / "saved", format="datasets", split="folder")
    assert report.records == {"train": 5, "test": 2}
    assert store.meta["classes"] == ["cat", "dog"]
    own = plain(store.split("train"))
    assert [bytes(record["image"]) for record in own] == pictures
    assert [(record["x"], record["label"], record["name"]) for record in own] == list(
        zip(rows["x"], rows["label"], rows["name"], strict=True)
    )
    given, _ = prepare(data)
    assert plain(given) == own
    assert given.meta["classes"] == ["cat", "dog"]


def samples():
    return [
        {
            "__key__": f"dir/s{k:03d}", "jpg": image_bytes(k), "cls": k % 3, "txt": f"text é {k}", "json": {"k": k},
            "hits.npy": RNG.normal(size=(length, 2)).astype(np.float32),
        }
        for k, length in enumerate(LENGTHS)
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # theirs
@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_webdataset_writes_and_we_read(prepare, tmp_path, ending, plain):
    import webdataset

    written = samples()
    path = str(tmp_path / f"a-0.{ending}")
    with webdataset.TarWriter(path, encoder=True) as writer:
        for sample in written:
            writer.write(dict(sample))
    store, _ = prepare(path)
    theirs = list(webdataset.WebDataset(path, shardshuffle=False).decode())
    for record, sample, raw in zip(plain(store), theirs, written, strict=True):
        assert record["key"] == sample["__key__"] == raw["__key__"]
        assert (record["cls"], record["txt"], json.loads(record["json"])) == (
            sample["cls"],
            sample["txt"],
            sample["json"],
        )
        assert record["hits.npy"] == sample["hits.npy"].tolist()
        assert bytes(record["jpg"]) == raw["jpg"]
    decoded, _ = prepare(path, decode=8, columns=["jpg", "key"], rename={"jpg": "image"})
    assert decoded.columns["image"].shape == (len(written), 8, 8, 3)


@pytest.mark.parametrize("how", ["offsets", "counts", "index", "vlen"])
def test_hdf5_datasets_as_h5py_has_them(prepare, tmp_path, how, plain):
    import h5py

    offsets = np.concatenate(([0], np.cumsum(LENGTHS)))
    hits = RNG.normal(size=(offsets[-1], 3)).astype(">f4")
    labels, names = np.arange(len(LENGTHS), dtype=np.int16), [f"é{k}" for k in range(len(LENGTHS))]
    options = {}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if how == "vlen":
            kind = h5py.vlen_dtype(np.float32)
            rows = [hits[a:b, 0].astype(np.float32) for a, b in pairwise(offsets)]
            data = file.create_dataset("hits", (len(LENGTHS),), kind)
            for k, row in enumerate(rows):
                data[k] = row
        else:
            file.create_dataset("ev/hits", data=hits, chunks=(64, 3), compression="gzip")
            place = {"offsets": offsets, "counts": LENGTHS, "index": np.repeat(np.arange(len(LENGTHS)), LENGTHS)}[how]
            file.create_dataset("ev/hits_index" if how == "index" else f"ev/hits_{how}", data=place)
            options = {"offsets": {"hits": "ev.hits_index"}} if how == "index" else {}
            both = np.zeros(len(LENGTHS), [("p", "f8"), ("q", "i4", (2,))])
            both["p"], both["q"] = np.arange(len(LENGTHS)), 7
            file.create_dataset("ev/both", data=both)
        file.create_dataset("label", data=labels)
        file.create_dataset("name", data=names)
        file["alias"] = h5py.SoftLink("/label")
        file["loop"] = h5py.SoftLink("/loop")
    store, _ = prepare(tmp_path / "a.h5", part_bytes=2000, **options)
    records = plain(store)
    assert [record["label"] for record in records] == labels.tolist()
    assert [record["name"] for record in records] == names
    own = [hits[a:b] for a, b in pairwise(offsets)]
    if how == "vlen":
        assert [record["hits"] for record in records] == [rows[:, 0].tolist() for rows in own]
    else:
        assert [record["ev.hits"] for record in records] == [rows.tolist() for rows in own]
        assert [record["ev.both.p"] for record in records] == list(range(len(LENGTHS)))
        assert records[1]["ev.both.q"] == [7, 7]


@pytest.mark.parametrize("kind", ["TTree", "RNTuple"])
def test_root_branches_as_uproot_has_them(prepare, tmp_path, kind, plain):
    import awkward as ak
    import uproot

    rows = events()
    hits = ak.zip({"x": [row["x"] for row in rows], "y": [row["y"] for row in rows]})
    arrays = {
        "Hit": hits, "tracks": ak.values_astype(ak.Array([row["tracks"] for row in rows]), np.int32),
        "label": np.array([row["label"] for row in rows], np.int32), "v": RNG.normal(size=(len(rows), 3)),
    }  # fmt: skip
    with uproot.recreate(tmp_path / "a.root") as file:
        if kind == "TTree":
            types = {"label": np.int32, "v": ("f8", (3,))}
            types |= {name: ak.type(arrays[name]).content for name in ("Hit", "tracks")}
            file.mktree("events", types)
            file["events"].extend(arrays)
            file["other"] = {"n": np.arange(2)}
        else:
            file.mkrntuple("events", {name: value for name, value in arrays.items() if name != "v"})
    store, _ = prepare(tmp_path / "a.root", tree="events", part_bytes=2000)
    records = plain(store)
    prefix = "Hit_" if kind == "TTree" else "Hit."
    assert [record[f"{prefix}x"] for record in records] == [row["x"] for row in rows]
    assert [record[f"{prefix}y"] for record in records] == [row["y"] for row in rows]
    assert [record["tracks"] for record in records] == [row["tracks"] for row in rows]
    assert [record["label"] for record in records] == [row["label"] for row in rows]
    columns = store.layout.columns
    assert columns[f"{prefix}x"].axis == columns[f"{prefix}y"].axis == "Hit"
    assert columns["tracks"].axis == "tracks"  # not the name of its counter, ntracks
    if kind == "TTree":
        assert [record["v"] for record in records] == arrays["v"].tolist()
        with pytest.raises(mr.ConfigError, match="has the trees events, other; say which with tree="):
            prepare(tmp_path / "a.root")


@pytest.mark.parametrize("kind", ["TTree", "RNTuple"])
def test_root_is_cut_where_its_clusters_begin(tmp_path, kind):
    import uproot

    with uproot.recreate(tmp_path / "a.root") as file:
        first = {"x": np.arange(10)}
        file.mkrntuple("t", first) if kind == "RNTuple" else file.mktree("t", {"x": "int64"}).extend(first)
        for count in (30, 20, 40):
            file["t"].extend({"x": np.arange(count)})
    with uproot.open(tmp_path / "a.root") as file:
        assert root._edges(file["t"], 100, 3) == [0, 40, 60, 100]


def test_numpy_files_are_a_record_each(prepare, tmp_path, plain):
    for k, length in enumerate(LENGTHS):
        (tmp_path / "in" / f"d{k % 2}").mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            tmp_path / "in" / f"d{k % 2}" / f"{k}.npz", x=np.arange(length * 2.0).reshape(length, 2), label=k
        )
    store, _ = prepare(tmp_path / "in", part_bytes=9000)
    files = sorted((tmp_path / "in").rglob("*.npz"))
    for record, path in zip(plain(store), files, strict=True):
        with np.load(path) as arrays:
            assert record["x"] == arrays["x"].tolist()
            assert record["label"] == arrays["label"].item()
        assert record["key"] == f"{path.parent.name}/{path.stem}"
    np.save(tmp_path / "one.npy", np.arange(4, dtype=">i2"))
    assert plain(prepare(tmp_path / "one.npy")[0]) == [{"array": [0, 1, 2, 3], "key": "one"}]


LANCE = """
import json, sys, lance, pyarrow.parquet as pq
import millrace as mr
folder = sys.argv[1]
lance.write_dataset(pq.read_table(f"{folder}/t.parquet"), f"{folder}/t.lance", max_rows_per_file=3)
mr.prepare_records(f"{folder}/t.lance", f"{folder}/out", workers=1, part_bytes=1000)
print(json.dumps(lance.dataset(f"{folder}/t.lance").to_table().to_pylist()))
"""


def test_lance_tables_as_lance_has_them(plain, tmp_path):
    """In a process of its own: Lance leaves threads behind, and other tests fork."""
    names = pa.array([f"n{k}" for k in range(len(LENGTHS))])
    table = arrow_table().select(["x", "y", "box", "name", "ok"]).set_column(3, "name", names)
    pq.write_table(table, tmp_path / "t.parquet")
    done = subprocess.run([sys.executable, "-c", LANCE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert plain(mr.open_store(tmp_path / "out", check=True)) == json.loads(done.stdout)


def test_records_from_python(prepare, tmp_path, plain):
    rows = events()

    def given():
        buffer = np.empty(1000, np.float32)
        for row in rows:
            buffer[: len(row["x"])] = row["x"]
            yield {**row, "x": buffer[: len(row["x"])], "raw": bytes(len(row["x"])), "sub": {"a": np.int8(3)}}

    store, report = prepare(given(), part_bytes=500)
    for record, row in zip(plain(store), rows, strict=True):
        assert {name: record[name] for name in row} == row
        assert (bytes(record["raw"]), record["sub.a"]) == (bytes(len(row["x"])), 3)
    assert store.layout.columns["x"].dtype == "float32"
    assert store.layout.columns["x"].axis == store.layout.columns["y"].axis
    assert (report.format, report.notes[-1].split(" share")[0]) == ("iterable", "x, y")


def compressed(data, codec):
    return gzip.compress(data) if codec == "gz" else zstd.compress(data)


def write_mds(folder, rows, encodings, codec=None):
    """A shard by its published layout: samples, offsets, and for columns of varying size their sizes."""
    sizes = {"int": 8, "float32": 4, "ndarray:float32:2": 8}
    names = sorted(encodings)

    def sample(row):
        parts = [row[name] for name in names]
        head = np.array(
            [len(part) for name, part in zip(names, parts, strict=True) if encodings[name] not in sizes], "<u4"
        )
        return head.tobytes() + b"".join(parts)

    samples, config = [sample(row) for row in rows], b'{"some": "config"}'
    start = 4 + 4 * (len(rows) + 1) + len(config)
    offsets = np.array([start, *(start + np.cumsum([len(one) for one in samples]))], "<u4")
    data = np.uint32(len(rows)).tobytes() + offsets.tobytes() + config + b"".join(samples)
    folder.mkdir(exist_ok=True)
    name = "shard.00000.mds" if codec is None else f"shard.00000.mds.{codec}"
    (folder / name).write_bytes(data if codec is None else compressed(data, codec))
    shard = {
        "column_names": names, "column_encodings": [encodings[name] for name in names],
        "column_sizes": [sizes.get(encodings[name]) for name in names], "compression": None, "format": "mds",
        "hashes": [], "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
        "samples": len(rows), "size_limit": 1 << 26, "version": 2, "zip_data": None,
    }  # fmt: skip
    if codec is not None:
        shard |= {
            "compression": codec,
            "zip_data": {"basename": name, "bytes": (folder / name).stat().st_size, "hashes": {}},
        }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def dynamic(array):
    """An array as MDS stores it where neither type nor shape are fixed."""
    return bytes([34, (array.ndim << 2) | 1]) + np.array(array.shape, "<u2").tobytes() + array.tobytes()


@pytest.mark.parametrize("codec", ["gz", "zstd"])
def test_compressed_mosaic_shards_are_read_whole(prepare, tmp_path, plain, codec):
    rows = [{"raw": RNG.integers(0, 256, 700_000, np.uint8).tobytes()} for _ in range(5)]  # more than one buffer
    store, _ = prepare(write_mds(tmp_path / "in", rows, {"raw": "bytes"}, codec))
    assert [bytes(record["raw"]) for record in plain(store)] == [row["raw"] for row in rows]


def test_mosaic_shards(prepare, tmp_path, plain):
    kinds = {"label": "int", "w": "float32", "name": "str", "image": "jpeg", "x": "ndarray", "v": "ndarray:float32:2"}
    arrays = [RNG.normal(size=(k + 1, 2)).astype("<f4") for k in range(5)]
    rows = [
        {
            "label": np.int64(k).tobytes(), "w": np.float32(k / 2).tobytes(), "name": f"é{k}".encode(), "image": image_bytes(k),
            "x": dynamic(arrays[k]), "v": np.array([k, 1], "<f4").tobytes(),
        }
        for k in range(5)
    ]  # fmt: skip
    store, _ = prepare(write_mds(tmp_path / "in", rows, kinds))
    for k, record in enumerate(plain(store)):
        assert (record["label"], record["w"], record["name"], record["v"]) == (k, k / 2, f"é{k}", [k, 1])
        assert bytes(record["image"]) == rows[k]["image"]
        assert record["x"] == arrays[k].tolist()
    for k in (0, 3):  # the first array says what all are; files are named in both cases
        bad = [{**row, "x": row["x"][: -1 if k == place else None]} for place, row in enumerate(rows)]
        with pytest.raises(mr.SourceError, match=r"shard\.00000\.mds'.* an array claims the shape"):
            prepare(write_mds(tmp_path / "short", bad, kinds))
    with pytest.raises(
        mr.ConfigError, match=r"column 'p' is pickled, which may run code and is never loaded; leave it out"
    ):
        prepare(write_mds(tmp_path / "bad", [{"p": b"cos\nsystem\n"}], {"p": "pkl"}))


def write_litdata(folder, items, formats, names, **more):
    samples = [np.array([len(part) for part in item], "<u4").tobytes() + b"".join(item) for item in items]
    start = 4 + 4 * (len(items) + 1)
    offsets = np.array([start, *(start + np.cumsum([len(one) for one in samples]))], "<u4")
    folder.mkdir(exist_ok=True)
    (folder / "chunk-0-0.bin").write_bytes(np.uint32(len(items)).tobytes() + offsets.tobytes() + b"".join(samples))
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = [1, {"type": "builtins.dict", "context": json.dumps(names), "children_spec": [leaf] * len(names)}]
    config = {
        "compression": None, "chunk_size": None, "chunk_bytes": 1 << 26, "data_format": formats,
        "data_spec": json.dumps(spec), "encryption": None, "item_loader": "PyTreeLoader",
        **more,
    }  # fmt: skip
    chunk = {"chunk_bytes": 1, "chunk_size": len(items), "dim": None, "filename": "chunk-0-0.bin"}
    (folder / "index.json").write_text(json.dumps({"chunks": [chunk], "config": config, "updated_at": "0"}))
    return folder


def test_litdata_chunks(prepare, tmp_path, plain):
    arrays = [RNG.normal(size=(k, 3)) for k in range(5)]
    items = [
        [
            np.int64(k).tobytes(), image_bytes(k), np.array([10, 2, *arrays[k].shape], "<u4").tobytes() + arrays[k].tobytes(),
            np.array([0, 2, *arrays[k].shape], ">u4").tobytes() + arrays[k].astype("<f4").tobytes(),
            np.arange(k, dtype="<i4").tobytes(), f"é{k}".encode(),
        ]
        for k in range(5)
    ]  # fmt: skip
    names = ["label", "image", "x", "t", "ids", "name"]
    formats = ["int", "jpeg", "numpy", "tensor", "no_header_numpy:2", "str"]
    store, _ = prepare(write_litdata(tmp_path / "in", items, formats, names))
    for k, record in enumerate(plain(store)):
        assert (record["label"], record["ids"], record["name"]) == (k, list(range(k)), f"é{k}")
        assert bytes(record["image"]) == items[k][1]
        assert record["x"] == arrays[k].tolist()
        assert record["t"] == arrays[k].astype(np.float32).tolist()
    with pytest.raises(mr.ConfigError, match="column 'p' is pickled"):
        prepare(write_litdata(tmp_path / "bad", [[b"x"]], ["pickle"], ["p"]))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_litdata_tables(prepare, tmp_path, plain, compression):
    """Items of plain values by their published layout: empty samples, an Arrow file, its size and a mark."""
    rows = [{"label": k, "name": f"é{k}", "ids": list(range(k))} for k in range(5)]
    folder = write_litdata(
        tmp_path / "in", [[]] * 5, ["int", "str", "json"], list(rows[0]), ipc_compression=compression
    )
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=2)
    chunk = folder / "chunk-0-0.bin"
    whole = chunk.read_bytes() + sink.getvalue() + struct.pack("<I8s", len(sink.getvalue()), b"LDARW01")
    chunk.write_bytes(whole)
    store, _ = prepare(folder)
    assert plain(store) == rows
    for bad in (whole[:-60] + whole[-12:], whole[:-12] + b"\xff" * 4 + whole[-8:], whole[-12:], whole[:-5]):
        chunk.write_bytes(bad)
        with pytest.raises(mr.SourceError, match="chunk-0-0"):
            prepare(folder)


def framed(data, rows):
    """A chunk in batches by its published layout: a head, where samples begin, a table of the batches, and these."""
    count = int(np.frombuffer(data[:4], "<u4")[0])
    offsets = np.frombuffer(data[4 : 4 * (count + 2)], "<u4")
    firsts = list(range(0, count, rows))
    batches = [data[offsets[k] : offsets[min(k + rows, count)]] for k in firsts]
    packed = [zstd.compress(batch) for batch in batches]
    at, table = 24 + 4 * (count + 1) + 24 * len(firsts), b""
    for first, batch, own in zip(firsts, batches, packed, strict=True):
        table += struct.pack("<IIQII", first, min(rows, count - first), at, len(own), len(batch))
        at += len(own)
    head = struct.pack("<8sHHIII", b"LDFZ01", 1, 0, count, rows, len(firsts))
    return head + (offsets - offsets[0]).tobytes() + table + b"".join(packed)


@pytest.mark.parametrize(
    ("compression", "level"), [("zstd", None), ("zstd:3", "chunk"), ("zstd", "batch"), ("zstd:3", "batch")]
)
def test_compressed_litdata_chunks(prepare, tmp_path, plain, compression, level):
    names = [f"é{k}" * k * 30_000 for k in range(5)]  # more than one buffer
    items = [[np.int64(k).tobytes(), name.encode()] for k, name in enumerate(names)]
    more = {"compression": compression, "compression_level": level}
    folder = write_litdata(tmp_path / "in", items, ["int", "str"], ["label", "name"], **more)
    chunk = folder / "chunk-0-0.bin"
    if level == "batch":
        chunk.write_bytes(framed(chunk.read_bytes(), 2))
    else:
        chunk.write_bytes(zstd.compress(chunk.read_bytes()))
        chunk = chunk.rename(folder / f"chunk-0-0.{compression}.bin")
        index = (folder / "index.json").read_text()
        (folder / "index.json").write_text(index.replace("chunk-0-0.bin", chunk.name))
    store, _ = prepare(folder)
    assert [(record["label"], record["name"]) for record in plain(store)] == list(enumerate(names))
    whole = chunk.read_bytes()
    for cut in (len(whole) - 3, 60, 20, 3):  # in the samples and in each table
        chunk.write_bytes(whole[:cut])
        with pytest.raises(mr.SourceError, match="chunk-0-0"):
            prepare(folder)


def test_litdata_samples_compressed_one_by_one_are_refused(prepare, tmp_path):
    more = {"compression": "zstd", "compression_level": "sample"}
    with pytest.raises(mr.ConfigError, match=r"compressed by 'zstd' per sample; write it with .* per batch or chunk"):
        prepare(write_litdata(tmp_path / "in", [[b"12345678"]], ["int"], ["p"], **more))


@pytest.mark.parametrize("kind", ["mds", "litdata", "datasets", "lance"])
def test_formats_of_folders_killed_and_run_again_are_the_same_store(tmp_path, expect_same_after_kills, kind):
    folder = tmp_path / "in"
    for part in range(2):
        values = range(3 * part, 3 * part + 3)
        own, ints = folder / f"p{part}", [np.int64(k).tobytes() for k in values]
        own.mkdir(parents=True)
        if kind == "mds":
            rows = [
                {"label": label, "x": dynamic(np.arange(2 + k, dtype="<f4"))}
                for k, label in zip(values, ints, strict=True)
            ]
            write_mds(own, rows, {"label": "int", "x": "ndarray"})
        elif kind == "litdata":
            items = [[label, np.arange(k, dtype="<i4").tobytes()] for k, label in zip(values, ints, strict=True)]
            write_litdata(own, items, ["int", "no_header_numpy:2"], ["label", "x"])
        else:
            rows = {"x": [[1.0] * k for k in values], "label": list(values)}
            assert run_forked(write_table, own, kind, rows) == 0  # with all threads that it leaves
    expect_same_after_kills(folder)


def write_table(folder, kind, rows):
    if kind == "lance":
        import lance

        lance.write_dataset(pa.table(rows), folder / "t.lance", max_rows_per_file=2)
        return
    import datasets

    datasets.Dataset.from_dict(rows).save_to_disk(folder, num_shards=2)
