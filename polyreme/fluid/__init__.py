"""polyreme.fluid: the names and behaviours of PaddlePaddle 1.7's `fluid`, over programs and ops.

Floor: 7.
"""

from polyreme.fluid.lod_tensor import LoDTensor, LoDTensorArray, create_lod_tensor, create_random_int_lodtensor

__all__ = ["LoDTensor", "LoDTensorArray", "create_lod_tensor", "create_random_int_lodtensor"]
