"""polyreme.signal: short-time Fourier transforms under their public path.

Floor: 5.
"""

from polyreme.ops.signal import istft, stft

__all__ = ["istft", "stft"]
