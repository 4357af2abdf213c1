"""Scaling a box of an image: the core against its twin bit for bit, and the twin against Pillow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from millrace.images.resize import Box, resize, resize_in_numpy
from millrace.native import core

ONE = ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
SIDES = st.sampled_from([1, 2, 3, 7, 8, 31, 64, 200]) | st.integers(1, 40)


@st.composite
def boxes(draw):
    """An image, a box in it and a size: also one pixel high, much larger, much smaller, and boxes within a pixel."""
    height, width = draw(SIDES), draw(SIDES)
    shares = [draw(st.floats(0, 1)) for _ in range(4)]
    top, left = height * shares[0] * 0.99, width * shares[1] * 0.99
    box = Box(top, left, max((height - top) * shares[2], 1e-3), max((width - left) * shares[3], 1e-3))
    pixels = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return pixels, box, (draw(SIDES), draw(SIDES))


@pytest.mark.needs_core
@settings(max_examples=200, deadline=None)
@given(boxes(), st.booleans(), st.booleans(), st.sampled_from(["u1", "f4"]))
def test_the_core_and_its_twin_give_the_same_bytes(case, planar, flip, dtype):
    pixels, box, size = case
    shape = (3, *size) if planar else (*size, 3)
    factors = ((0.017, 0.018, 0.02), (-2.1, -1.9, -1.7)) if dtype == "f4" else ((1.1, 1.0, 0.5), (-3.0, 0.0, 200.0))
    ours, twin = np.full(shape, 7, dtype), np.full(shape, 9, dtype)
    core.resize_image(pixels, box, ours, planar, flip, factors)
    resize_in_numpy(pixels, box, twin, planar, flip, factors)
    assert ours.tobytes() == twin.tobytes()


@settings(max_examples=100, deadline=None)
@given(boxes())
def test_pixels_are_those_of_pillow_to_one_level(case):
    pixels, box, size = case
    out = np.zeros((*size, 3), np.uint8)
    resize(pixels, box, out, planar=False, flip=False, factors=ONE)
    edges = (box.left, box.top, box.left + box.width, box.top + box.height)
    pillow = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR, box=edges)
    assert np.abs(out.astype(int) - np.asarray(pillow)).max() <= 1


def test_a_flip_is_the_mirror_image_and_planes_are_channels():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    plain, flipped = np.zeros((8, 9, 3), np.float32), np.zeros((3, 8, 9), np.float32)
    resize(pixels, Box(1, 2, 15, 20), plain, planar=False, flip=False, factors=ONE)
    resize(pixels, Box(1, 2, 15, 20), flipped, planar=True, flip=True, factors=ONE)
    assert flipped.transpose(1, 2, 0)[:, ::-1].tolist() == plain.tolist()


@pytest.mark.needs_core
@pytest.mark.parametrize(
    ("pixels", "box", "out"),
    [
        (np.zeros((4, 4, 3), np.float32), (0, 0, 4, 4), np.zeros((2, 2, 3), np.uint8)),
        (np.zeros((4, 4), np.uint8), (0, 0, 4, 4), np.zeros((2, 2, 3), np.uint8)),
        (np.zeros((4, 4, 4), np.uint8), (0, 0, 4, 4), np.zeros((2, 2, 3), np.uint8)),
        (np.zeros((0, 4, 3), np.uint8), (0, 0, 1, 4), np.zeros((2, 2, 3), np.uint8)),
        (np.zeros((4, 4, 3), np.uint8), (0, 0, 4.1, 4), np.zeros((2, 2, 3), np.uint8)),
        (np.zeros((4, 4, 3), np.uint8), (-0.1, 0, 2, 2), np.zeros((2, 2, 3), np.uint8)),
        (np.zeros((4, 4, 3), np.uint8), (0, float("nan"), 2, 2), np.zeros((2, 2, 3), np.uint8)),
        (np.zeros((4, 4, 3), np.uint8), (0, 0, 0, 2), np.zeros((2, 2, 3), np.uint8)),
        (np.zeros((4, 4, 3), np.uint8), (0, 0, 2, 2), np.zeros((2, 2, 3), np.float64)),
        (np.zeros((4, 4, 3), np.uint8), (0, 0, 2, 2), np.zeros((2, 0, 3), np.uint8)),
    ],
)
def test_wrong_arrays_and_boxes_are_refused(pixels, box, out):
    with pytest.raises(ValueError, match="resize_image needs"):
        core.resize_image(pixels, box, out, False, False, ONE)
