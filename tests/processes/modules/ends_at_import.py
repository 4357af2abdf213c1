"""Ends every worker that imports it, without a word; with a folder in ENDS_AT_IMPORT it only kills the first four."""

import os
import signal

from millrace.feed.processes import worker

folder = os.environ.get("ENDS_AT_IMPORT")
if worker.is_worker and folder is None:
    os._exit(9)
if worker.is_worker and len(os.listdir(folder)) < 4:
    open(os.path.join(folder, str(os.getpid())), "w").close()
    os.kill(os.getpid(), signal.SIGKILL)


def transform(batch, rng):
    return batch
