"""polyreme.special: special functions under their public path."""

import polyreme.eager.tensor  # noqa: F401  (what ops run on, whichever name is used first)
from polyreme.ops.by_dim import softmax
from polyreme.ops.math import expm1
from polyreme.ops.reduce import logsumexp

__all__ = ["expm1", "logsumexp", "softmax"]
