"""Images through a feed: the same in threads, processes, ranks, batches and after a resume, also with a corrupt one."""

import warnings

import numpy as np
import pytest

import millrace as mr
from millrace.feed.rng import RecordRng

BROKEN = 5


@pytest.fixture(scope="module")
def path(photos, tmp_path_factory):
    """Twelve JPEGs, the sixth cut off in the middle."""
    path = tmp_path_factory.mktemp("images") / "store"
    per_record = {"label": mr.Column("int64", per="record"), "key": mr.Column("string", per="record")}
    with mr.StoreWriter(path, columns={"image": mr.Column("uint8"), **per_record}) as writer:
        for k, data in enumerate(photos):
            image = data[: len(data) // 2] if k == BROKEN else data
            writer.append({"image": image, "label": k, "key": f"shapes/{k}.jpg"})
    return path


def feed_of(path, columns=None, **options):
    decode = mr.images.decode(size=20, normalize="imagenet", on_error=options.pop("on_error", "replace"))
    view = mr.Records(mr.open_store(path), columns=columns)
    return mr.Feed(view, **{"batch": 4, "seed": 3, "device": "numpy", "epochs": 2, "decode": decode, **options})


def by_position(*feeds):
    found = {}
    for feed in feeds:
        with feed:
            for batch in feed:
                for k in np.flatnonzero(batch.valid):
                    record = batch["image"][k].tobytes(), bool(batch["image_ok"][k]), int(batch["label"][k])
                    found[int(batch.positions[k])] = record
    return found


@pytest.fixture(scope="module")
def expected(path):
    """Every position on its own, without a feed."""
    store = mr.open_store(path)
    view, order = mr.Records(store), mr.Shuffled(12, 3)
    decode, found = mr.images.decode(size=20, normalize="imagenet", on_error="replace"), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for position, sample in enumerate(order.samples(np.arange(24))):
            record = decode(view[int(sample)], RecordRng(3, position))
            found[position] = record["image"].tobytes(), bool(record["image_ok"]), int(record["label"])
    return found


ignore_replaced = pytest.mark.filterwarnings("ignore:an image cannot be read:UserWarning")


@ignore_replaced
@pytest.mark.parametrize(
    "options",
    [
        {"workers": 2},
        {"batch": 7},
        pytest.param({"workers": 2, "processes": True}, marks=pytest.mark.needs_core),
        {"columns": ["image", "label"]},
    ],
    ids=str,
)
def test_every_way_and_batch_gives_the_same_images(path, expected, options):
    assert by_position(feed_of(path, **options)) == expected


@ignore_replaced
def test_a_corrupt_image_leaves_ranks_and_resume_as_they_are(path, expected):
    """Two ranks, stopped after their second batch, continued by one rank with another batch."""
    feeds = [feed_of(path, rank=rank, world=2) for rank in range(2)]
    seen, lengths = {}, []
    for feed in feeds:
        with feed:
            steps = [batch for _, batch in zip(range(2), feed, strict=False)]
            lengths.append(len(steps))
            for batch in steps:
                pairs = zip(batch.positions, batch["image"], batch["image_ok"], batch["label"], strict=True)
                seen |= {int(at): (image.tobytes(), bool(ok), int(label)) for at, image, ok, label in pairs}
    assert lengths == [2, 2]
    rest = feed_of(path, batch=5)
    rest.load_state_dict(feeds[0].state_dict())
    assert feeds[0].state_dict() == feeds[1].state_dict()
    assert seen | by_position(rest) == expected
    assert sum(not ok for _, ok, _ in expected.values()) == 2  # once an epoch


@pytest.mark.parametrize("options", [{}, pytest.param({"processes": True}, marks=pytest.mark.needs_core)], ids=str)
def test_a_corrupt_image_stops_the_feed_and_is_named(path, options):
    position = mr.Shuffled(12, 3).samples(np.arange(12)).tolist().index(BROKEN)
    with feed_of(path, on_error="stop", **options) as feed, pytest.raises(mr.StageFailed) as caught:
        list(feed)
    assert (caught.value.sample, caught.value.position) == (BROKEN, position)
    assert f"at position {position} (sample {BROKEN}): SourceError: the image 'shapes/5.jpg' cannot be read" in str(
        caught.value
    )
    assert feed.state_dict()["position"] == position // 4 * 4


@ignore_replaced
def test_batches_keep_their_images_while_somebody_holds_them(path, expected):
    with feed_of(path, workers=2) as feed:
        batches = list(feed)
    images = [image.tobytes() for batch in batches for image in batch["image"]]
    assert images == [expected[position][0] for position in range(24)]


@ignore_replaced
def test_memory_is_used_again(path):
    """A loop that keeps nothing sees few arrays, however many batches it takes."""
    addresses = set()
    with feed_of(path, epochs=10, workers=1, depth=2) as feed:
        for batch in feed:
            addresses.add(batch["image"].ctypes.data)
            del batch
    assert len(addresses) <= 2 + 2
