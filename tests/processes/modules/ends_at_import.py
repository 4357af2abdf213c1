"""Ends every worker that imports it, without a word."""

import os

from millrace.feed.processes import worker

if worker.is_worker:
    os._exit(9)


def transform(batch, rng):
    return batch
