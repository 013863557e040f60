"""Config: every name of the public list is there, and each option is honoured, answered or refused."""

import jax
import numpy as np
import pytest

from polyreme import inference, jit, nn
from polyreme.core.engine import backend
from polyreme.errors import ConfigError, DTypeError
from polyreme.hapi.input_spec import InputSpec
from polyreme.inference.options import ACCEPTED, ANSWERS, REFUSED

# the names of paddle.inference, and of its Config (3.3.1)
PUBLIC = """Config DataType PlaceType PrecisionType Predictor PredictorPool Tensor XpuConfig _get_phi_kernel_name
convert_to_mixed_precision create_predictor get_num_bytes_of_data_type get_trt_compile_version
get_trt_runtime_version get_version""".split()  # noqa: SIM905
CONFIG = """Bfloat16 Float32 Half Int8 Precision collect_shape_range_info cpu_math_library_num_threads delete_pass
disable_glog_info disable_gpu disable_mkldnn disable_mkldnn_fc_passes disable_onednn disable_onednn_fc_passes
disable_onnxruntime enable_cinn enable_custom_device enable_custom_passes enable_ipu enable_low_precision_io
enable_memory_optim enable_mkldnn enable_mkldnn_bfloat16 enable_mkldnn_int8 enable_new_executor enable_new_ir
enable_onednn enable_onednn_bfloat16 enable_onednn_int8 enable_onnxruntime enable_openvino_engine
enable_ort_optimization enable_profile enable_save_optim_model enable_tensorrt_dla enable_tensorrt_engine
enable_tensorrt_explicit_quantization enable_tensorrt_inspector enable_tensorrt_memory_optim
enable_tensorrt_varseqlen enable_tuned_tensorrt_dynamic_shape enable_use_gpu enable_xpu
exp_disable_mixed_precision_ops exp_disable_tensorrt_dynamic_shape_ops exp_disable_tensorrt_ops
exp_disable_tensorrt_subgraph exp_enable_mixed_precision_ops exp_enable_use_cutlass exp_sparse_conv_using_buffer
exp_specify_tensorrt_subgraph_precision fraction_of_gpu_memory_for_pool glog_info_disabled gpu_device_id ir_optim
load_ipu_config mark_trt_engine_outputs memory_pool_init_size_mb mkldnn_enabled mkldnn_int8_enabled model_dir
model_from_memory new_ir_enabled onednn_enabled onednn_int8_enabled onnxruntime_enabled openvino_engine_enabled
params_file pass_builder prog_file set_bfloat16_op set_cpu_math_library_num_threads set_ipu_config
set_ipu_custom_info set_mkldnn_cache_capacity set_mkldnn_op set_model set_model_buffer set_onednn_cache_capacity
set_onednn_op set_optim_cache_dir set_optimization_level set_params_file set_prog_file
set_tensorrt_optimization_level set_trt_dynamic_shape_info set_xpu_config set_xpu_device_id shape_range_info_collected
shape_range_info_path specify_input_name summary switch_ir_debug switch_ir_optim switch_specify_input_names
switch_use_feed_fetch_ops tensorrt_dla_enabled tensorrt_dynamic_shape_enabled tensorrt_engine_enabled
tensorrt_explicit_quantization_enabled tensorrt_inspector_enabled tensorrt_optimization_level tensorrt_precision_mode
tensorrt_varseqlen_enabled to_native_config trt_allow_build_at_runtime tuned_tensorrt_dynamic_shape
use_feed_fetch_ops_enabled use_gpu use_optimized_model use_xpu xpu_config xpu_device_id""".split()  # noqa: SIM905


def test_every_public_name_is_there():
    assert [n for n in PUBLIC if not hasattr(inference, n)] == []
    config = inference.Config()
    assert [n for n in CONFIG if not hasattr(config, n)] == []
    assert set(CONFIG) <= set(dir(config))
    assert not set(ACCEPTED) & set(REFUSED)
    with pytest.raises(AttributeError, match="Config has no method 'enable_magic'"):
        _ = config.enable_magic


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_cannot_be_honoured_raises(name):
    with pytest.raises(ConfigError, match=f"Config.{name}: "):
        getattr(inference.Config(), name)()


def test_options_without_effect_and_answers():
    config = inference.Config()
    for name in ACCEPTED:
        assert getattr(config, name)() is None
    for name, answer in ANSWERS.items():
        assert getattr(config, name)() == answer
    assert config.cpu_math_library_num_threads() >= 1
    assert config.fraction_of_gpu_memory_for_pool() == 0
    assert "every shape" in config.summary()


@pytest.mark.parametrize("sizes", [[], [0], [1.5], [True]])
def test_buckets_are_sizes(sizes):
    with pytest.raises(ConfigError, match="give whole numbers from 1"):
        inference.Config().enable_batch_buckets(sizes)


def test_data_types_know_their_dtype_and_bytes():
    assert inference.DataType.of(np.dtype("int64")) is inference.DataType.INT64
    assert inference.DataType.BFLOAT16.dtype.name == "bfloat16"
    assert inference.get_num_bytes_of_data_type(inference.DataType.FLOAT64) == 8
    assert inference.get_trt_compile_version() == inference.get_trt_runtime_version() == (0, 0, 0)
    assert inference.get_version().startswith("version: ")
    assert inference._get_phi_kernel_name("matmul_v2") == "matmul_v2"
    with pytest.raises(DTypeError, match="complex64 has no DataType"):
        inference.DataType.of(np.dtype("complex64"))
    with pytest.raises(ConfigError, match="cast the Layer"):
        inference.convert_to_mixed_precision("a", "b", "c", "d", inference.PrecisionType.Half, inference.PlaceType.CPU)


def test_compiled_programs_are_kept_on_request(tmp_path):
    jit.save(nn.Linear(2, 2), tmp_path / "m", [InputSpec([None, 2])])
    config = inference.Config(tmp_path / "m")
    config.set_optim_cache_dir(tmp_path / "cache")
    before = {n: getattr(backend.config, n) for n in (
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")}  # fmt: skip
    try:
        inference.create_predictor(config).warm_up()
        assert backend.config.jax_compilation_cache_dir == str(tmp_path / "cache")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
