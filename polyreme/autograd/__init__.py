"""Differentiation: gradients as functions, functions with their own backward, Jacobians and Hessians."""

from polyreme.autograd.functional import backward, grad, jvp, vjp
from polyreme.autograd.matrices import Hessian, Jacobian, hessian, jacobian
from polyreme.autograd.py_layer import Function, PyLayer, PyLayerContext
from polyreme.autograd.saved import saved_tensors_hooks
from polyreme.eager.mode import enable_grad, is_grad_enabled, no_grad, set_grad_enabled

__all__ = [
    "Function",
    "Hessian",
    "Jacobian",
    "PyLayer",
    "PyLayerContext",
    "backward",
    "enable_grad",
    "grad",
    "hessian",
    "is_grad_enabled",
    "jacobian",
    "jvp",
    "no_grad",
    "saved_tensors_hooks",
    "set_grad_enabled",
    "vjp",
]
