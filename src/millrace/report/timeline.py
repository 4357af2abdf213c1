"""The page of ``millrace train --profile``: what each step spent its time on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.report.blocks import Block, Facts, Note, Report, Section, Table, Timeline

STAGES = ("data wait", "transfer", "forward", "backward", "optimizer")
OTHER = "other"
MEANINGS = {
    "data wait": "the loop waits for the feed; large means that data limits the run: see the verdict",
    "transfer": "the batch goes to the device and into the model's number format",
    "forward": "the model computes the loss",
    "backward": "the model computes gradients; several ranks exchange them",
    "optimizer": "gradients are clipped and weights change",
    OTHER: "everything between, such as micro-batches, seeds and sums of losses",
}
ROWS = 100  # steps that are drawn


@dataclass(frozen=True)
class Step:
    """One step: its number, how long it took, and its stages as (name, start, stop) in seconds since it began."""

    number: int
    seconds: float
    spans: Sequence[tuple[str, float, float]]

    def of(self, stage: str) -> float:
        """Seconds of a stage in this step."""
        if stage == OTHER:
            return max(0.0, self.seconds - sum(stop - start for _, start, stop in self.spans))
        return sum(stop - start for name, start, stop in self.spans if name == stage)


def timeline_report(run: str, steps: Sequence[Step], *, waits: bool) -> Report:
    """Where the time of steps went. ``waits``: every stage was waited for, as on a GPU."""
    first, last = steps[0].number, steps[-1].number
    subtitle = f"{len(steps):,} steps, {first:,} to {last:,}, recorded by torch's profiler, which makes steps slower."
    blocks: list[Block] = [Timeline("Steps", list(STAGES), [(f"{step.number:,}", step.spans) for step in steps[:ROWS]])]
    if len(steps) > ROWS:
        blocks.append(Note(f"The first {ROWS} steps are drawn; the table counts all."))
    if waits:
        blocks.append(
            Note(
                "The GPU was waited for after each stage, so that its time is its own. Without a profile stages overlap."
            )
        )
    about = "Every row is a step. It begins where the loop asks for a batch."
    return Report(
        f"{run}: where steps spend their time",
        subtitle,
        [Section("Summary", "", _summary(steps)), Section("Timeline", about, blocks)],
    )


def _summary(steps: Sequence[Step]) -> list[Block]:
    total = sum(step.seconds for step in steps)
    compute = sum(step.of(stage) for step in steps for stage in STAGES[2:])
    wait = sum(step.of("data wait") for step in steps)
    facts = [
        ("a step takes", f"{1000 * total / len(steps):,.2f} ms in the mean"),
        ("computing", f"{compute / max(total, 1e-12):.1%} of the time"),
        ("waiting for data", f"{wait / max(total, 1e-12):.1%} of the time"),
    ]
    table: list[tuple[str, ...]] = [("stage", "mean ms", "longest ms", "share", "what it is")]
    for stage in (*STAGES, OTHER):
        times = [step.of(stage) for step in steps]
        share = sum(times) / max(total, 1e-12)
        mean, longest = (f"{1000 * value:,.2f}" for value in (sum(times) / len(times), max(times)))
        table.append((stage, mean, longest, f"{share:.1%}", MEANINGS[stage]))
    return [Facts(facts), Table(table)]
