"""Forward and reverse derivatives of functions, matrices of them, and Taylor mode."""

from polyreme.autograd import derivatives, hvp, jvp, laplacian, vjp
from polyreme.incubate.autograd.matrices import Hessian, Jacobian
from polyreme.incubate.autograd.primitive import disable_prim, enable_prim, forward_grad, grad, prim2orig, prim_enabled

__all__ = [
    "Hessian",
    "Jacobian",
    "derivatives",
    "disable_prim",
    "enable_prim",
    "forward_grad",
    "grad",
    "hvp",
    "jvp",
    "laplacian",
    "prim2orig",
    "prim_enabled",
    "vjp",
]
