"""Minimizers of functions."""

from polyreme.incubate.optimizer.functional.minimizers import minimize_bfgs, minimize_lbfgs

__all__ = ["minimize_bfgs", "minimize_lbfgs"]
