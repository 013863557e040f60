"""Placing a model over a mesh: parameters, buffers and optimizer state by the plan's strategy.

Floor: 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.backend import Device
from polyreme.core.layout import Layout
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer

KINDS = ("param", "use", "grad", "state")


def apply_plan(plan: Plan, model: Layer, devices: Sequence[Device] | None = None) -> Layout:
    """Put plan in force: move model's parameters and buffers onto the mesh and tell them where gradients and optimizer
    state go. Call it before the optimizer's first step. -> the layout, which `shard_batch` takes.

    Raises PlacementError for a mesh that does not fit the devices or a dim that does not divide.
    """
    layout = Layout(plan, devices)
    placed = []
    for name, p in model.named_parameters():
        try:
            placed.append((p, {kind: layout.sharding(kind, p.dims, p.shape) for kind in KINDS}))
        except ValueError as error:
            raise type(error)(f"parameter {name}: {error}") from None
    for p, shardings in placed:
        if shardings["use"] == shardings["param"]:
            del shardings["use"]  # nothing to gather
        p.layouts = shardings
        state.write(p, put(p._array, shardings["param"]))
    for buffer in model.buffers():
        state.write(buffer, put(buffer._array, layout.replicated()))
    holder = rng.default_generator.key_state()
    state.write(holder, put(holder._array, layout.replicated()))
    layouts.active.layout = layout
    return layout


def clear_plan() -> None:
    """Back to one device for Tensors made from now on; those already placed stay where they are."""
    layouts.active.layout = None
    holder = rng.default_generator.key_state()
    state.write(holder, jax.numpy.asarray(np.asarray(holder._array)))


def shard_batch(layout: Layout, array: Any, *dims: str | None) -> Tensor:
    """A Tensor from a global batch on the host, laid out by its logical dims ("batch", "seq")."""
    host = np.asarray(array)
    return Tensor(jax.device_put(host, layout.sharding("act", dims, host.shape)))
