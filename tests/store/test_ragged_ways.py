"""Ways out of a Ragged: padded, cropped, nested tensors, batch vectors, awkward arrays; on numpy and torch."""

import math

import awkward
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.padding import numpy_padded

LENGTHS = st.lists(st.integers(0, 5), max_size=8)
DTYPES = ("bool", "uint8", "int16", "int64", "float16", "float32", "float64", "complex64")


def ragged_of(lengths, dtype="float32", tail=(), seed=0):
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 99, (sum(lengths), *tail))
    return mr.Ragged(values.astype(dtype), np.cumsum([0, *lengths]))


@given(
    lengths=LENGTHS,
    dtype=st.sampled_from(DTYPES),
    tail=st.sampled_from([(), (1,), (2, 3), (0,)]),
    length=st.none() | st.integers(0, 7),
    value=st.sampled_from([0, 1, -0.0, 7]),
)
def test_padding_is_that_of_its_twin_for_arrays_and_tensors(lengths, dtype, tail, length, value):
    ragged = ragged_of(lengths, dtype, tail)
    width = max(lengths, default=0) if length is None else length
    expected = numpy_padded(ragged.values, ragged.offsets, value, width)
    assert expected.shape == (len(lengths), width, *tail)
    for row, item in zip(expected, ragged, strict=True):
        assert np.array_equal(row[: len(item)], item[:width])
        assert np.all(row[len(item) :] == np.array(value).astype(dtype))
    found = ragged.pad(value, length)
    assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())
    tensors = ragged.to("cpu")
    for tensor in (tensors.pad(value, length), on_torch(tensors, value, length)):
        assert isinstance(tensor, torch.Tensor)
        assert (tensor.shape, tensor.numpy().tobytes()) == (expected.shape, expected.tobytes())


def on_torch(tensors, value, length):
    """As on a GPU: by operations of torch alone."""
    from millrace.padding import _padded_tensor

    width = int(tensors.lengths.max()) if length is None and len(tensors) else length or 0
    return _padded_tensor(tensors.values, tensors.offsets, value, width)


@pytest.mark.parametrize("length", [-1, 1.5])
def test_a_length_that_cannot_be_is_a_plain_error(length):
    with pytest.raises(mr.ConfigError, match="length="):
        mr.Ragged(np.arange(5), np.array([0, 4, 5])).pad(length=length)


@pytest.mark.parametrize("dtype", ["int16", "uint8"])
def test_padding_and_places_that_cannot_be_are_refused(dtype):
    ragged = mr.Ragged(np.ones(5, dtype), np.array([0, 4, 5]))
    for own in (ragged, ragged.to("cpu")):
        for value in (70_000, 0.5, math.nan, "a", -40_000):
            with pytest.raises(mr.ConfigError, match=f"value={value!r}; expected what .*{dtype} holds"):
                own.pad(value=value)
        assert own.pad(value=True).sum() == 8
        for at in (-1, 1.5, math.nan, "x", [0.5], [[0.5, 0.5]]):
            with pytest.raises(mr.ConfigError, match="expected a number from 0"):
                own.crop(2, at)


def test_padding_strided_bfloat16_and_values_of_a_model():
    ragged = ragged_of([2, 0, 3], tail=(4,))
    strided = mr.Ragged(ragged.values[:, ::2], ragged.offsets)
    assert np.array_equal(strided.pad()[2], strided[2])
    half = ragged.map(torch.from_numpy).map(lambda t: t.bfloat16() if t.is_floating_point() else t)
    assert half.pad().dtype == torch.bfloat16
    assert half.pad()[2].float().tolist() == half[2].float().tolist()
    weight = torch.ones(4, requires_grad=True)
    tensors = ragged.to("cpu")
    scores = tensors.with_values(tensors.values @ weight).pad(value=-1e9, length=2)
    assert scores[1].tolist() == [-1e9, -1e9]
    scores[2].sum().backward()
    assert weight.grad.tolist() == ragged[2][:2].sum(axis=0).tolist()
    with pytest.raises(mr.ConfigError, match="3 values for 5 rows"):
        tensors.with_values(weight[:3])


@given(
    lengths=LENGTHS,
    length=st.integers(0, 6),
    at=st.sampled_from([0.0, 0.5, 0.999, 1.0]),
    seed=st.none() | st.integers(0, 9),
)
def test_a_crop_is_a_run_of_rows_of_each_item(lengths, length, at, seed):
    ragged = ragged_of(lengths, "int64", (2,))
    where = np.full(len(lengths), at) if seed is None else np.random.default_rng(seed).random(len(lengths))
    found = ragged.crop(length, at if seed is None else where)
    for item, whole, share in zip(found, ragged, where, strict=True):
        over = max(0, len(whole) - length)
        first = min(int(share * (over + 1)), over)
        assert item.tolist() == whole[first : first + length].tolist()
    tensors = ragged.to("cpu").crop(length, at if seed is None else torch.from_numpy(where))
    assert (tensors.values.tolist(), tensors.offsets.tolist()) == (found.values.tolist(), found.offsets.tolist())


def test_a_random_crop_follows_the_position():
    store = mr.from_arrays({"hits": np.arange(600), "label": np.arange(60)}, np.arange(0, 601, 10))

    def crop(batch, rng):
        return {**batch, "hits": batch["hits"].crop(4, rng.uniform())}

    options = {"seed": 2, "epochs": 1, "device": "numpy", "transform": crop}
    one = {
        int(s): item.tolist()
        for b in mr.Feed(mr.Records(store), batch=20, **options)
        for s, item in zip(b.samples, b.hits, strict=True)
    }
    feed = mr.Feed(mr.Records(store), batch=7, **options)
    other = {int(s): item.tolist() for b in feed for s, item, ok in zip(b.samples, b.hits, b.valid, strict=True) if ok}
    assert one == other
    assert {len(item) for item in one.values()} == {4}
    assert len({item[0] % 10 for item in one.values()}) > 3


@given(lengths=LENGTHS, tail=st.sampled_from([(), (2,)]), is_tensor=st.booleans())
def test_other_libraries_see_the_same_items(lengths, tail, is_tensor):
    ragged = ragged_of(lengths, tail=tail)
    given_one = ragged.to("cpu") if is_tensor else ragged
    assert given_one.cu_seqlens.tolist() == ragged.offsets.tolist()
    assert str(given_one.cu_seqlens.dtype).endswith("int32")
    assert given_one.batch_vector.tolist() == [k for k, length in enumerate(lengths) for _ in range(length)]
    assert awkward.to_list(given_one.awkward()) == [item.tolist() for item in ragged]
    if lengths:
        nested = given_one.nested()
        assert nested.layout == torch.jagged
        assert [item.tolist() for item in nested.unbind()] == [item.tolist() for item in ragged]


@pytest.mark.parametrize("is_tensor", [False, True])
def test_nested_tensors_and_awkward_arrays_are_the_same_memory(is_tensor):
    ragged = ragged_of([2, 0, 3], tail=(2,))
    given_one = ragged.to("cpu") if is_tensor else ragged
    nested, ak = given_one.nested(), given_one.awkward()
    ragged.values[:] = 7  # tensors are over it too
    assert float(nested.values().sum()) == 70
    assert float(awkward.sum(ak)) == 70


def test_columns_of_one_axis_share_one_array_of_offsets(way):
    columns = {name: mr.Ragged(np.arange(9.0), np.array([0, 4, 4, 9])) for name in ("energy", "time")}
    columns["tracks"] = mr.Ragged(np.arange(5), np.array([0, 1, 5, 5]))
    view = mr.Records(mr.from_arrays(columns))
    for device in ("numpy", "cpu"):
        batches = [
            next(iter(mr.Feed(view, batch=3, device=device))),
            next(iter(mr.Feed(view, batch=3, device=device, transform=same))),
        ]
        batches += [batches[0].to("cpu")] if device == "cpu" else [view[:]]
        for batch in batches:
            assert batch["energy"].offsets is batch["time"].offsets
            assert batch["tracks"].offsets is not batch["time"].offsets
            assert sorted(batch["tracks"].lengths.tolist()) == [0, 1, 4]
            assert sorted(batch["energy"].lengths.tolist()) == [0, 4, 5]


def same(batch, rng):
    return batch


def test_parts_of_a_concat_whose_axes_differ_keep_their_own_offsets(way):
    """Two columns that share an axis in one store and not in the other."""
    together = mr.from_arrays({name: mr.Ragged(np.arange(3.0), np.array([0, 1, 3])) for name in ("a", "b")})
    apart = {"a": mr.Ragged(np.arange(4.0), np.array([0, 4, 4])), "b": mr.Ragged(np.arange(3.0), np.array([0, 0, 3]))}
    for parts in ([together, mr.from_arrays(apart)], [mr.from_arrays(apart), together]):
        view = mr.Concat([mr.Records(part) for part in parts])
        for order in (mr.Sequential(4), mr.Shuffled(4, 1)):
            batch = next(iter(mr.Feed(view, batch=4, order=order, device="numpy")))
            for name in ("a", "b"):
                expected = [view[int(sample)][name].tolist() for sample in batch.samples]
                assert [item.tolist() for item in batch[name]] == expected


def test_too_many_rows_for_int32_are_refused():
    huge = mr.Ragged.trusted(np.broadcast_to(np.float32(0), (1 << 31,)), np.array([0, 1 << 31]))
    with pytest.raises(mr.ConfigError, match="more than int32"):
        _ = huge.cu_seqlens
