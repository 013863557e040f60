"""Public names that Paddle keeps under incubate."""

from polyreme.incubate import autograd

__all__ = ["autograd"]
