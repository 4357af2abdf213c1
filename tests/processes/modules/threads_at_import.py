"""Has a thread as soon as it is imported: processes must not be forked beside it."""

import threading
import time

threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def transform(batch, rng):
    return batch
