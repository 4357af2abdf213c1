"""A GPT: token and position embeddings, layers, and the token embedding again as the output."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from millrace.train.models.layers import Layer, Layers, Runs, Seen, Tensors, init_weights, takes_runs
from millrace.view.packed import cu_seqlens

IGNORED = -100  # a target that does not count


class GPT(nn.Module):
    """Predicts the next token over ``vocabulary`` ids, for at most ``length`` tokens.

    With ``separator`` (the id that ends a document), attention stays within a document. A batch with ``document`` and
    ``place``, as ``Packed`` gives it, says itself where documents lie; positions then count within a document.
    """

    def __init__(
        self, *, vocabulary: int, length: int, layers: int, heads: int, width: int, dropout: float = 0.0,
        separator: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.length, self.separator, self.heads, self.dropout = length, separator, heads, dropout
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = Layers([Layer(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        init_weights(self, layers)
        self._num_weights = sum(p.numel() for p in self.parameters()) - self.positions.weight.numel()

    def logits(self, x_BL: Tensor, document_BL: Tensor | None = None, place_BL: Tensor | None = None) -> Tensor:
        """The scores of the next token after each token."""
        places = torch.arange(x_BL.shape[1], device=x_BL.device) if place_BL is None else place_BL % self.length
        hidden_BLD = self.drop(self.tokens(x_BL) + self.positions(places))
        if document_BL is None and self.separator is not None:
            document_BL = documents_by(x_BL, self.separator)
        hidden_BLD = self.norm(self.blocks.run(hidden_BLD, self._seen(hidden_BLD, document_BL)))
        return functional.linear(hidden_BLD, self.tokens.weight)

    def _seen(self, hidden_BLD: Tensor, document_BL: Tensor | None) -> Seen:
        """What each token may see: nothing of other documents. Runs cost less than a mask, where the GPU takes them."""
        if document_BL is None:
            return None
        has_dropout = self.training and self.dropout > 0
        if has_dropout or not takes_runs(hidden_BLD, hidden_BLD.shape[2] // self.heads):
            return document_mask(document_BL)
        return Runs(cu_seqlens(document_BL), document_BL.shape[1])

    def forward(self, batch: Tensors) -> Tensor:
        """The mean loss over the targets of a batch with ``x``, ``y`` and perhaps ``mask``."""
        y_BL = batch["y"]
        if "mask" in batch:
            y_BL = y_BL.masked_fill(batch["mask"] == 0, IGNORED)
        logits_BLV = self.logits(batch["x"], batch.get("document"), batch.get("place"))
        pairs = logits_BLV.flatten(0, 1), y_BL.flatten()
        total = functional.cross_entropy(*pairs, ignore_index=IGNORED, reduction="sum")
        return total / self.targets(batch).clamp(min=1)

    def targets(self, batch: Tensors) -> Tensor:
        """How many targets count in a batch: the weight of its mean loss."""
        if "mask" in batch:
            return (batch["mask"] != 0).sum()
        return torch.full((), batch["y"].numel(), device=batch["y"].device)

    def flops(self, batch: Tensors) -> float:
        """The operations of one forward and backward pass: 6 per parameter and token, and attention."""
        num_tokens, length = batch["x"].numel(), batch["x"].shape[1]
        return float(num_tokens) * (6 * self._num_weights + 12 * len(self.blocks) * self.tokens.embedding_dim * length)


def documents_by(x_BL: Tensor, separator: int) -> Tensor:
    """The number of each token's document in its block. A separator belongs to the document it ends."""
    return (x_BL == separator).cumsum(1) - (x_BL == separator).long()


def document_mask(documents_BL: Tensor) -> Tensor:
    """(B, L, L): which earlier tokens each token may see."""
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    length = documents_BL.shape[1]
    return same_BLL & torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril()
