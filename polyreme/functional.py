"""polyreme.functional: some functions under their public path."""

import polyreme.eager.tensor  # noqa: F401  (what ops run on, whichever name is used first)
from polyreme.ops.by_dim import split
from polyreme.ops.creation import meshgrid
from polyreme.ops.manipulation import atleast_1d, atleast_2d, atleast_3d
from polyreme.ops.matrices.norms import norm
from polyreme.ops.matrices.products import einsum
from polyreme.ops.repetition import broadcast_shapes
from polyreme.ops.unique import unique_consecutive

__all__ = [
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "broadcast_shapes",
    "einsum",
    "meshgrid",
    "norm",
    "split",
    "unique_consecutive",
]
