"""Differentiation: gradients as functions, functions with their own backward, Jacobians and Hessians."""

from polyreme.autograd.functional import backward, grad, hvp, jvp, vjp
from polyreme.autograd.mapped import vmap
from polyreme.autograd.matrices import Hessian, Jacobian, hessian, jacobian
from polyreme.autograd.py_layer import Function, PyLayer, PyLayerContext
from polyreme.autograd.saved import saved_tensors_hooks
from polyreme.autograd.taylor import derivatives, laplacian
from polyreme.eager.mode import enable_grad, is_grad_enabled, no_grad, set_grad_enabled
from polyreme.module_names import suggest_names

__all__ = [
    "Function",
    "Hessian",
    "Jacobian",
    "PyLayer",
    "PyLayerContext",
    "backward",
    "derivatives",
    "enable_grad",
    "grad",
    "hessian",
    "hvp",
    "is_grad_enabled",
    "jacobian",
    "jvp",
    "laplacian",
    "no_grad",
    "saved_tensors_hooks",
    "set_grad_enabled",
    "vjp",
    "vmap",
]

suggest_names(__name__)
