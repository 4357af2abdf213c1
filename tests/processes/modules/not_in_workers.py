"""Can be imported by the process that has the feed, but not by its workers."""

from millrace.feed.processes import worker

if worker.is_worker:
    raise ImportError("this machine has no such library")


def transform(batch, rng):
    return batch
