"""Runs a script with a fault at its n-th change of the disk.

    python -m millrace.testing.run_with_fault --at 12 --kind kill -- prepare.py --out store/
    python -m millrace.testing.run_with_fault --at 3 --kind EIO --operation fsync -- prepare.py --out store/
    python -m millrace.testing.run_with_fault --count -- prepare.py --out store/

``--count`` runs it undisturbed and prints how many steps there are, to stderr.
"""

from __future__ import annotations

import argparse
import errno
import runpy
import sys

from millrace.testing.faults import count_steps, iofault


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m millrace.testing.run_with_fault", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--at", type=int, default=1, metavar="N", help="which step fails, from 1")
    parser.add_argument("--kind", type=_kind, default="kill", help="kill, or an errno by name: ENOSPC, EIO, ...")
    parser.add_argument("--operation", help="count only mkdir, open, write, fsync, rename, unlink or rmdir")
    parser.add_argument("--lasting", action="store_true", help="fail every later step too")
    parser.add_argument("--count", action="store_true", help="fail nothing; print the number of steps")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of the script")
    given = parser.parse_args(arguments)
    sys.argv = [given.script, *given.rest]
    if given.count:
        with count_steps(given.operation) as steps:
            runpy.run_path(given.script, run_name="__main__")
        sys.stderr.write(f"{len(steps)} steps\n")
        return
    with iofault(given.at, given.kind, operation=given.operation, lasting=given.lasting):
        runpy.run_path(given.script, run_name="__main__")


def _kind(text: str) -> int | str:
    if text == "kill":
        return text
    code = getattr(errno, text, None)
    if not isinstance(code, int):
        raise argparse.ArgumentTypeError(f"{text!r} is neither kill nor an errno such as ENOSPC")
    return code


if __name__ == "__main__":
    main()
