"""The transformer layer that the GPT and the forecaster share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tensors: TypeAlias = Mapping[str, Tensor]  # a batch


class Attention(nn.Module):
    """Causal multi-head self-attention through ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor, mask_BLL: Tensor | None = None) -> Tensor:
        B, L, D = x_BLD.shape
        q_BNLK, k_BNLK, v_BNLK = self.qkv(x_BLD).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        mask = None if mask_BLL is None else mask_BLL[:, None]
        mixed_BNLK = functional.scaled_dot_product_attention(
            q_BNLK, k_BNLK, v_BNLK, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
        )  # fmt: skip
        out: Tensor = self.out(mixed_BNLK.transpose(1, 2).reshape(B, L, D))
        return out


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BLD: Tensor, mask_BLL: Tensor | None = None) -> Tensor:
        x_BLD = x_BLD + self.drop(self.attention(self.norm_1(x_BLD), mask_BLL))
        hidden = functional.gelu(self.up(self.norm_2(x_BLD)), approximate="tanh")
        out: Tensor = x_BLD + self.drop(self.down(hidden))
        return out


class Layers(nn.ModuleList):
    """Layers one after the other. With ``recompute`` the backward pass computes their activations again."""

    recompute = False

    def run(self, x_BLD: Tensor, mask_BLL: Tensor | None = None) -> Tensor:
        for layer in self:
            if self.recompute and torch.is_grad_enabled():
                x_BLD = checkpoint(layer, x_BLD, mask_BLL, use_reentrant=False)
            else:
                x_BLD = layer(x_BLD, mask_BLL)
        return x_BLD


def init_weights(model: nn.Module, layers: int) -> None:
    """Starts weights as GPT-2 does: normal(0.02), residual outputs smaller by sqrt(2 * layers), biases 0."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            is_residual = name.endswith(("attention.out", "down"))
            nn.init.normal_(module.weight, std=0.02 / (2 * layers) ** 0.5 if is_residual else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
