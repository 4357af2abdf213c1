"""One rank of a training run, in a process of its own that the forkserver starts with torch already loaded."""

import os
import sys
import time
from pathlib import Path

import torch

from millrace.train.config import parse_config


class Lines:
    """A console that prints, so that a test can read what was said, and stands still after step ``stand_at``."""

    def __init__(self, stand_at: int) -> None:
        self.stand_at = stand_at

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, text: str) -> None:
        self.say(text)
        if text.startswith(f"step {self.stand_at}/"):
            time.sleep(1000)

    def note(self, text: str) -> None: ...


def rank(values: dict, folder: str, environment: dict[str, str], log: str, stand_at: int = 0) -> None:
    """Trains as ``millrace train`` does; exits with the signal's number, 0, or 1 and the error in the log."""
    os.environ.update(environment)
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    output = open(log, "a", buffering=1)  # noqa: SIM115 - it lives as long as the process
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    from millrace.errors import MillraceError
    from millrace.train import dist
    from millrace.train.trainer import train

    dist.held = []  # as the command does: gloo may never end when a group is freed
    try:
        stopped_by = train(parse_config(values), Path(folder), console=Lines(stand_at))
    except MillraceError as error:
        if not error.is_reported:
            print(f"error: {error}", flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(stopped_by)
