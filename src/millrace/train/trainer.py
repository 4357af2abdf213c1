"""The training loop: from a configuration and a run folder to a trained model, through any number of kills.

``Trainer`` is built in the order things can go wrong (configuration, store, view, model, checkpoint), so that what does
not fit is said before the first step. ``run`` takes steps; each is one batch of the feed and one step of the optimiser.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from millrace.errors import MillraceError
from millrace.feed.feed import Feed
from millrace.store import platform
from millrace.train import data, run, state
from millrace.train.board import Board
from millrace.train.checkpoint import Checkpoints, State, name_of
from millrace.train.console import Console, Silent, console_for_python
from millrace.train.dist import World, end_world, is_told_elsewhere, of_ranks, start_world
from millrace.train.evaluate import evaluate
from millrace.train.losses import Losses
from millrace.train.memory import memory_by_part
from millrace.train.metrics import Metrics
from millrace.train.oom import memory_for
from millrace.train.optimizers import build_optimizer
from millrace.train.pace import Pace
from millrace.train.parallel import distribute
from millrace.train.precision import Precision
from millrace.train.saver import Saver
from millrace.train.seeds import make_deterministic, seed_step
from millrace.train.settings import Config
from millrace.train.signals import Signals
from millrace.train.stepper import SMALLER_STATE, Stepper
from millrace.train.threads import set_threads
from millrace.train.warn import said_before


def train(config: Config, folder: Path, *, resume: str = "auto", console: Console | None = None) -> int:
    """Trains in a run folder, or continues there; returns the number of the signal that ended it, or 0.

    Without a console, progress goes to stderr where that is a terminal or a notebook; ``console=Silent()`` says nothing.
    """
    console = console_for_python() if console is None else console
    world = start_world(config.train.device, config.train.timeout_s)
    try:
        return _train(config, folder, world, resume, console)
    except MillraceError as error:
        error.is_told = is_told_elsewhere(error, world)
        raise
    finally:
        end_world(world)


def _train(config: Config, folder: Path, world: World, resume: str, console: Console | None) -> int:
    with run.locked(folder, world):
        try:
            trainer = Trainer(config, folder, world, resume=resume, console=console)
            try:
                return trainer.run()
            finally:
                trainer.close()
        except RuntimeError as error:
            raise of_ranks(error, world) from error


class Trainer:
    """One run on one rank. ``step`` counts the steps that are done."""

    def __init__(
        self, config: Config, folder: Path, world: World, *, resume: str = "auto", console: Console | None = None
    ) -> None:
        self.config, self.folder, self.world = config, folder, world
        self._console = console if console is not None and world.is_first else Silent()
        begun = run.read_run(folder)
        set_threads(config.train.threads, begun.threads if begun else None)
        if config.train.deterministic:
            make_deterministic()
        self.checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        before = run.earlier_run(folder, config, resume, bool(self.checkpoints.names()), self._console.say)
        self.store = self._open(before)
        config = self.config = data.resolved(config, self.store, before, self._console.say)
        self.view = data.training_view(self.store, config)
        self.val_view = data.validation_view(self.store, config)
        self.precision = Precision(config.train.precision, world.device)
        self.to_device = self.precision.to_device
        with warnings.catch_warnings():  # of a large batch: it is told in terms of the configuration
            warnings.simplefilter("ignore", UserWarning)
            self.feed = Feed(
                self.view, batch=config.train.batch, seed=config.train.seed, rank=world.rank, world=world.size, run=folder,
                device=str(world.device),
            )  # fmt: skip
        seed_step(config.train.seed, 0, 0)  # the same weights on every rank
        with memory_for(
            "while building the model", "take a smaller model, or train.parallel = 'fsdp2' on several GPUs"
        ):
            built = data.build_model(config, self.store, self.view)
            state.check_trainable(built, config.model.kind)
            self.model = self.precision.cast(built).to(world.device)
            forward = distribute(self.model, config, world)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.stepper = Stepper(self.model, forward, self.optimizer, self.precision, config, world)
        self.step = self._load()
        if world.is_first:
            run.write_run(folder, config, self.store, world, before)
        self._metrics = self._open_metrics() if world.is_first else None
        self._saver = Saver(self.checkpoints, world, asynchronous=config.checkpoint.asynchronous)
        self._signals = Signals()
        self._losses = Losses(world, self.precision, self.feed, folder)
        self._saved_step = self.step
        self._best = self._best_known()
        self._has_said_no_val = False

    # The start.

    def _open(self, before: run.Run | None) -> Any:
        """The store, as it was when the run began; rank 0 prepares an input that is not prepared yet."""
        if self.world.is_first:
            for line in self.checkpoints.sweep():
                self._console.say(line)
            data.prepare_input(self.config, self.folder, before)
        self.world.wait()
        path = data.store_path(self.config, self.folder)
        return data.open_pinned(path, None if before is None else before.fingerprint)

    def _load(self) -> int:
        """Continues from the latest checkpoint; the step it stands at, 0 without one."""
        name = self.checkpoints.named("latest")
        if name is None:
            return 0
        saved = self.checkpoints.check(name)
        with memory_for(f"while loading {name}", SMALLER_STATE):
            state.load(self.checkpoints.folder / name, saved, self.model, self.optimizer)
        self.feed.load_state_dict(saved.feed)
        self.precision.load(saved.precision)
        self._console.say(f"continuing {self.folder} after step {saved.step:,}")
        return saved.step

    def _open_metrics(self) -> Metrics:
        wants_board = self.config.train.tensorboard
        board = Board(self.folder, step=self.step, say=self._console.say) if wants_board else None
        return Metrics(self.folder, step=self.step, board=board)

    def _best_known(self) -> float | None:
        """The lowest val_loss so far; where a life was killed after the evaluation of this step, it is noted now."""
        if self._metrics is not None:
            best, (step, val_loss) = self.checkpoints.best_loss(), self._metrics.evaluated
            if step == self.step and val_loss is not None and (best is None or val_loss < best):
                self.checkpoints.note_best(step, val_loss)
        self.world.wait()
        return self.checkpoints.best_loss()

    # The loop.

    def run(self) -> int:
        """Steps to ``train.max_steps``, or until a signal; saves at the end. Returns the signal's number, or 0."""
        self._introduce()
        last = self.config.train.max_steps
        saved_at = time.monotonic()
        with self.feed, self._signals:
            stopped_by = self.evaluate() if self._owes_evaluation() else 0
            batches: Any = iter(self.feed) if self.step < last and not stopped_by else iter(())
            pace = Pace(self.model, self.world, last, self.feed.batch)
            while self.step < last and not stopped_by:
                self.step += 1
                pace.wait_begins(batches.behind_s)
                with memory_for(f"for the batch of step {self.step}", "set a smaller train.batch", step=self.step):
                    batch = self.to_device(next(batches))
                pace.wait_ends(batch, batches.behind_s)
                self._losses.add(*self.stepper.step(batch, self.step))
                is_due = self._minutes_due(saved_at)
                asked, due = self.world.largest([float(self._signals.received), float(is_due)])
                stopped_by = int(asked)
                self._tell(pace)
                saves = bool(due or stopped_by or self._every(self.config.checkpoint.every) or self.step == last)
                evaluates = self._evaluation_is_due() and not stopped_by
                if not saves and not evaluates:
                    continue
                with pace.paused():
                    if saves:  # first: nobody waits for an evaluation when the machine is about to go
                        self.save()
                        saved_at = time.monotonic()
                    if evaluates:
                        stopped_by = self.evaluate()
            self._finish(stopped_by)
        return stopped_by

    def _minutes_due(self, saved_at: float) -> bool:
        minutes = self.config.checkpoint.every_minutes
        return bool(minutes) and time.monotonic() - saved_at >= 60 * minutes

    def _every(self, steps: int) -> bool:
        return bool(steps) and self.step % steps == 0

    def _evaluation_is_due(self) -> bool:
        return self._every(self.config.evaluation.every) or self.step == self.config.train.max_steps

    def _owes_evaluation(self) -> bool:
        """Whether an earlier life ended between the checkpoint of this step and its evaluation."""
        is_missing = self._metrics is not None and self._metrics.evaluated[0] < self.step
        return self._evaluation_is_due() and bool(self.world.largest([float(is_missing)])[0])

    def _tell(self, pace: Pace) -> None:
        if not pace.has_memory:
            pace.has_memory = True
            parts = memory_by_part(self.model, self.optimizer)
            self._console.say("memory: " + ", ".join(f"{part} {size / 2**20:.1f} MiB" for part, size in parts.items()))
        if self._every(self.config.train.log_every) or self.step == self.config.train.max_steps:
            loss, norm = self._losses.look(self.step, self._saved_step)[-1]
            facts = pace.facts(self.step, self.precision.skipped if self.precision.scaler.is_enabled() else None)
            lr = self.optimizer.param_groups[0]["lr"]
            # JSON has no infinity: the norm of a step that fp16 skipped is none.
            self._write({"loss": loss, "lr": lr, "grad_norm": norm if math.isfinite(norm) else None, **facts})
            is_last = self.step == self.config.train.max_steps
            tell = self._console.say if is_last else self._console.show  # the last one stays
            tell(pace.line(self.step, loss, facts))
            self._note_saves()

    def evaluate(self) -> int:
        """Writes the loss on the val split; a signal ends it before its end: returns its number, else 0."""
        if self.val_view is None:
            if not self._has_said_no_val:
                self._console.say(
                    f"no evaluation: the store has no samples in its split {self.config.data.val_split!r}"
                )
            self._has_said_no_val = True
            return 0
        self._losses.look(self.step, self._saved_step)  # what is not finite is said of the step it came from
        with memory_for(
            f"in the evaluation after step {self.step}", "set train.micro_batch or a smaller one", step=self.step
        ):
            found = evaluate(
                self.val_view, self.stepper, self.config, self.world, self.to_device, self._asked, self._note_evaluation
            )
        if found is None:
            return self._asked()
        if found.val_loss is None:
            self._console.say(f"warning: step {self.step:,}: no val_loss, it is not finite: {found.problem}")
        elif self._is_best(found.val_loss):
            self._best = found.val_loss
            self.save()
            self._saver.note_best(self.step, found.val_loss)
        self._write(found.values())
        if found.val_loss is not None:
            self._console.say(f"step {self.step:,}: {found.line(len(self.val_view))}")
        return 0

    def _note_evaluation(self, done: int, of: int) -> None:
        self._console.note(f"step {self.step:,}: evaluation, batch {done + 1:,}/{of:,}")

    def _asked(self) -> int:
        """The signal that a rank received, the same on all of them."""
        return int(self.world.largest([float(self._signals.received)])[0])

    def _is_best(self, val_loss: float) -> bool:
        is_best = self._best is None or val_loss < self._best
        return bool(self.world.largest([float(is_best)])[0])

    def save(self) -> None:
        """Saves model, optimiser, scaler and cursor of this step. Losses are looked at first: NaN is never saved."""
        if self._saved_step == self.step:
            return
        self._losses.look(self.step, self._saved_step)
        saved = State(
            step=self.step, feed=self.feed.state_dict(), precision=self.precision.state(), world=self.world.size
        )
        self._saver.save(saved, self.model, self.optimizer)
        self._saved_step = self.step
        self._note_saves()

    def _note_saves(self) -> None:
        for done in self._saver.poll():
            self._write({"checkpoint": name_of(done.step), "stall_s": done.stall_s, "write_s": done.write_s})
            self._console.say(
                f"saved step {done.step:,}: training stood {done.stall_s * 1000:.0f} ms, written in {done.write_s:.2f} s"
            )

    def _finish(self, stopped_by: int) -> None:
        self.save()
        self._saver.finish()
        self._note_saves()
        if self.world.is_first and not stopped_by:
            from millrace.train.plot import plot_losses

            with platform.writing(self.folder / "loss.png"):
                self._console.say(plot_losses(self.folder))
        self.world.wait()

    # What is told.

    def _introduce(self) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        ranks = f", {self.world.size} ranks" if self.world.size > 1 else ""
        self._console.say(
            f"{self.config.model.kind} with {parameters:,} parameters on {self.world.device}{ranks}, "
            f"{len(self.view):,} samples, batch {self.config.train.batch}, {self.config.train.precision}, "
            f"threads {torch.get_num_threads()}"
        )
        for line in said_before(self.step, self.config, len(self.view)):
            self._console.say(line)

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(self.step, values)

    def close(self) -> None:
        self._saver.close()  # the lock on the folder is given back next
        self.feed.close()
        if self._metrics is not None:
            self._metrics.close()
