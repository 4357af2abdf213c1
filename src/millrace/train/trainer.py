"""The training loop: from a configuration and a run folder to a trained model, through any number of kills.

``Trainer`` is built in the order things can go wrong (configuration, store, view, model, checkpoint): a mistake is found
before the first step. ``run`` takes steps; each is one batch of the feed and one step of the optimiser.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from millrace.errors import MillraceError
from millrace.feed import journal
from millrace.feed.feed import Feed
from millrace.prepare.functions import load_function
from millrace.store import platform
from millrace.train import data, model_state, run_folder
from millrace.train.checkpoint import Checkpoints
from millrace.train.console import Console, console_for_python
from millrace.train.dist import World, end_world, is_reported_elsewhere, rank_errors, start_world
from millrace.train.evaluate import evaluate
from millrace.train.judging import Judging
from millrace.train.losses import Losses
from millrace.train.metrics import Metrics, boards
from millrace.train.optimizers import build_optimizer
from millrace.train.out_of_memory import memory_for
from millrace.train.pace import Pace, memory_by_part
from millrace.train.parallel import distribute
from millrace.train.precision import Precision
from millrace.train.profile import Profile
from millrace.train.saver import Saver
from millrace.train.seeds import make_deterministic, seed_step
from millrace.train.settings import Config
from millrace.train.signals import Signals, catch
from millrace.train.start_checks import check_batch_memory, check_columns, start_warnings
from millrace.train.state import State, name_of, problem_of
from millrace.train.stepper import SMALLER_STATE, Stepper
from millrace.train.threads import set_threads


def train(
    config: Config, folder: Path, *, resume: str = "auto", console: Console | None = None, metrics_port: str | None = None,
    profile: int = 0,
) -> int:  # fmt: skip
    """Trains in a run folder, or continues there; returns the number of the signal that ended it, or 0.

    Without a console, progress goes to stderr if that is a terminal or a notebook. ``console=Console()`` prints nothing.
    ``metrics_port`` serves the numbers to Prometheus: a port of this machine alone, or host:port. ``profile`` steps are
    recorded into RUN/profile.
    """
    console = console_for_python() if console is None else console
    world = start_world(config.train.device, config.train.timeout_s)
    try:
        with (
            run_folder.lock_run(folder, world), rank_errors(world),
            contextlib.closing(
                Trainer(config, folder, world, resume=resume, console=console, metrics_port=metrics_port, profile=profile)
            ) as trainer,
        ):  # fmt: skip
            return trainer.run()
    except MillraceError as error:
        error.is_reported = is_reported_elsewhere(error, world)
        raise
    finally:
        end_world(world)


class Trainer:
    """One run on one rank. ``step`` counts the steps that are done."""

    def __init__(
        self, config: Config, folder: Path, world: World, *, resume: str = "auto", console: Console | None = None,
        metrics_port: str | None = None, profile: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.folder, self.world = config, folder, world
        self._console = console if console is not None and world.is_first else Console()
        begun = run_folder.read_run(folder)
        set_threads(config.train.threads, begun.threads if begun else None)
        if config.train.deterministic:
            make_deterministic()
        self.checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        has_saved = self.checkpoints.has_any
        before = run_folder.earlier_run(folder, config, resume, has_saved, self._console.say)
        self.store = self._open(before, has_saved)
        config = self.config = data.with_mask_of(config, self.store, before, self._console.say)
        self.view = data.training_view(self.store, config)
        self.val_view = data.validation_view(self.store, config)
        self.precision = Precision(config.train.precision, world.device)
        with warnings.catch_warnings():  # start_warnings says it in terms of the configuration
            warnings.simplefilter("ignore", UserWarning)
            self.feed = Feed(
                self.view, batch=config.train.batch, seed=config.train.seed, rank=world.rank, world=world.size, run=folder,
                device=str(world.device), queue=config.data.queue or None,
                transform=load_function(config.data.transform or None, "data.transform ="), depth=config.data.depth,
                workers=config.data.workers or None, processes=config.data.processes,
            )  # fmt: skip
        check_batch_memory(self.feed, world.size)
        seed_step(config.train.seed, 0, 0)  # the same weights on every rank
        remedy = "take a smaller model, or train.parallel = 'fsdp2' on several GPUs"
        with memory_for("while building the model", remedy):
            model = data.build_model(config, self.store, self.view)
            model_state.check_trainable(model, config.model.kind)
            self.model = self.precision.cast(model).to(world.device)
            forward = distribute(self.model, config, world)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.stepper = Stepper(self.model, forward, self.optimizer, self.precision, config, world)
        self._profile = Profile(folder, profile, world, self._console.say)
        self.stepper.stage = self._profile.stage
        self.step = self._load()
        self._metrics: Metrics | None = None
        if world.is_first:
            run_folder.write_run(folder, config, self.store, world, before)
            shown = boards(folder, self.step, self._console.say, config.train.tensorboard, metrics_port)
            self._metrics = Metrics(folder, step=self.step, boards=shown)
        self._saver = Saver(self.checkpoints, world, asynchronous=config.checkpoint.asynchronous)
        self._signals = Signals()
        self._losses = Losses(world, self.precision, self.feed, folder)
        self._saved_step = self.step
        self._best = self._best_known()
        self._pace = Pace(self.model, world, config.train.max_steps, self.feed.batch)
        self._judging = Judging(self.feed, self._pace, self.stepper, world)

    # The start.

    def _open(self, before: run_folder.RunFile | None, has_saved: bool) -> Any:
        """The store, as it was when the run began. Rank 0 prepares an input first."""
        if self.world.is_first:
            for line in self.checkpoints.sweep():
                self._console.say(line)
            data.prepare_input(self.config, self.folder, before)
        self.world.wait()
        path = data.store_path(self.config, self.folder)
        return data.open_pinned(path, before.fingerprint if before is not None and has_saved else None)

    def _load(self) -> int:
        """Loads the latest checkpoint; returns its step, or 0 without one."""
        name = self.checkpoints.resolve("latest")
        if name is None:
            return 0
        # The first rank has just compared all bytes with their hashes, in sweep().
        saved = self.checkpoints.read(name) if self.world.is_first else self.checkpoints.check(name)
        self._check_place(name, saved)
        with memory_for(f"while loading {name}", SMALLER_STATE):
            model_state.load(self.checkpoints.folder / name, saved, self.model, self.optimizer)
        self.feed.load_state_dict(saved.feed)
        self.feed.steps_before = saved.step
        try:
            self.precision.load(saved.precision)
        except (KeyError, TypeError, ValueError) as error:
            raise self.checkpoints.damaged(name, f"precision: {problem_of(error)}") from error
        self._console.say(f"continuing {self.folder} after step {saved.step:,}")
        return saved.step

    def _check_place(self, name: str, saved: State) -> None:
        """Refuses a checkpoint whose step and position are not of one run; says where damage would not have been seen."""
        position = saved.feed.get("position")  # of another type, the feed refuses it
        if type(position) is int and (why := journal.misplaced(self.folder, saved.step, position)) is not None:
            raise self.checkpoints.damaged(name, why)
        if not saved.is_sealed:
            self._console.say(
                f"note: {name} is of millrace 0.1, whose state.json has no hash; damage to it would not be seen. "
                "Later checkpoints have one."
            )

    def _best_known(self) -> float | None:
        """The lowest val_loss so far. A start that was killed right after an evaluation did not record it: this does."""
        if self._metrics is not None:
            best, (step, val_loss) = self.checkpoints.best_loss(), self._metrics.last_evaluation
            if step == self.step and val_loss is not None and (best is None or val_loss < best):
                self.checkpoints.note_best(step, val_loss)
        self.world.wait()
        return self.checkpoints.best_loss()

    # The loop.

    def run(self) -> int:
        """Steps to ``train.max_steps``, or until a signal; saves at the end. Returns the signal's number, or 0."""
        self._introduce()
        last, pace = self.config.train.max_steps, self._pace
        saved_at = time.monotonic()
        with self.feed, catch(self._signals.note):
            stopped_by = self.evaluate() if self._owes_evaluation() else 0
            batches: Any = iter(self.feed) if self.step < last and not stopped_by else iter(())
            pace.restart()
            while self.step < last and not stopped_by:
                self.step += 1
                self._profile.begin_step(self.step)
                pace.wait_begins(batches.behind_s)
                with memory_for(f"for the batch of step {self.step}", "set a smaller train.batch", step=self.step):
                    with self._profile.stage("data wait"):
                        batch = next(batches)
                    check_columns(batch, self.config)
                    with self._profile.stage("transfer"):
                        batch = self.precision.to_device(batch)
                pace.wait_ends(batch, batches.behind_s)
                self._losses.add(*self.stepper.step(batch, self.step))
                self._profile.end_step(self.step)
                is_late = 0 < 60 * self.config.checkpoint.every_minutes <= time.monotonic() - saved_at
                received, is_due = self.world.largest([float(self._signals.received), float(is_late)])
                stopped_by = int(received)
                self._report_step()
                saves = bool(is_due or stopped_by or self._every(self.config.checkpoint.every) or self.step == last)
                evaluates = self._evaluation_is_due() and not stopped_by
                if not saves and not evaluates:
                    continue
                with pace.paused():
                    if saves:  # before the evaluation: the machine may be about to go
                        self.save()
                        saved_at = time.monotonic()
                    if evaluates:
                        stopped_by = self.evaluate()
            self._finish(stopped_by)
        return stopped_by

    def _every(self, steps: int) -> bool:
        return bool(steps) and self.step % steps == 0

    def _evaluation_is_due(self) -> bool:
        return self._every(self.config.evaluation.every) or self.step == self.config.train.max_steps

    def _owes_evaluation(self) -> bool:
        """Whether an earlier start ended between the checkpoint of this step and its evaluation."""
        is_missing = self._metrics is not None and self._metrics.last_evaluation[0] < self.step
        return self._evaluation_is_due() and bool(self.world.largest([float(is_missing)])[0])

    def _report_step(self) -> None:
        """Writes the numbers of this step, if it is time, to metrics.jsonl and the console."""
        if self._pace.is_first_step:
            parts = memory_by_part(self.model, self.optimizer)
            self._console.say("memory: " + ", ".join(f"{part} {size / 2**20:.1f} MiB" for part, size in parts.items()))
        is_last = self.step == self.config.train.max_steps
        if not self._every(self.config.train.log_every) and not is_last:
            return
        loss, norm = self._losses.look(self.step, self._saved_step)[-1]
        for end in self._judging.ends():
            self._console.say(f"warning: {end}; the batch was made again")
        facts = self._pace.facts(self.step, self.precision.skipped if self.precision.scaler.is_enabled() else None)
        if (verdict := self._judging.stretch()) is not None:
            facts |= {"verdict": verdict.name, "remedy": verdict.remedy}
        facts |= self._judging.rates()
        # JSON has no infinity: the norm of a step that fp16 skipped is null.
        norms = {"lr": self.optimizer.param_groups[0]["lr"], "grad_norm": norm if math.isfinite(norm) else None}
        self._write({"loss": loss, **norms, **facts})
        show = self._console.say if is_last else self._console.show  # the last line stays on the terminal
        show(self._pace.line(self.step, loss, facts))
        self._note_saves()

    def evaluate(self) -> int:
        """Evaluates the val split. A signal ends it early: returns the signal's number, else 0."""
        if self.val_view is None:
            return 0
        self._losses.look(self.step, self._saved_step)  # an infinite loss is reported for its own step
        remedy = "set train.micro_batch or a smaller one"
        with memory_for(f"in the evaluation after step {self.step}", remedy, step=self.step):
            result = evaluate(
                self.val_view, self.stepper, self._signal,
                lambda done, of: self._console.note(f"step {self.step:,}: evaluation, batch {done + 1:,}/{of:,}"),
            )  # fmt: skip
        if result is None:
            return self._signal()
        if result.val_loss is None:
            self._console.say(f"warning: step {self.step:,}: no val_loss, it is not finite: {result.problem}")
        elif self.world.largest([float(self._best is None or result.val_loss < self._best)])[0]:
            self._best = result.val_loss
            self.save()
            self._saver.note_best(self.step, result.val_loss)
        self._write(result.values())
        if result.val_loss is not None:
            self._console.say(f"step {self.step:,}: {result.line(len(self.val_view))}")
        return 0

    def _signal(self) -> int:
        """The signal that any rank received, the same on all ranks."""
        return int(self.world.largest([float(self._signals.received)])[0])

    def save(self) -> None:
        """Saves model, optimiser, scaler and cursor of this step. Looks at the losses first: NaN is never saved."""
        if self._saved_step == self.step:
            return
        self._losses.look(self.step, self._saved_step)
        state = State(self.step, self.feed.state_dict(), self.precision.state(), world=self.world.size)
        self._saver.save(state, self.model, self.optimizer)
        self._saved_step = self.step
        self._note_saves()

    def _note_saves(self) -> None:
        for save in self._saver.poll():
            self._write({"checkpoint": name_of(save.step), "stall_s": save.stall_s, "write_s": save.write_s})
            times = f"training paused {save.stall_s * 1000:.0f} ms, written in {save.write_s:.2f} s"
            self._console.say(f"saved step {save.step:,}: {times}")

    def _finish(self, stopped_by: int) -> None:
        self._profile.finish()
        self.save()
        self._saver.finish()
        self._note_saves()
        if (verdict := self._judging.whole()) is not None:
            self._console.say(f"what limited this run: {verdict}")
        if self.world.is_first and not stopped_by:
            from millrace.train.plot import plot_losses

            with platform.writing(self.folder / "loss.png"):
                self._console.say(plot_losses(self.folder))
        self.world.wait()

    def _introduce(self) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        ranks = f", {self.world.size} ranks" if self.world.size > 1 else ""
        self._console.say(
            f"{self.config.model.kind} with {parameters:,} parameters on {self.world.device}{ranks}, "
            f"{len(self.view):,} samples, batch {self.config.train.batch}, {self.config.train.precision}, "
            f"threads {torch.get_num_threads()}"
        )
        if self.val_view is None:
            self._console.say(f"no evaluation: the store has no samples in its split {self.config.data.val_split!r}")
        for line in start_warnings(self.step, self.config, len(self.view)):
            self._console.say(line)

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(self.step, values)

    def close(self) -> None:
        self._profile.close()
        self._saver.close()  # before the lock on the folder is released
        self.feed.close()
        if self._metrics is not None:
            self._metrics.close()
