"""Where NumPy batches become Tensors: in the parent process, never in a worker.

The only file of the loader that imports jax.
"""

from typing import Any

import jax
import ml_dtypes
import numpy as np

from polyreme.core.devices import place as places
from polyreme.core.devices.transfer import aligned_copy
from polyreme.eager.tensor import Tensor
from polyreme.io.structure import map_leaves

_NARROW = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


def to_tensors(batch: Any, place: Any) -> Any:
    """The batch with every numeric array copied into a Tensor on place (None: the current device)."""
    device = None if place is None else places.as_place(place).device()

    def convert(leaf: Any) -> Any:
        # a private copy, since the array may look into shared memory that the next batch will overwrite
        return Tensor(jax.device_put(aligned_copy(leaf), device), stop_gradient=True) if _numeric(leaf) else leaf

    return map_leaves(convert, batch)


def _numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and (leaf.dtype.kind in "biufc" or leaf.dtype.type in _NARROW)
