"""polyreme.signal: short-time Fourier transforms under their public path."""

import polyreme.eager.tensor  # noqa: F401  (what ops run on, whichever name is used first)
from polyreme.module_names import suggest_names
from polyreme.ops.signal import istft, stft

__all__ = ["istft", "stft"]

suggest_names(__name__)
