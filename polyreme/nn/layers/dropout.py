"""Dropout layers: they drop while training and pass everything on in eval mode."""

from __future__ import annotations

from typing import Any

from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.argument_order import also_in_order
from polyreme.nn.layer import Layer


class _Dropping(Layer):
    def __init__(self, p: float, name: str | None) -> None:
        super().__init__()
        self.name = name
        p = p.item() if isinstance(p, Tensor) and p.size == 1 else p
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
            raise ConfigError(f"{type(self).__name__}: p is a probability from 0 to 1, got {p!r}")
        self.p = p

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Dropout(_Dropping):
    """Each element 0 with probability p, the others over 1 - p; unchanged in eval mode. Source: arXiv:1207.0580.

    axis: dims along which elements are dropped independently, all if None. mode "downscale_in_infer" leaves the kept
    ones as they are and multiplies by 1 - p in eval mode. inplace: write the result into the input.
    """

    inplace: bool
    axis: int | list[int] | None

    @also_in_order(1, ("axis", "mode", "name"))
    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        axis: int | list[int] | None = None,
        mode: str = "upscale_in_train",
        name: str | None = None,
    ) -> None:
        if not isinstance(inplace, bool):
            raise ConfigError(f"Dropout: inplace is True or False, got {inplace!r}; name axis= and mode=")
        super().__init__(p, name)
        if mode not in ("upscale_in_train", "downscale_in_infer"):
            raise ConfigError(f"Dropout: mode is 'upscale_in_train' or 'downscale_in_infer', got {mode!r}")
        self.inplace, self.axis, self.mode = inplace, axis, mode

    def forward(self, input: Any) -> Any:
        return F.dropout(input, p=self.p, axis=self.axis, training=self.training, inplace=self.inplace, mode=self.mode)

    def extra_repr(self) -> str:
        return f"p={self.p}, axis={self.axis}, mode={self.mode}, inplace={self.inplace}"


class Dropout2D(_Dropping):
    """Whole channels of [batch, channel, height, width] dropped. Source: arXiv:1411.4280."""

    def __init__(self, p: float = 0.5, data_format: str = "NCHW", name: str | None = None) -> None:
        super().__init__(p, name)
        self.data_format = data_format

    def forward(self, input: Any) -> Any:
        return F.dropout2d(input, p=self.p, training=self.training, data_format=self.data_format)


class Dropout3D(_Dropping):
    """Whole channels of [batch, channel, depth, height, width] dropped."""

    def __init__(self, p: float = 0.5, data_format: str = "NCDHW", name: str | None = None) -> None:
        super().__init__(p, name)
        self.data_format = data_format

    def forward(self, input: Any) -> Any:
        return F.dropout3d(input, p=self.p, training=self.training, data_format=self.data_format)


class AlphaDropout(_Dropping):
    """Dropout that keeps mean 0 and variance 1, for SELU networks. Source: arXiv:1706.02515."""

    def __init__(self, p: float = 0.5, name: str | None = None) -> None:
        super().__init__(p, name)

    def forward(self, input: Any) -> Any:
        return F.alpha_dropout(input, p=self.p, training=self.training)


class FeatureAlphaDropout(_Dropping):
    """AlphaDropout of whole channels."""

    def __init__(self, p: float = 0.5, name: str | None = None) -> None:
        super().__init__(p, name)

    def forward(self, input: Any) -> Any:
        return F.feature_alpha_dropout(input, p=self.p, training=self.training)
