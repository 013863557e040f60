"""The options of paddle.inference.Config that choose among engines, passes and devices that are not here.

One table: what is accepted because results are the same either way, what is refused because they are not,
and what the questions about them answer. docs/deployment.md shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.errors import ConfigError

_XLA = "XLA compiles, optimizes and plans the memory of the whole program"
_CPU = "XLA brings its own CPU kernels"
ACCEPTED: dict[str, str] = {
    "switch_ir_optim": _XLA,
    "switch_ir_debug": _XLA,
    "set_optimization_level": _XLA,
    "enable_memory_optim": _XLA,
    "enable_cinn": _XLA,
    "enable_new_executor": "there is one executor",
    "enable_new_ir": "there is one representation, StableHLO",
    "enable_save_optim_model": "set_optim_cache_dir keeps compiled programs",
    "use_optimized_model": "set_optim_cache_dir keeps compiled programs",
    "switch_use_feed_fetch_ops": "inputs and outputs are handles or lists, never ops",
    "switch_specify_input_names": "inputs always have names",
    "disable_glog_info": "nothing is logged",
    "set_cpu_math_library_num_threads": "XLA uses the cores that the process may use; restrict these with taskset",
    "enable_mkldnn": _CPU,
    "enable_onednn": _CPU,
    "disable_mkldnn": _CPU,
    "disable_onednn": _CPU,
    "disable_mkldnn_fc_passes": _CPU,
    "disable_onednn_fc_passes": _CPU,
    "set_mkldnn_cache_capacity": _CPU,
    "set_onednn_cache_capacity": _CPU,
    "set_mkldnn_op": _CPU,
    "set_onednn_op": _CPU,
    "disable_onnxruntime": "there is no ONNX Runtime",
}
"""Methods that change nothing, and why not."""

_DTYPES = "an exported program keeps its dtypes; cast the Layer and save it again"
_ENGINE = "XLA is the only engine; leave it out"
_DEVICE = "for a device of another PJRT plug-in use enable_custom_device"
_PASSES = "a saved program is compiled whole, there are no passes to choose; leave it out"
REFUSED: dict[str, str] = {
    "enable_mkldnn_bfloat16": _DTYPES,
    "enable_onednn_bfloat16": _DTYPES,
    "enable_mkldnn_int8": _DTYPES,
    "enable_onednn_int8": _DTYPES,
    "set_bfloat16_op": _DTYPES,
    "enable_low_precision_io": _DTYPES,
    "exp_enable_mixed_precision_ops": _DTYPES,
    "exp_disable_mixed_precision_ops": _DTYPES,
    "enable_tensorrt_engine": _ENGINE,
    "enable_tensorrt_dla": _ENGINE,
    "enable_tensorrt_explicit_quantization": _ENGINE,
    "enable_tensorrt_inspector": _ENGINE,
    "enable_tensorrt_memory_optim": _ENGINE,
    "enable_tensorrt_varseqlen": _ENGINE,
    "enable_tuned_tensorrt_dynamic_shape": _ENGINE,
    "set_tensorrt_optimization_level": _ENGINE,
    "set_trt_dynamic_shape_info": _ENGINE,
    "mark_trt_engine_outputs": _ENGINE,
    "collect_shape_range_info": _ENGINE,
    "exp_disable_tensorrt_dynamic_shape_ops": _ENGINE,
    "exp_disable_tensorrt_ops": _ENGINE,
    "exp_disable_tensorrt_subgraph": _ENGINE,
    "exp_specify_tensorrt_subgraph_precision": _ENGINE,
    "exp_enable_use_cutlass": _ENGINE,
    "exp_sparse_conv_using_buffer": _ENGINE,
    "enable_onnxruntime": _ENGINE,
    "enable_ort_optimization": _ENGINE,
    "enable_openvino_engine": _ENGINE,
    "enable_ipu": _DEVICE,
    "load_ipu_config": _DEVICE,
    "set_ipu_config": _DEVICE,
    "set_ipu_custom_info": _DEVICE,
    "enable_xpu": _DEVICE,
    "set_xpu_config": _DEVICE,
    "set_xpu_device_id": _DEVICE,
    "pass_builder": _PASSES,
    "delete_pass": _PASSES,
    "enable_custom_passes": _PASSES,
    "enable_profile": "profile the calls with polyreme.profiler",
    "set_model_buffer": "an artefact is files whose digests are checked; write it to a folder, of tmpfs if need be",
    "to_native_config": "there is no other configuration; use this one",
}
"""Methods that raise ConfigError, and what to do instead."""

ANSWERS: dict[str, Any] = {
    "ir_optim": True,
    "glog_info_disabled": True,
    "specify_input_name": True,
    "new_ir_enabled": True,
    "use_feed_fetch_ops_enabled": False,
    "mkldnn_enabled": False,
    "onednn_enabled": False,
    "mkldnn_int8_enabled": False,
    "onednn_int8_enabled": False,
    "onnxruntime_enabled": False,
    "openvino_engine_enabled": False,
    "tensorrt_engine_enabled": False,
    "tensorrt_dla_enabled": False,
    "tensorrt_dynamic_shape_enabled": False,
    "tensorrt_explicit_quantization_enabled": False,
    "tensorrt_inspector_enabled": False,
    "tensorrt_varseqlen_enabled": False,
    "tensorrt_optimization_level": 0,
    "tensorrt_precision_mode": 0,
    "trt_allow_build_at_runtime": False,
    "tuned_tensorrt_dynamic_shape": False,
    "shape_range_info_collected": False,
    "shape_range_info_path": "",
    "model_from_memory": False,
    "use_xpu": False,
    "xpu_config": None,
    "xpu_device_id": 0,
}
"""Questions, and what they answer."""


class OtherEngines:
    """The methods of the tables above."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ACCEPTED:
            return lambda *args, **kwargs: None
        if name in ANSWERS:
            return lambda: ANSWERS[name]
        if name in REFUSED:
            return lambda *args, **kwargs: _refuse(name)
        raise AttributeError(f"{type(self).__name__} has no method {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *ACCEPTED, *REFUSED, *ANSWERS})


def _refuse(name: str) -> None:
    raise ConfigError(f"Config.{name}: {REFUSED[name]}")
