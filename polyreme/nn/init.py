"""Initial values written into a Tensor that is there; each function returns it."""

from __future__ import annotations

from typing import Any

from polyreme.nn import initializer as initializers
from polyreme.nn.initializer import calculate_gain
from polyreme.nn.initializer.base import fans


def _calculate_fan_in_and_fan_out(tensor: Any) -> tuple[int, int]:
    return fans(list(tensor.shape))


def uniform_(tensor: Any, a: float = 0.0, b: float = 1.0) -> Any:
    """Uniform in [a, b)."""
    return initializers.Uniform(a, b)(tensor)


def normal_(tensor: Any, mean: float = 0.0, std: float = 1.0) -> Any:
    """Gaussian."""
    return initializers.Normal(mean, std)(tensor)


def trunc_normal_(tensor: Any, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Any:
    """Gaussian, drawn again outside [a, b]."""
    return initializers.TruncatedNormal(mean, std, a, b)(tensor)


def constant_(tensor: Any, val: float) -> Any:
    """One number everywhere."""
    return initializers.Constant(val)(tensor)


def ones_(tensor: Any) -> Any:
    """1 everywhere."""
    return constant_(tensor, 1.0)


def zeros_(tensor: Any) -> Any:
    """0 everywhere."""
    return constant_(tensor, 0.0)


def eye_(tensor: Any) -> Any:
    """1 on the diagonal of a matrix, 0 elsewhere."""
    rows, columns = tensor.shape
    tensor.set_value([[float(i == j) for j in range(columns)] for i in range(rows)])
    return tensor


def dirac_(tensor: Any, groups: int = 1) -> Any:
    """A convolution that passes its input on."""
    return initializers.Dirac(groups)(tensor)


def orthogonal_(tensor: Any, gain: float = 1.0) -> Any:
    """Orthogonal rows or columns, times gain."""
    return initializers.Orthogonal(gain)(tensor)


def xavier_uniform_(tensor: Any, gain: float = 1.0, fan_in: float | None = None, fan_out: float | None = None) -> Any:
    """Uniform in +-gain * sqrt(6 / (fan_in + fan_out))."""
    return initializers.XavierUniform(fan_in, fan_out, gain)(tensor)


def xavier_normal_(tensor: Any, gain: float = 1.0, fan_in: float | None = None, fan_out: float | None = None) -> Any:
    """Gaussian of standard deviation gain * sqrt(2 / (fan_in + fan_out))."""
    return initializers.XavierNormal(fan_in, fan_out, gain)(tensor)


def kaiming_uniform_(tensor: Any, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Any:
    """Uniform with a standard deviation of gain / sqrt(fan); a: the slope of a leaky ReLU."""
    return initializers.KaimingUniform(None, a, nonlinearity, mode)(tensor)


def kaiming_normal_(tensor: Any, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Any:
    """Gaussian with a standard deviation of gain / sqrt(fan); a: the slope of a leaky ReLU."""
    return initializers.KaimingNormal(None, a, nonlinearity, mode)(tensor)


__all__ = [
    "calculate_gain", "constant_", "dirac_", "eye_", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_",
    "orthogonal_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_", "zeros_",
]  # fmt: skip
