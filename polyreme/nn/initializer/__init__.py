"""Initial values of parameters."""

from polyreme.module_names import suggest_names
from polyreme.nn.initializer.base import Initializer
from polyreme.nn.initializer.basic import Constant, Normal, TruncatedNormal, Uniform, XavierNormal, XavierUniform
from polyreme.nn.initializer.choice import chosen_initializer, set_global_initializer
from polyreme.nn.initializer.kaiming import KaimingNormal, KaimingUniform, calculate_gain
from polyreme.nn.initializer.structured import Assign, Bilinear, Dirac, Orthogonal

__all__ = [
    "Assign",
    "Bilinear",
    "Constant",
    "Dirac",
    "Initializer",
    "KaimingNormal",
    "KaimingUniform",
    "Normal",
    "Orthogonal",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "calculate_gain",
    "chosen_initializer",
    "set_global_initializer",
]

suggest_names(__name__)
