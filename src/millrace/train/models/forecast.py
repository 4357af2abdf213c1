"""Forecasters: a window of features in, the horizon of the targets out, by an LSTM or a transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from millrace.train.models.blocks import Block, Blocks, Tensors, init_weights

SMALL = 1e-5  # a window whose spread is less is taken as flat


@dataclass(frozen=True)
class Shapes:
    """What a batch of windows holds."""

    features: int
    targets: tuple[int, ...]  # numbers among the features
    lookback: int
    horizon: int
    static: int = 0
    known_future: int = 0
    categories: tuple[int, ...] = ()  # how many values each categorical column has
    static_categories: tuple[int, ...] = ()
    has_mask: bool = False


class Forecaster(nn.Module):
    """Encodes the lookback into one vector, then decodes every step of the horizon from it.

    With ``normalize`` the window enters relative to its last row and in units of its spread, and the forecast leaves the
    same way: a model that says nothing then repeats the last value.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        kind: str,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.shapes, self.normalize = shapes, normalize
        self.categorical = nn.ModuleList([nn.Embedding(n, _width_of(n)) for n in shapes.categories])
        self.static_categorical = nn.ModuleList([nn.Embedding(n, _width_of(n)) for n in shapes.static_categories])
        row = shapes.features * (2 if shapes.has_mask else 1) + sum(map(_width_of, shapes.categories))
        self.enter = nn.Linear(row, width)
        self.encoder: LSTMEncoder | TransformerEncoder
        if kind == "lstm":
            self.encoder = LSTMEncoder(width, layers, dropout)
        else:
            self.encoder = TransformerEncoder(width, layers, heads, dropout, shapes.lookback)
        static = shapes.static + sum(map(_width_of, shapes.static_categories))
        self.static = nn.Linear(static, width) if static else None
        self.known = nn.Linear(shapes.known_future, width) if shapes.known_future else None
        self.steps = nn.Parameter(torch.randn(shapes.horizon, width) * 0.02)
        self.mix, self.leave = nn.Linear(width, width), nn.Linear(width, len(shapes.targets))
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forecast(self, batch: Tensors) -> Tensor:
        """(B, H, T), in the units of ``y``."""
        x_BLF = batch["x"]
        last_BF, spread_BF = self._level(batch)
        rows = [(x_BLF - last_BF[:, None]) / spread_BF[:, None]]
        if self.shapes.has_mask:
            seen_BLF = (batch["mask"] != 0).to(x_BLF.dtype)
            rows = [rows[0] * seen_BLF, seen_BLF]
        rows += [table(batch["categorical"][..., k].long()) for k, table in enumerate(self.categorical)]
        state_BD = self.encoder(functional.gelu(self.enter(torch.cat(rows, -1))))
        if self.static is not None:
            state_BD = state_BD + self.static(self._static(batch))
        steps_BHD = state_BD[:, None] + self.steps
        if self.known is not None:
            steps_BHD = steps_BHD + self.known(batch["known_future"])
        out_BHT = self.leave(functional.gelu(self.mix(steps_BHD)))
        chosen = list(self.shapes.targets)
        result: Tensor = out_BHT * spread_BF[:, None, chosen] + last_BF[:, None, chosen]
        return result

    def _level(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """The last row of each window and the spread of its rows: 0 and 1 without ``normalize``."""
        x_BLF = batch["x"]
        if not self.normalize:
            return torch.zeros_like(x_BLF[:, 0]), torch.ones_like(x_BLF[:, 0])
        spread_BF = x_BLF.std(1, correction=0)
        return x_BLF[:, -1], torch.where(spread_BF > SMALL, spread_BF, torch.ones_like(spread_BF))

    def _static(self, batch: Tensors) -> Tensor:
        parts = [batch["static"]] if self.shapes.static else []
        parts += [table(batch["static_categorical"][..., k].long()) for k, table in enumerate(self.static_categorical)]
        return torch.cat(parts, -1)

    def forward(self, batch: Tensors) -> Tensor:
        """The mean squared error over the targets that are there."""
        squares_BHT = (self.forecast(batch) - batch["y"]).square()
        if "y_mask" in batch:
            squares_BHT = torch.where(batch["y_mask"] != 0, squares_BHT, torch.zeros_like(squares_BHT))
        return squares_BHT.sum() / self.targets(batch).clamp(min=1)

    def baseline(self, batch: Tensors) -> Tensor:
        """The loss of repeating the last value, which a forecaster has to beat."""
        last_BT = batch["x"][:, -1, list(self.shapes.targets)]
        squares_BHT = (last_BT[:, None] - batch["y"]).square()
        if "y_mask" in batch:
            squares_BHT = torch.where(batch["y_mask"] != 0, squares_BHT, torch.zeros_like(squares_BHT))
        return squares_BHT.sum() / self.targets(batch).clamp(min=1)

    def targets(self, batch: Tensors) -> Tensor:
        """How many values of y count in a batch: what its mean loss is weighted by."""
        if "y_mask" in batch:
            return (batch["y_mask"] != 0).sum()
        return torch.full((), batch["y"].numel(), device=batch["y"].device)


class LSTMEncoder(nn.Module):
    """The last state of an LSTM."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)

    def forward(self, rows_BLD: Tensor) -> Tensor:
        out_BLD, _ = self.lstm(rows_BLD)
        last: Tensor = out_BLD[:, -1]
        return last


class TransformerEncoder(nn.Module):
    """The last place of causal transformer blocks."""

    def __init__(self, width: int, layers: int, heads: int, dropout: float, lookback: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(lookback, width)
        self.blocks = Blocks([Block(width, heads, dropout, causal=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        init_weights(self, layers)

    def forward(self, rows_BLD: Tensor) -> Tensor:
        places_L = torch.arange(rows_BLD.shape[1], device=rows_BLD.device)
        last: Tensor = self.norm(self.blocks.run(rows_BLD + self.positions(places_L)))[:, -1]
        return last


def _width_of(values: int) -> int:
    """Numbers per embedded category: its fourth root times four, as a rule of thumb."""
    return max(2, round(4 * math.sqrt(math.sqrt(values))))
