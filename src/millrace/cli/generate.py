"""``millrace generate``: text from a trained GPT."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = 'millrace generate runs/nano --prompt "def main("'


def run(
    path: Annotated[str, typer.Argument(metavar="RUN", help="The folder of the run.")],
    prompt: Annotated[str, typer.Option(help="How the text begins.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many; 0 for all.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the choices.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="latest or best.")] = "latest",
    store: Annotated[str | None, typer.Option(help="The run's store, if it was moved.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODULE:CALLABLE", help="The run's own model, if you trust it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Continue a prompt with a trained GPT."""
    from pathlib import Path

    from millrace.cli.console import print_json, print_line
    from millrace.cli.train_console import training_extras

    with training_extras():
        from millrace.train.generate import generate
        from millrace.train.load import load_model

    trained = load_model(Path(path), checkpoint, own=model, store=store)
    text = generate(trained, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    if as_json:
        print_json({"step": trained.step, "prompt": prompt, "text": text})
    else:
        print_line(text)
