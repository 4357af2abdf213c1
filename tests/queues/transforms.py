"""Transforms of the tests, in a module that workers import by name."""

import os
import time


def noise(batch, rng):
    """Random numbers that follow the position, and a column of text."""
    values = batch["x"].values + int(rng.integers(0, 9)[0])
    return {"x": type(batch["x"])(values, batch["x"].offsets), "name": [f"p{p}" for p in batch.positions]}


def slow(batch, rng):
    """Tells that it works, then waits as long as the file says."""
    folder = os.environ.get("MILLRACE_TEST_FOLDER", "")
    if folder:
        with open(os.path.join(folder, f"began-{os.getpid()}"), "a") as file:
            file.write("x")
        while os.path.exists(os.path.join(folder, "hold")):
            time.sleep(0.01)
    return {"x": batch["x"] * 2}


def later(batch, rng):
    """Takes so many seconds where the environment says so."""
    time.sleep(float(os.environ.get("MILLRACE_TEST_SLEEP_S", "0")))
    return {"x": batch["x"] + 1}


def broken(batch, rng):
    if 160 in batch.positions:
        raise ValueError("my bug")
    return {"x": batch["x"]}


def decode_ragged(record, rng):
    from millrace import Ragged

    return {"x": Ragged.one(record["x"][: int(record["x"][0]) % 50])}
