"""Forecasters: a window of features in, the horizon of the targets out, by an LSTM or a transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from millrace.train.models.layers import Layer, Layers, Tensors, init_weights

SMALL = 1e-5  # a window whose spread is less is taken as flat


@dataclass(frozen=True)
class Shapes:
    """What a batch of windows holds."""

    features: int  # of x
    outputs: int  # features of y
    targets: tuple[int, ...]  # which features of x those are; empty if x lacks some
    lookback: int
    horizon: int
    static: int = 0
    known_future: int = 0
    categories: tuple[int, ...] = ()  # how many values each categorical column has
    known_categories: tuple[int, ...] = ()
    static_categories: tuple[int, ...] = ()
    has_mask: bool = False


class Forecaster(nn.Module):
    """Encodes the lookback into one vector, then decodes every step of the horizon from it.

    With ``normalize`` the window enters relative to its last row, in units of its spread, and the forecast leaves the same
    way: an untrained model then repeats the last value.
    """

    def __init__(
        self, shapes: Shapes, *, kind: str, layers: int, heads: int, width: int, dropout: float = 0.0,
        normalize: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shapes, self.normalize = shapes, normalize and bool(shapes.targets)
        self.categorical = Categories(shapes.categories)
        self.known_categorical = Categories(shapes.known_categories)
        self.static_categorical = Categories(shapes.static_categories)
        self.enter = nn.Linear(shapes.features * (2 if shapes.has_mask else 1) + self.categorical.width, width)
        self.encoder: LSTMEncoder | TransformerEncoder
        if kind == "lstm":
            self.encoder = LSTMEncoder(width, layers, dropout)
        else:
            self.encoder = TransformerEncoder(width, layers, heads, dropout, shapes.lookback)
        static = shapes.static + self.static_categorical.width
        self.static = nn.Linear(static, width) if static else None
        known = shapes.known_future + self.known_categorical.width
        self.known = nn.Linear(known, width) if known else None
        self.steps = nn.Parameter(torch.randn(shapes.horizon, width) * 0.02)
        self.mix, self.leave = nn.Linear(width, width), nn.Linear(width, shapes.outputs)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forecast(self, batch: Tensors) -> Tensor:
        """(B, H, T), in the units of ``y``."""
        x_BLF = batch["x"]
        level_BF, spread_BF = self._level(batch)
        rows = [(x_BLF - level_BF[:, None]) / spread_BF[:, None]]
        if self.shapes.has_mask:
            seen_BLF = batch["mask"] != 0
            rows = [_where(seen_BLF, rows[0]), seen_BLF.to(x_BLF.dtype)]
        rows += self.categorical(batch.get("categorical"))
        state_BD = self.encoder(functional.gelu(self.enter(torch.cat(rows, -1))))
        if self.static is not None:
            inputs = [batch["static"]] if self.shapes.static else []
            inputs += self.static_categorical(batch.get("static_categorical"))
            state_BD = state_BD + self.static(torch.cat(inputs, -1))
        steps_BHD = state_BD[:, None] + self.steps
        if self.known is not None:
            inputs = [batch["known_future"]] if self.shapes.known_future else []
            inputs += self.known_categorical(batch.get("known_categorical"))
            steps_BHD = steps_BHD + self.known(torch.cat(inputs, -1))
        out_BHT: Tensor = self.leave(functional.gelu(self.mix(steps_BHD)))
        if not self.normalize:
            return out_BHT
        return out_BHT * self._of_targets(spread_BF)[:, None] + self._of_targets(level_BF)[:, None]

    def _of_targets(self, values: Tensor) -> Tensor:
        """The values of the targets, by slices: a list of numbers would be copied to the GPU, and waited for."""
        slices = [values[..., first:last] for first, last in runs(self.shapes.targets)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, -1)

    def _level(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """The last row of each window and the spread of its rows; 0 and 1 without ``normalize``.

        If values may be missing, the level is the mean of the observed ones.
        """
        x_BLF = batch["x"]
        if not self.normalize:
            return torch.zeros_like(x_BLF[:, 0]), torch.ones_like(x_BLF[:, 0])
        level_BF, spread_BF = x_BLF[:, -1], x_BLF.std(1, correction=0)
        if self.shapes.has_mask:
            seen_BLF = batch["mask"] != 0
            count_BF = seen_BLF.sum(1).clamp(min=1)
            level_BF = _where(seen_BLF, x_BLF).sum(1) / count_BF
            spread_BF = (_where(seen_BLF, x_BLF - level_BF[:, None]).square().sum(1) / count_BF).sqrt()
        return level_BF, torch.where(spread_BF > SMALL, spread_BF, torch.ones_like(spread_BF))

    def forward(self, batch: Tensors) -> Tensor:
        """The mean squared error over the observed targets."""
        return self._mean_square(self.forecast(batch), batch)

    def baseline(self, batch: Tensors) -> tuple[Tensor, Tensor] | None:
        """The loss of repeating the last observed value, which a forecaster must beat, and its number of targets.

        None if the targets are not among the inputs. A target without an observed value in its window does not count.
        """
        if not self.shapes.targets:
            return None
        x_BLT = self._of_targets(batch["x"])
        if not self.shapes.has_mask:
            return self._mean_square(x_BLT[:, -1:], batch), self.targets(batch)
        seen_BLT = self._of_targets(batch["mask"]) != 0
        places_L = torch.arange(x_BLT.shape[1], device=x_BLT.device)
        last_B1T = torch.where(seen_BLT, places_L[:, None], 0).amax(1, keepdim=True)
        counts_BHT = (batch["y_mask"] != 0) & seen_BLT.any(1, keepdim=True)
        beside = {"y": batch["y"], "y_mask": counts_BHT}
        return self._mean_square(x_BLT.gather(1, last_B1T), beside), self.targets(beside)

    def _mean_square(self, forecast_BHT: Tensor, batch: Tensors) -> Tensor:
        errors_BHT = forecast_BHT - batch["y"]
        if "y_mask" in batch:  # before the square: a missing value may be NaN, and so would its gradient
            errors_BHT = _where(batch["y_mask"] != 0, errors_BHT)
        return errors_BHT.square().sum() / self.targets(batch).clamp(min=1)

    def targets(self, batch: Tensors) -> Tensor:
        """How many values of y count in a batch: the weight of its mean loss."""
        if "y_mask" in batch:
            return (batch["y_mask"] != 0).sum()
        return torch.full((), batch["y"].numel(), device=batch["y"].device)


def runs(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Numbers as ranges, in their order.

    >>> runs((3, 4, 5, 0, 7))
    [(3, 6), (0, 1), (7, 8)]
    """
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


class LSTMEncoder(nn.Module):
    """The last state of an LSTM, with dropout between its layers.

    Not the dropout of ``nn.LSTM``: cuDNN makes its state again, and waits for the GPU, whenever torch is seeded.
    """

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        parts = [1] * layers if dropout else [layers]
        self.lstms = nn.ModuleList(nn.LSTM(width, width, part, batch_first=True) for part in parts)
        self.drop = nn.Dropout(dropout)

    def forward(self, rows_BLD: Tensor) -> Tensor:
        for number, lstm in enumerate(self.lstms):
            rows_BLD, _ = lstm(self.drop(rows_BLD) if number else rows_BLD)
        last: Tensor = rows_BLD[:, -1]
        return last


class TransformerEncoder(nn.Module):
    """The last place of causal transformer layers."""

    def __init__(self, width: int, layers: int, heads: int, dropout: float, lookback: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(lookback, width)
        self.blocks = Layers([Layer(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        init_weights(self, layers)

    def forward(self, rows_BLD: Tensor) -> Tensor:
        places_L = torch.arange(rows_BLD.shape[1], device=rows_BLD.device)
        last: Tensor = self.norm(self.blocks.run(rows_BLD + self.positions(places_L)))[:, -1]
        return last


def _where(seen: Tensor, values: Tensor) -> Tensor:
    """The values, with 0 for missing ones."""
    return torch.where(seen, values, torch.zeros_like(values))


class Categories(nn.Module):
    """Embeds the codes of several columns, each by its own table. An unknown code is -1."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        widths = [max(2, round(4 * math.sqrt(math.sqrt(size)))) for size in sizes]  # a rule of thumb
        self.tables = nn.ModuleList([nn.Embedding(1 + n, w) for n, w in zip(sizes, widths, strict=True)])
        self.width, self.sizes = sum(widths), sizes

    def forward(self, codes: Tensor | None) -> list[Tensor]:
        if codes is None or not len(self.tables):
            return []
        columns = enumerate(zip(self.tables, self.sizes, strict=True))
        return [table((codes[..., k].long() + 1).clamp(0, size)) for k, (table, size) in columns]
