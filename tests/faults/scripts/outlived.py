"""A writer whose forked child outlives it: ``outlived.py PATH`` prints the child's pid and waits to be killed."""

from __future__ import annotations

import os
import sys
import time

import millrace as mr


def main() -> None:
    writer = mr.StoreWriter(sys.argv[1], columns={"x": mr.Column("int64")})
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    print(child, flush=True)
    time.sleep(600)
    writer.abort()


if __name__ == "__main__":
    main()
