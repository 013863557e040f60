"""Models placed by the plan of a hybrid-parallel job: TensorParallel, ShardingParallel, SegmentParallel.

The plan does the work, in placements: all of these are one class under the names that the public API has for
what a job mainly is. Tensors are global, so there is nothing to broadcast.
"""

from __future__ import annotations

from typing import Any

import jax

from polyreme.core.layout import Layout
from polyreme.distributed.data_parallel import spread_batch
from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.job import Job, resolve
from polyreme.distributed.placement import apply_plan
from polyreme.eager.tensor import Tensor
from polyreme.jit.structure import flatten, rebuild
from polyreme.nn.layer import Layer


class MetaParallelBase(Layer):
    """A model on the mesh of a strategy.

    layers: the model, which is moved. Called like the model, with global batches (of several processes, each gives its
    share): dim 0 of each Tensor is split as the plan splits the batch, or left whole where it does not divide; anything
    else is passed on. Its state_dict is the model's. Raises PlacementError, naming the parameter, for a dim that does
    not divide.
    """

    def __init__(self, layers: Layer, hcg: Any = None, strategy: Any = None, *, job: Job | None = None) -> None:
        super().__init__()
        if not isinstance(layers, Layer):
            raise TypeError(f"{type(self).__name__} takes a Layer, got {type(layers).__name__}")
        self._job = job or resolve(strategy or DistributedStrategy(), jax.device_count())
        self._hcg = hcg
        self._layers = layers
        self.layout = apply_plan(self._job.plan, layers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = split_batch((inputs, kwargs), self.layout)
        with self._job.amp.autocast():
            return self._layers(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._layers.state_dict(*args, **kwargs)

    def set_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._layers.set_state_dict(state_dict, *args, **kwargs)

    set_dict = load_dict = set_state_dict


class DataParallelModel(MetaParallelBase):
    """The batch is split over dp."""


class TensorParallel(MetaParallelBase):
    """Weights are split over mp, by the dims that the model's layers name."""


class ShardingParallel(MetaParallelBase):
    """Optimizer state, gradients or parameters are split over sharding."""


class SegmentParallel(MetaParallelBase):
    """The sequence is split over sep."""


def split_batch(values: Any, layout: Layout) -> Any:
    """values with dim 0 of every Tensor in it split as the layout's plan splits the batch."""
    leaves: list[Any] = []
    spec = flatten(values, leaves)
    placed = [spread_batch(v, layout) if isinstance(v, Tensor) and v.ndim else v for v in leaves]
    return rebuild(spec, iter(placed))
