"""polyreme.compat.nn: layers with the parameters, weights and layouts of other libraries."""

from polyreme.compat.nn import functional
from polyreme.compat.nn.attention import MultiheadAttention
from polyreme.compat.nn.layers import AvgPool1D, AvgPool2D, AvgPool3D, Linear, Softmax, Unfold

AvgPool1d = AvgPool1D
AvgPool2d = AvgPool2D
AvgPool3d = AvgPool3D

__all__ = [
    "AvgPool1D",
    "AvgPool1d",
    "AvgPool2D",
    "AvgPool2d",
    "AvgPool3D",
    "AvgPool3d",
    "Linear",
    "MultiheadAttention",
    "Softmax",
    "Unfold",
    "functional",
]
