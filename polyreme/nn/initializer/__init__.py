"""Initial values of parameters."""

from polyreme.nn.initializer.base import Initializer
from polyreme.nn.initializer.basic import Constant, Normal, Uniform, XavierNormal, XavierUniform

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "XavierNormal", "XavierUniform"]
