"""fluid.lod_tensor: making LoDTensors, under their public path."""

from polyreme.sequences.lod_tensor import LoDTensor, LoDTensorArray, create_lod_tensor, create_random_int_lodtensor

__all__ = ["LoDTensor", "LoDTensorArray", "create_lod_tensor", "create_random_int_lodtensor"]
