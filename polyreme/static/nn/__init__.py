"""polyreme.static.nn: layers as functions of Variables, which make their parameters; control flow; Python functions."""

from polyreme.jit.control_flow import case, cond, switch_case, while_loop
from polyreme.static.nn.convolution import conv2d, conv2d_transpose, conv3d, conv3d_transpose
from polyreme.static.nn.dense import bilinear_tensor_product, embedding, fc, sparse_embedding
from polyreme.static.nn.normalization import batch_norm, group_norm, instance_norm, layer_norm, prelu, spectral_norm

__all__ = [
    "batch_norm",
    "bilinear_tensor_product",
    "case",
    "cond",
    "conv2d",
    "conv2d_transpose",
    "conv3d",
    "conv3d_transpose",
    "embedding",
    "fc",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "prelu",
    "sparse_embedding",
    "spectral_norm",
    "switch_case",
    "while_loop",
]
