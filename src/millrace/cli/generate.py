"""``millrace generate``: text from a trained GPT."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from millrace.cli import options

EXAMPLE = 'millrace generate runs/nano --prompt "def main("'


def run(
    path: options.RunFolder,
    prompt: Annotated[str, Option(help="The text to continue.")] = "",
    tokens: Annotated[int, Option(min=1, help="Write at most this many tokens.")] = 200,
    temperature: Annotated[float, Option(min=0.0, help="Higher is more varied; 0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, Option(min=0, help="Choose among this many likeliest tokens; 0: among all.")] = 50,
    seed: Annotated[int, Option(help="Seed of the random choices; the same seed gives the same text.")] = 0,
    checkpoint: options.Checkpoint = "latest",
    store: options.MovedStore = None,
    model: options.OwnModel = None,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt with a trained GPT."""
    from millrace.cli.printing import print_json, print_line
    from millrace.terminal import LINES

    with options.training_extras():
        from millrace.train.generate import generate

    trained = options.load_trained(path, checkpoint, model, store)
    text = generate(trained, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    if as_json:
        print_json({"step": trained.step, "prompt": prompt, "text": text})
    else:
        print_line(text, keep=LINES)
