"""Initializers under 1.7's names: initial values of parameters, with a seed of their own if one is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from polyreme.core import rng
from polyreme.errors import ConfigError
from polyreme.fluid.absent import refusing
from polyreme.nn import initializer as ours
from polyreme.nn.initializer import Bilinear


class _Seeded(ours.Initializer):
    """The values of another initializer. seed: 0 draws from the generator in force, anything else gives the same ones
    every time.
    """

    def __init__(self, of: ours.Initializer, seed: int) -> None:
        self.of, self.seed = of, seed

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        if self.seed == 0:
            return self.of.values(shape, dtype)
        with rng.default_generator.drawing_from(rng.Generator().manual_seed(self.seed)):
            return self.of.values(shape, dtype)


class ConstantInitializer(ours.Constant):
    """Every element the same. force_cpu: the value does not depend on where it is made, so it changes nothing."""

    def __init__(self, value: float = 0.0, force_cpu: bool = False) -> None:
        super().__init__(value)


class UniformInitializer(_Seeded):
    """Uniform in [low, high). Raises ConfigError for a diagonal of its own."""

    def __init__(
        self, low: float = -1.0, high: float = 1.0, seed: int = 0, diag_num: int = 0, diag_step: int = 0,
        diag_val: float = 1.0,
    ) -> None:  # fmt: skip
        if diag_num:
            raise ConfigError(f"Uniform: diag_num={diag_num} cannot be honoured; give NumpyArrayInitializer the values")
        super().__init__(ours.Uniform(low, high), seed)


class NormalInitializer(_Seeded):
    """Gaussian of mean loc and standard deviation scale."""

    def __init__(self, loc: float = 0.0, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__(ours.Normal(loc, scale), seed)


class TruncatedNormalInitializer(_Seeded):
    """Gaussian of mean loc and standard deviation scale, within two of them."""

    def __init__(self, loc: float = 0.0, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__(ours.TruncatedNormal(loc, scale, loc - 2 * scale, loc + 2 * scale), seed)


class XavierInitializer(_Seeded):
    """Uniform or Gaussian, of variance 2 / (fan_in + fan_out). Source: Glorot and Bengio, 2010."""

    def __init__(
        self, uniform: bool = True, fan_in: float | None = None, fan_out: float | None = None, seed: int = 0
    ) -> None:
        kind = ours.XavierUniform if uniform else ours.XavierNormal
        super().__init__(kind(fan_in, fan_out), seed)


class MSRAInitializer(_Seeded):
    """Uniform or Gaussian, of variance 2 / fan_in. Source: arXiv:1502.01852, equation 10."""

    def __init__(self, uniform: bool = True, fan_in: float | None = None, seed: int = 0) -> None:
        kind = ours.KaimingUniform if uniform else ours.KaimingNormal
        super().__init__(kind(fan_in), seed)


class NumpyArrayInitializer(ours.Assign):
    """These very values."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)


def force_init_on_cpu() -> bool:
    """False: a value does not depend on where it is made."""
    return False


@contextmanager
def init_on_cpu() -> Iterator[None]:
    """Nothing that is seen: inside the block initial values are as elsewhere."""
    yield


Constant = ConstantInitializer
Uniform = UniformInitializer
Normal = NormalInitializer
TruncatedNormal = TruncatedNormalInitializer
Xavier = XavierInitializer
MSRA = MSRAInitializer
BilinearInitializer = Bilinear

__all__ = [
    "MSRA", "Bilinear", "BilinearInitializer", "Constant", "ConstantInitializer", "MSRAInitializer", "Normal",
    "NormalInitializer", "NumpyArrayInitializer", "TruncatedNormal", "TruncatedNormalInitializer", "Uniform",
    "UniformInitializer", "Xavier", "XavierInitializer", "force_init_on_cpu", "init_on_cpu",
]  # fmt: skip

__getattr__ = refusing("fluid.initializer", __name__)
