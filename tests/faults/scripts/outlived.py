"""A writer whose forked child outlives it: ``outlived.py PATH`` prints the child's pid and waits to be killed."""

from __future__ import annotations

import os
import sys
import time

import millrace as mr


def main() -> None:
    writer = mr.StoreWriter(sys.argv[1], columns={"x": mr.Column("int64")})
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # by itself: only then has it let go of what was its parent's
        time.sleep(600)
        os._exit(0)
    time.sleep(600)
    writer.abort()


if __name__ == "__main__":
    main()
