"""JAX: batches are pytrees, and numpy arrays that JAX takes as they are. Start it again and it continues exactly.

python examples/jax_loop.py STORE RUN
"""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import millrace as mr
import millrace.jax  # makes Batch a pytree

STEPS, SAVE_EVERY, RATE = 15, 4, 0.5
path, run = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else sys.exit("usage: " + __doc__.split("\n")[2])
run.mkdir(parents=True, exist_ok=True)

store = mr.open_store(path) if Path(path, "store.json").exists() else sys.exit(f"{path} is not a store")
feed = mr.Feed(mr.Blocks(store.split("train"), length=32), batch=8, seed=1, device="numpy")


@jax.jit
def train_step(weights: dict[str, jax.Array], batch: mr.Batch) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss_of(weights: dict[str, jax.Array]) -> jax.Array:
        logits = jax.nn.log_softmax(weights["embedding"][batch["x"]] @ weights["out"])
        return -jnp.take_along_axis(logits, batch["y"][..., None], -1).mean()

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients), loss


vocab, step = store.tokenizer.vocab_size, 0
rng = np.random.default_rng(0)
shapes = {"embedding": (vocab, 32), "out": (32, vocab)}
weights = {name: jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32) for name, shape in shapes.items()}
if (run / "latest.npz").exists():
    with np.load(run / "latest.npz") as saved:
        weights = {name: jnp.asarray(saved[name]) for name in weights}
        state = json.loads(str(saved["state"]))
    feed.load_state_dict(state["feed"])
    step = state["step"]

with feed, open(run / "steps-0.jsonl", "a") as log:
    for batch in feed:
        step += 1
        weights, loss = train_step(weights, batch)
        print(json.dumps({"step": step, "loss": float(loss), "samples": batch.samples.tolist()}), file=log, flush=True)
        if step % SAVE_EVERY == 0:
            np.savez(run / "next.npz", **weights, state=json.dumps({"step": step, "feed": feed.state_dict()}))
            os.replace(run / "next.npz", run / "latest.npz")
        if step >= STEPS:
            break
