"""PlannedModel: a model on the mesh of a plan, called with global batches.

The plan does the work, in placements. Tensors are global, so there is nothing to broadcast.
"""

from __future__ import annotations

from typing import Any

from polyreme.core.layout import Layout
from polyreme.distributed.data_parallel import split_batch
from polyreme.distributed.placement import apply_plan
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.training import FULL_PRECISION, MixedPrecision


class PlannedModel(Layer):
    """A model on the mesh of a plan, which computes in a precision.

    layers: the model, which is moved. Called like the model, with global batches (of several processes, each gives its
    share): dim 0 of each Tensor is split as the plan splits the batch, or left whole where it does not divide; anything
    else is passed on. Its state_dict is the model's. Raises PlacementError, naming the parameter, for a dim that does
    not divide.
    """

    layout: Layout

    def __init__(self, layers: Layer, plan: Plan, precision: MixedPrecision = FULL_PRECISION) -> None:
        super().__init__()
        if not isinstance(layers, Layer):
            raise TypeError(f"{type(self).__name__} takes a Layer, got {type(layers).__name__}")
        self._layers, self._precision = layers, precision
        self.layout = apply_plan(plan, layers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = split_batch((inputs, kwargs), self.layout)
        with self._precision.autocast():
            return self._layers(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._layers.state_dict(*args, **kwargs)

    def set_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._layers.set_state_dict(state_dict, *args, **kwargs)

    set_dict = load_dict = set_state_dict
