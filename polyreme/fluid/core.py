"""fluid.core: the names of it that scripts use."""

from polyreme.core.devices.place import CPUPlace, CUDAPinnedPlace, CUDAPlace, device_count, is_compiled_with_cuda
from polyreme.eager.tensor import Tensor as VarBase
from polyreme.fluid.predictor import (
    AnalysisConfig,
    PaddleBuf,
    PaddlePredictor,
    PaddleTensor,
    ZeroCopyTensor,
    create_paddle_predictor,
)
from polyreme.fluid.reader import EOFException
from polyreme.program.scope import Scope
from polyreme.sequences.lod_tensor import LoDTensor, LoDTensorArray


class VarDesc:
    """Holds VarType."""

    class VarType:
        """Dtypes, and kinds of Variables, by 1.7's names."""

        BOOL, INT8, UINT8, INT16, INT32, INT64 = "bool", "int8", "uint8", "int16", "int32", "int64"
        FP16, BF16, FP32, FP64 = "float16", "bfloat16", "float32", "float64"
        COMPLEX64, COMPLEX128 = "complex64", "complex128"
        LOD_TENSOR, LOD_TENSOR_ARRAY, SELECTED_ROWS = "lod_tensor", "lod_tensor_array", "selected_rows"
        DENSE_TENSOR, DENSE_TENSOR_ARRAY, SPARSE_COO = "dense_tensor", "dense_tensor_array", "sparse_coo"
        FEED_MINIBATCH, FETCH_LIST, STEP_SCOPES = "feed_minibatch", "fetch_list", "step_scopes"
        PLACE_LIST, READER, RAW = "place_list", "reader", "raw"
        STRING, STRINGS, VOCAB = "string", "strings", "vocab"


def get_cuda_device_count() -> int:
    """How many GPUs there are."""
    return device_count() if is_compiled_with_cuda() else 0


__all__ = [
    "AnalysisConfig", "CPUPlace", "CUDAPinnedPlace", "CUDAPlace", "EOFException", "LoDTensor", "LoDTensorArray",
    "PaddleBuf", "PaddlePredictor", "PaddleTensor", "Scope", "VarBase", "VarDesc", "ZeroCopyTensor",
    "create_paddle_predictor", "get_cuda_device_count", "is_compiled_with_cuda",
]  # fmt: skip
