"""What the tests of frameworks share: a small view, feeds of it, and no hub."""

import os
import warnings

import numpy as np
import pytest
import torch

import millrace as mr

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tests run side by side: the threads of torch would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def view():
    """10 samples; x of sample i is [i]."""
    return mr.Blocks(mr.from_arrays({"tokens": np.arange(11)}), length=1)


@pytest.fixture
def feed_of(view):
    return lambda **options: mr.Feed(view, **{"batch": 3, "seed": 1, **options})


@pytest.fixture(scope="session")
def events():
    hits = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    columns = {"hits": hits, "label": np.arange(10), "key": [f"k{i}" for i in range(10)]}
    return mr.Records(mr.from_arrays(columns, offsets=np.arange(0, 51, 5)))


@pytest.fixture(scope="session")
def warned_of_padding():
    """What a run is told about batches that do not fill."""

    def messages_of(run):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        return [str(own.message) for own in caught if "do not fill batches" in str(own.message)]

    return messages_of


@pytest.fixture(autouse=True)
def quiet():
    """What frameworks warn of, such as few workers, is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
