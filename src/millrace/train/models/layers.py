"""The transformer layer that the GPT and the forecaster share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tensors: TypeAlias = Mapping[str, Tensor]  # a batch


class Runs(NamedTuple):
    """The flattened tokens of a batch as runs that see nothing of each other: run k is ``[starts[k], starts[k + 1])``."""

    starts: Tensor
    longest: int


Seen: TypeAlias = Tensor | Runs | None  # what a token may see: by a mask (B, L, L), within its run, or all before it


@functools.cache
def varlen() -> Callable[..., Tensor] | None:
    """Causal attention within runs, ``(q, k, v, starts, longest)``, if this torch has it; it is for CUDA in bf16 or fp16."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes_window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: Any = {"window_size": (-1, 0)} if takes_window else {"is_causal": True}  # older ones have the flag

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
        mixed = varlen_attn(q, k, v, starts, starts, longest, longest, **causal)
        assert isinstance(mixed, Tensor)
        return mixed

    return attend


def takes_runs(x: Tensor, head_width: int) -> bool:
    """Whether ``varlen`` can serve layers of this input: it knows no dropout and is not for compiled or deterministic steps."""
    lowered = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return (
        x.is_cuda
        and lowered in (torch.bfloat16, torch.float16)
        and head_width % 8 == 0
        and head_width <= 256
        and not torch.compiler.is_compiling()
        and not torch.are_deterministic_algorithms_enabled()
        and varlen() is not None
    )


class Attention(nn.Module):
    """Causal multi-head self-attention through ``scaled_dot_product_attention``, or ``varlen`` where runs are given."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor, seen: Seen = None) -> Tensor:
        B, L, D = x_BLD.shape
        qkv = self.qkv(x_BLD).view(B, L, 3, self.heads, D // self.heads)
        if isinstance(seen, Runs):
            attend = varlen()
            assert attend is not None
            return self.out(attend(*qkv.flatten(0, 1).unbind(1), *seen).reshape(B, L, D))  # type: ignore[no-any-return]
        q_BNLK, k_BNLK, v_BNLK = qkv.permute(2, 0, 3, 1, 4)
        mask = None if seen is None else seen[:, None]
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

    def forward(self, x_BLD: Tensor, seen: Seen = None) -> Tensor:
        x_BLD = x_BLD + self.drop(self.attention(self.norm_1(x_BLD), seen))
        hidden = functional.gelu(self.up(self.norm_2(x_BLD)), approximate="tanh")
        out: Tensor = x_BLD + self.drop(self.down(hidden))
        return out


class Layers(nn.ModuleList):
    """Layers one after the other. With ``recompute`` the backward pass computes their activations again."""

    recompute = False

    def run(self, x_BLD: Tensor, seen: Seen = None) -> Tensor:
        for layer in self:
            if self.recompute and torch.is_grad_enabled():
                x_BLD = checkpoint(layer, x_BLD, seen, use_reentrant=False)
            else:
                x_BLD = layer(x_BLD, seen)
        return x_BLD


def init_weights(model: nn.Module, layers: int) -> None:
    """Starts weights as GPT-2 does: normal(0.02), residual outputs smaller by sqrt(2 * layers), biases 0."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            is_residual = name.endswith(("attention.out", "down"))
            nn.init.normal_(module.weight, std=0.02 / (2 * layers) ** 0.5 if is_residual else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
