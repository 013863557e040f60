"""Serving: a Config names an artefact and a device, a Predictor runs it."""

from polyreme.inference.config import Config, XpuConfig
from polyreme.inference.kinds import (
    DataType,
    PlaceType,
    PrecisionType,
    _get_phi_kernel_name,
    convert_to_mixed_precision,
    get_num_bytes_of_data_type,
    get_trt_compile_version,
    get_trt_runtime_version,
    get_version,
)
from polyreme.inference.predictor import Predictor, PredictorPool, Tensor, create_predictor
from polyreme.module_names import suggest_names

__all__ = [
    "Config",
    "DataType",
    "PlaceType",
    "PrecisionType",
    "Predictor",
    "PredictorPool",
    "Tensor",
    "XpuConfig",
    "convert_to_mixed_precision",
    "create_predictor",
    "get_num_bytes_of_data_type",
    "get_trt_compile_version",
    "get_trt_runtime_version",
    "get_version",
]

suggest_names(__name__)
