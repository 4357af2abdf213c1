"""The Trainer of Hugging Face: feeds are its datasets. Start it again and it continues exactly.

torchrun --nproc-per-node 2 examples/hf_trainer.py STORE RUN
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import millrace as mr
from millrace.transformers import FeedTrainer, last_checkpoint

EPOCHS, SAVE_EVERY = 3, 4
path, run = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else sys.exit("usage: " + __doc__.split("\n")[2])
run.mkdir(parents=True, exist_ok=True)


class Logged(FeedTrainer):
    """Any Trainer of one's own; this one writes down what each step saw."""

    def training_step(self, model: Any, inputs: mr.Batch, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        with open(run / f"steps-{self.args.process_index}.jsonl", "a") as log:
            step = {"step": self.state.global_step + 1, "loss": loss.item(), "samples": inputs.samples.tolist()}
            print(json.dumps(step), file=log)
        return loss


if __name__ == "__main__":
    store = mr.open_store(path) if Path(path, "store.json").exists() else sys.exit(f"{path} is not a store")
    names = {"x": "input_ids", "y": "labels"}
    feed = mr.Feed(mr.Blocks(store.split("train"), length=32), batch=8, seed=1, rename=names, last="drop")
    val = mr.Feed(mr.Blocks(store.split("val"), length=32), batch=8, rename=names)
    set_seed(0)
    vocab = store.tokenizer.vocab_size
    config = GPT2Config(vocab_size=vocab, n_positions=32, n_embd=32, n_layer=1, n_head=2, eos_token_id=0)
    arguments = TrainingArguments(
        str(run), num_train_epochs=EPOCHS, learning_rate=1e-2, save_steps=SAVE_EVERY, eval_strategy="epoch", report_to="none",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Logged(GPT2LMHeadModel(config), arguments, train_dataset=feed.by_epoch(), eval_dataset=val)
    trainer.train(resume_from_checkpoint=last_checkpoint(run))
