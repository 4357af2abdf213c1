"""``millrace verify-resume``: proves on the user's own data that a run can stop anywhere and continue exactly."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.cli import views

EXAMPLE = "millrace verify-resume corpus/ --length 1024 --batch 32"


def run(
    path: views.Path,
    split: views.Split = None,
    length: views.Length = None,
    lookback: views.Lookback = None,
    horizon: views.Horizon = None,
    stride: views.Stride = None,
    lead: views.Lead = 0,
    batch: views.BatchSize = 32,
    seed: views.Seed = 0,
    steps: Annotated[int, typer.Option(min=2, help="How many steps each trial runs.")] = 40,
    trials: Annotated[int, typer.Option(min=1, help="How many stop-and-restart histories to try.")] = 20,
    trial_seed: Annotated[int, typer.Option(min=0, help="Seed of the random stops, to repeat a run.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> int:
    """Prove that resuming is exact on your data.

    Runs the feed once without a stop. Then stops and restarts it at random steps with other world sizes, batch
    sizes, depths and threads, and compares every sample and every byte that follows. Exit code 1 if any differs.
    """
    from millrace.cli.console import print_json, print_line, print_table
    from millrace.feed.proof import prove_resume

    view = views.build_view(path, split, length, lookback, horizon, stride, lead)
    proof = prove_resume(view, batch=batch, seed=seed, steps=steps, trials=trials, trial_seed=trial_seed)
    failed = [trial for trial in proof if trial["difference"]]
    if as_json:
        print_json({"trials": proof, "failed": len(failed)})
        return 1 if failed else 0
    print_line("Each trial stops the feed and restarts it with another batch size and number of ranks.")
    table: list[tuple[str, ...]] = [("trial", "steps until each stop", "batch sizes", "ranks", "result")]
    for number, trial in enumerate(proof, start=1):
        legs = (", ".join(str(leg[key]) for leg in trial["legs"]) for key in ("steps", "batch", "world"))
        table.append((str(number), *legs, trial["difference"] or "identical"))
    print_table(table, right={"trial"})
    verdict = f"{len(failed)} of {len(proof)} trials DIFFER" if failed else f"all {len(proof)} trials identical"
    print_line(f"{verdict}: {batch * steps:,} positions each, every sample and byte compared with a run without stops")
    return 1 if failed else 0
