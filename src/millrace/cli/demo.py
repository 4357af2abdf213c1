"""``millrace demo``: from text and a table to trained models, killed and resumed on the way."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from millrace.cli import options

EXAMPLE = "millrace demo --out demo-output"

# Presets with changes. One thread: on a busy machine, two threads that wait for each other are slower than one.
GPT = (
    "nano", "data.length=64", "model.layers=2", "model.width=96", "train.max_steps=500", "train.batch=16", "train.threads=1",
    "optimizer.lr=6e-3", "optimizer.min_lr=6e-4", "checkpoint.every=100", "evaluation.batches=20"
)  # fmt: skip
LSTM = (  # forecasts the temperature of the next 12 hours from the last 48
    "lstm", "data.lookback=48", "data.horizon=12", "data.target=temperature", "model.layers=1", "model.width=48",
    "train.max_steps=150", "train.batch=64", "train.threads=1", "optimizer.lr=5e-3", "optimizer.min_lr=5e-4",
    "optimizer.warmup=10", "evaluation.every=0"
)  # fmt: skip
KILL_AT = 250  # half-way: the run then goes back to step 200, and repeats 50 steps


def run(
    out: Annotated[str | None, Option(help="Folder for the results.", show_default="demo-output")] = None,
    as_json: options.Json = False,
) -> None:
    """Prepare data, train, kill the training, continue it.

    The losses after the kill are the same to the last bit.

    Takes under three minutes on two cores and downloads nothing. If demo-output exists, it writes to demo-output-2, and so
    on.
    """
    import os
    import time

    from millrace.cli.demo_run import Demo
    from millrace.cli.printing import print_json, print_line
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
    killed = f"killed at step {text['killed_at']}, continued after {text['resumed_from']}"
    say(f"Done in {facts['seconds']:.0f} s, everything in {folder}/:")
    say(f"  {killed}: {text['compared']} losses {exact}")
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
    import itertools
    import os

    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(each for each in names if not os.path.exists(each))
