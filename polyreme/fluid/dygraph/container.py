"""fluid.dygraph.container: Layers that hold others."""

from polyreme.fluid.dygraph.layers import LayerList, ParameterList, Sequential

__all__ = ["LayerList", "ParameterList", "Sequential"]
