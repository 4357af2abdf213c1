"""``millrace verify-resume``: proves on your own data that a run can stop anywhere and continue exactly."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from millrace.cli import options

EXAMPLE = "millrace verify-resume corpus/ --length 1024 --batch 32"


def run(
    path: options.Layout,
    split: options.Split = None,
    length: options.Length = None,
    lookback: options.Lookback = None,
    horizon: options.Horizon = None,
    stride: options.Stride = None,
    lead: options.Lead = 0,
    column: options.ColumnName = None,
    batch: options.BatchSize = 32,
    seed: options.Seed = 0,
    steps: Annotated[int, Option(min=2, max=1_000_000, help="Steps of each trial.")] = 40,
    trials: Annotated[int, Option(min=1, max=1_000_000, help="How many trials to run, each with other stops.")] = 20,
    trial_seed: Annotated[int, Option(min=0, help="Seed of the random stops; the same seed repeats them.")] = 0,
    as_json: options.Json = False,
) -> int:
    """Prove that a stopped run continues exactly.

    Runs the feed once without a stop. Then each trial stops and restarts it at random steps, with other numbers of ranks,
    batch sizes and threads, and compares every sample and every byte. The exit code is 1 if any differs.
    """
    from millrace.cli.printing import print_json, print_line, print_table
    from millrace.feed.proof import prove_resume

    view = options.build_view(path, split, length, lookback, horizon, stride, lead, column=column)
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
