"""fluid.backward: append_backward and gradients.

Floor: 7.
"""

from polyreme.program.gradient import append_backward, gradients

__all__ = ["append_backward", "gradients"]
