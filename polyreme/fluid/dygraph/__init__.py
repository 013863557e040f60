"""fluid.dygraph: code that runs as it is called, inside guard(), with 1.7's layers."""

from polyreme.eager.mode import no_grad
from polyreme.fluid.absent import refusing
from polyreme.fluid.dygraph.base import Layer, enabled, to_variable
from polyreme.fluid.dygraph.nn import BatchNorm, Conv2D, Embedding, LayerNorm, Linear, Pool2D
from polyreme.fluid.mode import disable_dygraph, enable_dygraph, guard
from polyreme.nn import LayerList, ParameterList, Sequential

__all__ = [
    "BatchNorm", "Conv2D", "Embedding", "Layer", "LayerList", "LayerNorm", "Linear", "ParameterList", "Pool2D",
    "Sequential", "disable_dygraph", "enable_dygraph", "enabled", "guard", "no_grad", "to_variable",
]  # fmt: skip

__getattr__ = refusing("fluid.dygraph", __name__)
