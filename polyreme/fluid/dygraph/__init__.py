"""fluid.dygraph: code that runs as it is called, inside guard(), with 1.7's layers."""

from polyreme.autograd.functional import grad
from polyreme.eager.mode import no_grad
from polyreme.fluid.absent import refusing
from polyreme.fluid.dygraph import container, jit, learning_rate_scheduler, nn, parallel
from polyreme.fluid.dygraph.backward_strategy import BackwardStrategy
from polyreme.fluid.dygraph.base import enabled, to_variable
from polyreme.fluid.dygraph.checkpoint import load_dygraph, save_dygraph
from polyreme.fluid.dygraph.jit import *
from polyreme.fluid.dygraph.layers import Layer, LayerList, ParameterList, Sequential
from polyreme.fluid.dygraph.learning_rate_scheduler import *
from polyreme.fluid.dygraph.nn import *
from polyreme.fluid.dygraph.parallel import *
from polyreme.fluid.mode import disable_dygraph, enable_dygraph, guard

__all__ = [
    "BackwardStrategy", "Layer", "LayerList", "ParameterList", "Sequential", "disable_dygraph", "enable_dygraph",
    "enabled", "grad", "guard", "load_dygraph", "no_grad", "save_dygraph", "to_variable", *jit.__all__,
    *learning_rate_scheduler.__all__, *nn.__all__, *parallel.__all__,
]  # fmt: skip

__getattr__ = refusing("fluid.dygraph", __name__)
