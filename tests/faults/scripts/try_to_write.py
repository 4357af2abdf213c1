"""Writes the store of write_store.py and tells the test, by exit code and one file, how that went.

``try_to_write.py PATH REPORT [records]``: exit 0 is a store, 3 is StoreWriteFailed, whose message and the number of
steps taken go to REPORT; anything else is a bug.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from millrace.errors import StoreWriteFailed
from millrace.testing import count_steps


def main() -> None:
    path, report, *records = sys.argv[1:]
    write = runpy.run_path(str(Path(__file__).with_name("write_store.py")))["write"]
    try:
        with count_steps() as steps:
            write(path, records=int(records[0]) if records else 12)
    except StoreWriteFailed as error:
        if report != "-":
            Path(report).write_text(json.dumps({"message": str(error), "path": error.path, "steps": len(steps)}))
        sys.exit(3)


if __name__ == "__main__":
    main()
