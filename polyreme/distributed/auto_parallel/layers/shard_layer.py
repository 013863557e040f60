"""shard_layer: the parameters, inputs and outputs of a layer spread over a mesh by functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.core import state
from polyreme.distributed.auto_parallel.tensors.moves import place_tensor
from polyreme.distributed.auto_parallel.tensors.placements import Replicate
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.errors import ConfigError, ProgramError
from polyreme.nn.layer import Layer


def shard_layer(
    layer: Layer,
    process_mesh: ProcessMesh,
    shard_fn: Callable[[str, Layer, ProcessMesh], None] | None = None,
    input_fn: Callable[[Any, ProcessMesh], Any] | None = None,
    output_fn: Callable[[Any, ProcessMesh], Any] | None = None,
) -> Layer:
    """The layer itself, all of whose parameters and buffers lie over a mesh afterwards.

    shard_fn(name, sublayer, mesh) is called for every sublayer and for the layer itself (name ""), and places what it
    will with shard_tensor; what it leaves dense is whole on every device. input_fn(inputs, mesh) and
    output_fn(outputs, mesh) are called around the layer's forward and return what takes the place of inputs (a tuple)
    and outputs. Raises ValueError (ConfigError) for a process_mesh that is none; ProgramError in static mode.
    """
    if process_mesh is None:
        raise ConfigError("shard_layer: process_mesh is None; give the ProcessMesh that the layer is to lie on")
    if not isinstance(process_mesh, ProcessMesh):
        raise ConfigError(f"shard_layer: process_mesh is a {type(process_mesh).__name__}; give a ProcessMesh")
    if not isinstance(layer, Layer):
        raise ConfigError(f"shard_layer takes a Layer, got {type(layer).__name__}")
    if state.recording():
        raise ProgramError(
            "shard_layer in static mode, where parameters have no values; call it after disable_static()"
        )
    if shard_fn is not None:
        for name, sublayer in layer.named_sublayers(include_self=True):
            shard_fn(name, sublayer, process_mesh)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.process_mesh is None:
            place_tensor(tensor, process_mesh, [Replicate()] * process_mesh.ndim)
    if input_fn is not None:
        layer.register_forward_pre_hook(lambda _, inputs: input_fn(inputs, process_mesh))
    if output_fn is not None:
        layer.register_forward_post_hook(lambda _, __, outputs: output_fn(outputs, process_mesh))
    return layer
