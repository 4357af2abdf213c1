"""Generated images, compressed by Pillow."""

import io

import numpy as np
import pytest
from PIL import Image


def photo(number, height=60, width=80):
    """Smooth colours with some noise, so that compression leaves nearby pixels alike."""
    rng = np.random.default_rng(number)
    y, x = np.mgrid[0:height, 0:width] / 20
    waves = np.stack([np.sin(x * (1 + c) + number) + np.cos(y * (2 - c / 2) + number * c) for c in range(3)], axis=-1)
    return np.clip(waves * 50 + 128 + rng.normal(0, 3, waves.shape), 0, 255).astype(np.uint8)


def compressed(pixels, format="JPEG", **options):
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, format, **options)
    return np.frombuffer(file.getvalue(), np.uint8)


@pytest.fixture(scope="session")
def photos():
    """Twelve JPEGs of three sizes."""
    return [compressed(photo(k, *[(60, 80), (75, 50), (150, 200)][k % 3]), quality=90) for k in range(12)]
