"""Type aliases for arguments of public functions, one for each kind of argument, for editors and type checkers."""

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import jax
import numpy as np

from polyreme.core.state import TensorState

AnyTensor: TypeAlias = Any
"""A Tensor, in code below the one that defines the class: the stubs of the op tables write the class itself."""
TensorLike: TypeAlias = TensorState | np.ndarray | jax.Array | complex | Sequence[Any]
"""What stands for a Tensor in a call: one, an array, a number or nested lists of numbers."""
DTypeLike: TypeAlias = str | np.dtype[Any] | type[Any]
"""A dtype, or its name, or a Python or NumPy type that stands for it."""
Axes: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
"""One dim or several, by number. A Tensor of an integer stands for it, here and below."""
ShapeLike: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
"""The size of each dim; one number is a shape of one dim."""
Sizes: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
"""One number for all dims of a window or grid, or one for each."""
Padding: TypeAlias = str | SupportsIndex | Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]]
""""SAME" or "VALID", one number for all sides, or one for each dim or side."""
