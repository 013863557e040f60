"""fluid.core: the names of it that scripts use."""

from polyreme.core.place import CPUPlace, CUDAPlace, device_count, is_compiled_with_cuda
from polyreme.program.scope import Scope
from polyreme.sequences.lod_tensor import LoDTensor, LoDTensorArray


class EOFException(Exception):
    """A loader that feeds a Program has no more batches; call its reset()."""


class VarDesc:
    """Holds VarType."""

    class VarType:
        """Dtypes, and kinds of Variables, by 1.7's names."""

        BOOL, INT8, UINT8, INT16, INT32, INT64 = "bool", "int8", "uint8", "int16", "int32", "int64"
        FP16, FP32, FP64 = "float16", "float32", "float64"
        LOD_TENSOR = "lod_tensor"


def get_cuda_device_count() -> int:
    """How many GPUs there are."""
    return device_count() if is_compiled_with_cuda() else 0


__all__ = [
    "CPUPlace", "CUDAPlace", "EOFException", "LoDTensor", "LoDTensorArray", "Scope", "VarDesc",
    "get_cuda_device_count", "is_compiled_with_cuda",
]  # fmt: skip
