"""Text from a trained GPT, one token after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from millrace.errors import ConfigError
from millrace.train.models.gpt import GPT
from millrace.train.open_run import TrainedModel, not_for


def generate(
    trained: TrainedModel, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> str:
    """The prompt and its continuation, up to ``tokens`` tokens or the end of the document."""
    if not isinstance(trained.model, GPT):
        raise ConfigError(not_for(trained, "writes no text", "forecast"))
    tokenizer = trained.store.tokenizer
    begin = tokenizer.encode(prompt).astype(np.int64).tolist()
    ids = begin or [tokenizer.end]  # a document begins after the end of another
    most = len(ids) + tokens
    for token in _sample(trained.model, ids, tokenizer.vocab_size, temperature, top_k, seed):
        if token == tokenizer.end or len(ids) >= most:
            break
        ids.append(token)
    text: str = tokenizer.decode(ids if begin else ids[1:])
    return text


@torch.no_grad()
def _sample(model: GPT, ids: list[int], known: int, temperature: float, top_k: int, seed: int) -> Iterator[int]:
    """Yields next tokens without end; the caller adds them to ``ids``."""
    dice = torch.Generator().manual_seed(seed)
    while True:
        context: Any = torch.tensor([ids[-model.length :]])
        scores = model.logits(context)[0, -1, :known].float()  # the model may have more ids than the tokenizer
        if temperature == 0:
            yield int(scores.argmax())
            continue
        best, places = scores.topk(min(top_k or known, known))
        chances = torch.softmax((best - best[0]).double() / temperature, -1)  # differences: never inf
        yield int(places[torch.multinomial(chances, 1, generator=dice)])
