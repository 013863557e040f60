"""fluid.backward: append_backward and gradients."""

from polyreme.program.gradient import append_backward, gradients

__all__ = ["append_backward", "gradients"]
