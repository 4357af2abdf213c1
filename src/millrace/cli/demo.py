"""``millrace demo``: from text and a table to trained models, killed and resumed on the way."""

from __future__ import annotations

from typing import Annotated, Any

import typer

EXAMPLE = "millrace demo --out demo-output"

# One thread: on a machine that others use as well, two threads that wait for each other are slower than one.
GPT = """\
# A small GPT over bytes; `millrace train --help` names larger ones.
[data]
length = 64

[model]
kind = "gpt"
layers = 2
heads = 4
width = 96

[train]
max_steps = 500
batch = 16
log_every = 10
threads = 1

[optimizer]
lr = 6e-3
min_lr = 6e-4
warmup = 20

[checkpoint]
every = 100

[evaluation]
every = 100
batches = 20
"""
LSTM = """\
# Forecasts the temperature of the next 12 hours from the last 48.
[data]
lookback = 48
horizon = 12
target = ["temperature"]

[model]
kind = "lstm"
layers = 1
width = 48

[train]
max_steps = 150
batch = 64
log_every = 10
threads = 1

[optimizer]
lr = 5e-3
min_lr = 5e-4
warmup = 10
weight_decay = 0.01
"""
KILL_AT = 250  # half-way: the run then goes back to step 200, and does 50 steps again


def run(
    out: Annotated[
        str | None, typer.Option(help="Folder for what the demo writes.", show_default="demo-output")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Prepare data, train on it, get killed, resume exactly.

    Takes under three minutes on two cores and downloads nothing. Without --out it writes to demo-output, or the next free
    name.
    """
    import os
    import time

    from millrace.cli.console import print_json, print_line
    from millrace.cli.demo_run import Demo
    from millrace.errors import ConfigError

    folder = out or free_name("demo-output")
    if os.path.exists(os.path.join(folder, "gpt")):
        raise ConfigError(f"{folder} holds a demo already; remove it, or give another --out")
    os.makedirs(folder, exist_ok=True)
    say = (lambda text="": None) if as_json else print_line
    started = time.perf_counter()
    demo = Demo(folder, say)
    facts: dict[str, Any] = {"folder": folder, "text": demo.text(GPT, KILL_AT), "sensors": demo.sensors(LSTM)}
    facts["seconds"] = time.perf_counter() - started
    if as_json:
        print_json(facts)
    else:
        summarise(facts, print_line)


def summarise(facts: dict[str, Any], say: Any) -> None:
    text, sensors, folder = facts["text"], facts["sensors"], facts["folder"]
    say()
    exact = "the same to the last bit" if text["is_exact"] else "DIFFERENT"
    below = f"{text['below']:.2f} below the entropy of single bytes"
    say(f"Done in {facts['seconds']:.0f} s, everything in {folder}/:")
    say(
        f"  killed at step {text['killed_at']}, continued after {text['resumed_from']}: {text['compared']} losses {exact}"
    )
    say(f"  waiting for data: {text['wait']:.2%} of a step of the GPT, {sensors['wait']:.2%} of the LSTM")
    say(f"  GPT: loss {text['loss']:.2f} nat per byte, {below} ({text['entropy']:.2f})")
    say(f"  LSTM: {sensors['ratio']:.2f} of the squared error of repeating the last value")
    say()
    say("Pictures:")
    for picture in (*text["pictures"], *sensors["pictures"]):
        say(f"  {picture}")
    say()
    say("Try next:")
    say(f'  millrace generate {folder}/gpt --prompt "def read("')
    say(f"  millrace forecast {folder}/lstm --entity sensor-012")
    say(f"  millrace forecast {folder}/lstm --out {folder}/forecast.csv")
    say(f"  millrace explain {folder}/gpt --step {text['killed_at']}")


def free_name(name: str) -> str:
    """The name, or name-2, name-3, ... if it is taken."""
    import os

    taken = 1
    while os.path.exists(name if taken == 1 else f"{name}-{taken}"):
        taken += 1
    return name if taken == 1 else f"{name}-{taken}"
