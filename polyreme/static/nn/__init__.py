"""polyreme.static.nn: layers as functions of Variables, which make their parameters; control flow; Python functions."""

from typing import Any

from polyreme.errors import did_you_mean
from polyreme.jit.control_flow import case, cond, switch_case, while_loop
from polyreme.sequences.layers import (
    row_conv,
    sequence_conv,
    sequence_expand,
    sequence_first_step,
    sequence_last_step,
    sequence_pool,
    sequence_softmax,
)
from polyreme.static.host import py_func, static_pylayer
from polyreme.static.nn.convolution import conv2d, conv2d_transpose, conv3d, conv3d_transpose, deform_conv2d
from polyreme.static.nn.dense import bilinear_tensor_product, embedding, fc, sparse_embedding
from polyreme.static.nn.normalization import batch_norm, group_norm, instance_norm, layer_norm, prelu, spectral_norm
from polyreme.static.nn.sampled import nce

LEFT_OUT: dict[str, str] = {}
"""Public names of the API that do not exist here, and why."""


def __getattr__(name: str) -> Any:
    if name in LEFT_OUT:
        raise AttributeError(f"polyreme.static.nn has no {name}: {LEFT_OUT[name]}")
    raise AttributeError(f"polyreme.static.nn has no name {name!r}{did_you_mean(name, __all__)}")


__all__ = [
    "batch_norm",
    "bilinear_tensor_product",
    "case",
    "cond",
    "conv2d",
    "conv2d_transpose",
    "conv3d",
    "conv3d_transpose",
    "deform_conv2d",
    "embedding",
    "fc",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "nce",
    "prelu",
    "py_func",
    "row_conv",
    "sequence_conv",
    "sequence_expand",
    "sequence_first_step",
    "sequence_last_step",
    "sequence_pool",
    "sequence_softmax",
    "sparse_embedding",
    "spectral_norm",
    "static_pylayer",
    "switch_case",
    "while_loop",
]
