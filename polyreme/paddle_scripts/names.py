"""Single names of PaddlePaddle's modules, most of them private, and where polyreme has them; and what it does not have.

Whole modules are in paths.py. What has no place in polyreme itself is in polyreme/paddle_scripts/internals.
"""

from __future__ import annotations

_INTERNALS = "paddle_scripts.internals"
_TABLE = """
.
  .: long=int64 int=int32 short=int16
  linalg: inverse eigvalsh
  device: is_compiled_with_custom_device is_compiled_with_rocm is_compiled_with_xpu get_cudnn_version device_guard
    is_compiled_with_cinn is_compiled_with_distribute is_compiled_with_ipu XPUPlace IPUPlace
  internals.core: is_compiled_with_mkldnn
  internals.signals: hamming_window hann_window blackman_window bartlett_window kaiser_window
  internals.release: __git_commit__=commit
  internals.devices: get_default_device get_device_module set_default_device
  ops.sampling: top_p_sampling
amp
  .: autocast
compat
  torch_scripts: use_torch_proxy_guard=compat_guard
  internals.text: long_type to_text to_bytes round floor_division get_exception_message
incubate
  core.rng: get_rng_state set_rng_state
incubate.jit
  internals.capture: is_inference_mode
incubate.nn
  nn: FusedDropout=Dropout
incubate.asp
  incubate.asp.masks: MaskAlgo CheckMethod create_mask check_sparsity check_mask_1d check_mask_2d get_mask_1d
    get_mask_2d_greedy get_mask_2d_best
amp.auto_cast
  internals.framework: amp_state
version
  internals.release: rc commit cinn
device
  .: framework=paddle.base.framework
  core.devices.place: _convert_to_place=as_place
  core.rng: manual_seed_all=seed
  internals.devices: get_default_device get_device_module set_default_device
device.xpu
  device: current_stream
distribution.transform
  distribution.transform: Type
distribution.variable
  internals.distributions: Variable=RandomVariable Real Positive Independent=IndependentValues real positive
cuda
  device: is_current_stream_capturing max_memory_reserved reset_max_memory_allocated reset_max_memory_reserved
cuda.nvtx
  internals.devices: range_push range_pop
device.nvtx
  internals.devices: range_push range_pop
nn.layer.rnn
  nn.layers.recurrent: RNNBase=_Stack
utils.data
  io: default_collate=default_collate_fn default_convert=default_convert_fn
signal
  internals.signals: frame overlap_add
tensor
  internals.framework: create_tensor
  internals.arrays: array_length array_read array_write create_array
tensor.array
  internals.arrays: array_length array_read array_write create_array
tensor.manipulation
  fluid.layers: fill_constant
tensor.creation
  internals.framework: create_tensor
optimizer.lr
  internals.schedules: noam_decay exponential_decay natural_exp_decay inverse_time_decay polynomial_decay cosine_decay
    piecewise_decay linear_lr_warmup
nn.clip
  fluid.layers: clip_by_norm
  fluid.clip: set_gradient_clip
  internals.clipping: _squared_l2_norm _clip_by_global_norm_using_mp_type merge_selected_rows
    get_tensor_from_selected_rows
  nn.clip: ClipGradBase=GradientClip
nn.layer.norm
  nn.layers.batch_norm: _BatchNormBase=_BatchNorm
  nn.layers.norm: _InstanceNormBase=_InstanceNorm
nn.layer.conv
  nn.layers.conv: _ConvNd
nn.layer.layers
  internals.framework: in_declarative_mode
  internals.layers: HookRemoveHelper=NumberedHook
nn.layer.transformer
  internals.layers: _convert_attention_mask _convert_param_attr_to_list
  .: tensor=paddle.tensor
nn.functional
  .: diag_embed pdist
cuda.amp.autocast_mode
  internals.cuda_amp: autocast
device.amp.autocast_mode
  internals.cuda_amp: autocast
nn.functional.conv
  internals.layers: _conv_nd
nn.initializer
  fluid.initializer: ConstantInitializer MSRAInitializer NormalInitializer NumpyArrayInitializer
    TruncatedNormalInitializer UniformInitializer XavierInitializer
nn.initializer.lazy_init
  internals.initializers: LazyInitHelper=LazyInitialization lazy_init_helper
nn.functional.flash_attention
  internals.attention: _select_sdp flash_attn_unpadded
incubate.nn.functional
  nn.functional: swiglu
  internals.attention: fused_dot_product_attention
framework
  .: core=paddle.base.core base=paddle.base.dygraph.base
  internals.framework: in_dynamic_or_pir_mode in_pir_mode in_pir_executor_mode use_pir_api _current_expected_place
    _current_expected_place_=_current_expected_place _set_expected_place _get_paddle_place _dygraph_tracer
    _no_check_dy2st_diff dygraph_only dygraph_not_support convert_np_dtype_to_dtype_ LayerHelper _create_tensor
  nn: Parameter EagerParamBase=Parameter
  static: Program Variable
  program.block: Block
  device: IPUPlace XPUPlace
framework.io
  nn: EagerParamBase=Parameter
  internals.saving: _to_LodTensor _transformed_from_lodtensor _parse_every_object
framework.io_utils
  fluid.io: is_persistable is_parameter
framework.random
  internals.framework: _manual_program_seed
base
  .: ParamAttr Layer=nn.Layer is_compiled_with_cuda disable_signal_handler set_flags get_flags
  enable_dygraph=disable_static disable_dygraph=enable_static in_dygraph_mode=in_dynamic_mode Parameter=nn.Parameter
    Tensor
  fluid: LoDTensor create_lod_tensor create_random_int_lodtensor DataFeeder
  device: is_compiled_with_xpu is_compiled_with_rocm is_compiled_with_cinn
  internals.core: is_compiled_with_mkldnn
base.framework
  .: core=paddle.base.core unique_name=paddle.base.unique_name in_dygraph_mode=in_dynamic_mode get_flags set_flags
    disable_signal_handler is_compiled_with_cuda
  internals.framework: in_dynamic_or_pir_mode in_pir_mode in_pir_executor_mode use_pir_api in_cinn_mode
    _current_expected_place _current_expected_place_=_current_expected_place _set_expected_place _get_paddle_place
    _dygraph_tracer _create_tensor _stride_in_no_check_dy2st_diff=_no_check_dy2st_diff switch_main_program
    dygraph_only dygraph_not_support static_only non_static_only convert_np_dtype_to_dtype_ flag_guard
    switch_startup_program
  nn: EagerParamBase=Parameter Parameter
  program.block: Block
  device: is_compiled_with_cinn is_compiled_with_distribute is_compiled_with_rocm is_compiled_with_xpu
  utils: require_version deprecated
base.dygraph
  internals.dygraph: guard enabled to_variable no_grad grad
base.dygraph.base
  internals.dygraph: guard enabled to_variable no_grad grad param_guard in_declarative_mode
    in_to_static_mode=in_declarative_mode to_static_mode_guard switch_to_static_graph
base.data_feeder
  fluid.data_feeder: convert_dtype check_dtype check_type check_variable_and_dtype DataFeeder
base.layer_helper
  internals.framework: LayerHelper
fluid
  fluid.io: load_program_state set_program_state
  device: XPUPlace is_compiled_with_xpu
fluid.core
  internals.core: EnforceNotMet
fluid.executor
  internals.saving: _fetch_var as_numpy
fluid.framework
  nn: ParamBase=Parameter
  internals.framework: _current_expected_place _dygraph_tracer
fluid.layers
  static: Variable
fluid.layer_helper
  internals.framework: LayerHelper
fluid.contrib.mixed_precision.decorator
  fluid.contrib.mixed_precision: decorate
fluid.contrib.mixed_precision.fp16_lists
  fluid.contrib.mixed_precision: AutoMixedPrecisionLists
fluid.log_helper
  internals.logs: get_logger
fluid.transpiler.memory_optimization_transpiler
  fluid: memory_optimize release_memory
base.executor
  internals.saving: as_numpy
static.log_helper
  internals.logs: get_logger
base.io
  fluid.io: DataLoader PyReader
base.log_helper
  internals.logs: get_logger
common_ops_import
  fluid.data_feeder: convert_dtype check_dtype check_type check_variable_and_dtype
  internals.framework: LayerHelper convert_np_dtype_to_dtype_ dygraph_only _dygraph_tracer _create_tensor
  .: core=paddle.base.core VarDesc=paddle.base.core.VarDesc
  static: default_main_program Variable
static
  fluid.io: load_vars save_vars
  internals.arrays: setitem
static.nn.control_flow
  fluid.layers: While Switch
static.io
  fluid.io: load_vars save_vars is_persistable is_parameter
static.amp
  internals.framework: fp16_guard
static.amp.fp16_utils
  internals.framework: fp16_guard
static.quantization.quant_config
  internals.quantization: SUPPORT_WEIGHT_QUANTIZATION_OP_DICT SUPPORT_ACT_QUANTIZATION_OP_DICT
    SUPPORT_QUANTIZATION_OP_DICT
quantization
  internals.quantization: ImperativeQuantAware
quantization.imperative
  internals.quantization: ImperativeQuantAware
quantization.imperative.qat
  internals.quantization: ImperativeQuantAware
nn.quant.quant_layers
  internals.quantization: FakeQuantAbsMax MovingAverageAbsMaxScale MAOutputScaleLayer
    QuantizedConv2D=FakeQuantizedConv2D QuantizedLinear=FakeQuantizedLinear
    QuantizedConv2DTranspose=FakeQuantizedConv2DTranspose
incubate.nn.memory_efficient_attention
  internals.attention: memory_efficient_attention
incubate.nn.attn_bias
  internals.attention: LowerTriangularMask
optimizer.optimizer
  optimizer: Optimizer
utils
  internals.structures: map_structure flatten pack_sequence_as is_sequence assert_same_structure to_sequence
    convert_to_list convert_shape_to_list strtobool
utils.layers_utils
  internals.structures: map_structure flatten pack_sequence_as is_sequence assert_same_structure to_sequence
    convert_to_list convert_shape_to_list
utils.cpp_extension
  internals.devices: CUDA_HOME IS_WINDOWS
utils.cpp_extension.cpp_extension
  internals.devices: CUDA_HOME IS_WINDOWS
utils.environments
  internals.structures: strtobool
distributed.flex_checkpoint.dcp.sharded_weight
  distributed: ShardedStateDict ShardedWeight build_sharded_state_dict shard_weight
  internals.checkpoints: ShardedWeightDesc create_sharded_weight_with_new_local make_replicated_sharded_weight
    make_tp_sharded_weight_for_checkpoint
distributed.flex_checkpoint.dcp.full_param
  internals.checkpoints: full_param
distributed.flex_checkpoint.dcp.metadata
  internals.checkpoints: LocalTensorMetadata Metadata
distributed.flex_checkpoint.dcp.load_state_dict
  distributed: load_state_dict
distributed.flex_checkpoint.dcp.save_state_dict
  internals.checkpoints: save_state_dict
utils.download
  internals.download: is_url get_path_from_url _decompress _get_unique_endpoints logger _md5check WEIGHTS_HOME
    _map_path _download check_and_create_dir
core.unique_name
  core.unique_name: generate_with_ignorable_key=generate
io.reader
  internals.saving: use_pinned_memory
  internals.loading: _DatasetKind=DatasetKind
io.dataloader.worker
  internals.loading: _DatasetKind=DatasetKind
io.dataloader.dataloader_iter
  internals.loading: _DatasetKind=DatasetKind
fluid.reader
  internals.loading: _DatasetKind=DatasetKind
fluid.dygraph
  .: parallel_helper=paddle.distributed.parallel_helper
fluid.dygraph.base
  internals.dygraph: param_guard program_desc_tracing_guard=to_static_mode_guard switch_to_static_graph
    in_declarative_mode
vision
  vision.transforms: Compose BaseTransform crop center_crop hflip vflip pad normalize resize rotate to_grayscale
    adjust_brightness adjust_contrast adjust_hue erase affine perspective ColorJitter CenterCrop Normalize
    RandomCrop RandomHorizontalFlip Resize ToTensor Transpose Grayscale Pad RandomResizedCrop RandomRotation
    RandomVerticalFlip
vision.models._utils
  internals.layers: IntermediateLayerGetter
vision.ops
  internals.layers: ConvNormActivation
vision.transforms.functional
  vision.transforms.color: adjust_saturation
  vision.transforms: to_tensor resize crop center_crop hflip vflip pad
  vision.image: _is_tensor_image=is_tensor _is_pil_image=is_pillow
  internals.images: _is_numpy_image
vision.transforms.transforms
  internals.images: _get_image_size
vision.datasets.folder
  internals.images: pil_loader cv2_loader default_loader IMG_EXTENSIONS has_valid_extension
  vision.datasets: DatasetFolder ImageFolder
jit.dy2static.program_translator
  jit: StaticFunction
jit.marker
  internals.framework: unified dynamic_only=dynamic capture_control_flow
dataset.common
  internals.download: DATA_HOME HOME md5file download must_mkdirs
dataset.mnist
  internals.mnist_files: URL_PREFIX TEST_IMAGE_URL TEST_IMAGE_MD5 TEST_LABEL_URL TEST_LABEL_MD5 TRAIN_IMAGE_URL
    TRAIN_IMAGE_MD5 TRAIN_LABEL_URL TRAIN_LABEL_MD5
distributed
  distributed.fleet: ParallelMode
  internals.parallel: in_auto_parallel_align_mode
distributed.collective
  internals.parallel: _c_concat _c_identity _c_split _mp_allreduce _c_lookup_table _c_softmax_with_cross_entropy
  distributed.communication.group: _get_default_group=default_group _get_global_group=default_group
  distributed: Group new_group
distributed.communication.group
  distributed.communication.group: _get_global_group=default_group Group
distributed.fleet
  internals.parallel: all_reduce
incubate.distributed.fleet
  distributed.fleet.recompute: recompute_sequential recompute_hybrid
distributed.fleet.base.topology
  internals.parallel: _HYBRID_PARALLEL_GROUP
distributed.fleet.layers.mpu.mp_ops
  internals.parallel: _c_concat _c_identity _c_split _mp_allreduce _c_lookup_table _c_softmax_with_cross_entropy
  distributed: split
distributed.fleet.utils.hybrid_parallel_util
  internals.parallel: fused_allreduce_gradients fused_allreduce_gradients_with_group
    obtain_optimizer_parameters_list unwrap_optimizer broadcast_dp_parameters broadcast_mp_parameters
    broadcast_sharding_parameters sync_params_buffers broadcast_sep_parameters
distributed.fleet.utils.fs
  distributed.fleet.utils: LocalFS
incubate.distributed.models.moe.gate
  incubate.distributed.models.moe: BaseGate GShardGate NaiveGate SwitchGate
incubate.distributed.models.moe.moe_layer
  incubate.distributed.models.moe: BaseGate GShardGate MoELayer NaiveGate SwitchGate
incubate.distributed.models.moe.grad_clip
  incubate.distributed.models.moe: ClipGradForMOEByGlobalNorm
distributed.fleet.utils.log_util
  internals.logs: logger set_log_level get_log_level_name get_log_level_code layer_to_str get_logger
    check_memory_usage
distributed.fleet.utils.timer_helper
  internals.timers: Timers get_timers set_timers is_timer_initialized
distributed.parallel
  internals.parallel: sync_params_buffers _global_parallel_env _get_global_parallel_env
  .: parallel_helper=paddle.distributed.parallel_helper
  distributed: DataParallel ParallelEnv init_parallel_env get_rank get_world_size
distributed.parallel_helper
  internals.parallel: _is_parallel_ctx_initialized _is_data_parallel_mode
distributed.utils.log_utils
  internals.logs: get_logger
distributed.auto_parallel.api
  distributed: shard_tensor reshard dtensor_from_fn shard_layer shard_optimizer shard_dataloader unshard_dtensor
    to_static Strategy DistModel
distributed.auto_parallel.local_layer
  distributed: LocalLayer
framework.recall_error
  internals.logs: AADIFF_ERROR LOSS_NAN_ERROR LOSS_INF_ERROR SHARDING_PAD_NON_ZERO_ERROR check_naninf
"""
"""Modules of PaddlePaddle, "." for the root; below each, a module of polyreme and the names that are there, a=b where
polyreme's name is b. `internals` is the package beside this file; paddle.x is module x of PaddlePaddle again."""

_PARAMETER_SERVERS = "there are no parameter servers here; give a model to fleet, and a Dataset to io.DataLoader"
_PIR = "it is an inside of PaddlePaddle's compiler; XLA compiles, and static.Program is what a Program is"
_KERNELS = "it is a GPU kernel whose layout is written down nowhere; write it with ops"
_PIPELINE = (
    "it is an inside of PaddlePaddle's pipeline; here a schedule is a table, chosen by name in DistributedStrategy"
)
_SHARDING = "choose the stage with group_sharded_parallel or DistributedStrategy"
_EXPERTS = "experts lie over the axes of a plan: give it ep"
_PASSES = "it rewrites Programs for one of PaddlePaddle's compilers; XLA compiles"
_DATA = (
    "nothing is downloaded here; give the files on this machine to a class of paddle.text.datasets or vision.datasets"
)
ABSENT: dict[str, str] = {
    "static.quantization": "use paddle.quantization",
    "quantization.imperative quantization.ImperativePTQ quantization.PTQConfig quantization.KLQuantizer "
    "quantization.HistQuantizer quantization.AbsmaxQuantizer quantization.PerChannelAbsmaxQuantizer": (
        "use paddle.quantization.PTQ with an observer of paddle.quantization.observers"
    ),
    "onnx": "save with jit.save, which polyreme.inference serves",
    "fluid.transpiler.ps_dispatcher fluid.incubate.fleet.parameter_server": _PARAMETER_SERVERS,
    "fluid.incubate.fleet.utils fluid.contrib.utils": "read files from a mounted folder",
    "fluid.contrib.slim fluid.contrib.quantize": "use paddle.quantization and paddle.incubate.asp",
    "fluid.contrib.decoder": "train with DynamicRNN, decode with beam_search in a While or with dynamic_decode",
    "fluid.contrib.model_stat": "print the Program, or use paddle.summary and paddle.flops",
    "cost_model incubate.cc incubate.passes": _PASSES,
    "incubate.xpu": "XLA compiles the layers of nn for the device at hand",
    "incubate.nn.layer.io": _PARAMETER_SERVERS,
    "static.amp.debugging amp.debugging.compare_accuracy": (
        "set_flags({'FLAGS_check_nan_inf': True}) names the op, layer and step of the first NaN: docs/numerics.md"
    ),
    "incubate.autotune": "XLA chooses kernels and layouts; a DataLoader takes num_workers",
    "device.cuda.graphs": "capture the step with jit.to_static, which makes one program of it",
    "compat.extend_torch_proxy_blocked_modules": "use enable_compat and disable_compat",
    "incubate.optimizer.GradientMergeOptimizer": "set gradient_merge of DistributedStrategy",
    "incubate.optimizer.RecomputeOptimizer": "set recompute of DistributedStrategy, or call fleet.utils.recompute",
    "incubate.optimizer.PipelineOptimizer": "give fleet a PipelineLayer: docs/pipeline.md",
    "incubate.optimizer.LarsMomentumOptimizer": "use fluid.optimizer.LarsMomentumOptimizer",
    "distributed.fleet.utils.hybrid_parallel_inference": "give fleet a PipelineLayer and call eval_batch",
    "distributed.auto_parallel.static.converter distributed.auto_parallel.static.utils": (
        "distributed.save_state_dict and load_state_dict lay arrays out for another mesh"
    ),
    "distributed.auto_parallel.high_level_api": "use distributed.to_distributed",
    "distributed.auto_tuner": "`polyreme plan` searches for the parallel configuration: docs/planner.md",
    "distributed.passes distributed.auto_parallel.static": _PIR,
    "distributed.launch.context distributed.launch.controllers distributed.launch.job distributed.launch.plugins": (
        "start ranks with `polyreme launch`: docs/launch.md"
    ),
    "distributed.launch.utils distributed.fleet.elastic": "start ranks with `polyreme launch`: docs/launch.md",
    "distributed.auto_parallel.pipelining": _PIPELINE,
    "distributed.fleet.runtime": _PARAMETER_SERVERS,
    "jit.sot jit.dy2static.transformers jit.pir_translated_layer static.pir_io framework.ir": _PIR,
    "incubate.autograd.primrules incubate.autograd.primitives incubate.autograd.primx": _PIR,
    "incubate.autograd.composite_rules": _PIR,
    "pir framework.IrGraph framework.IrNode decomposition incubate.autograd.primreg": _PIR,
    "base.libpaddle.ProgramDesc base.libpaddle.Graph base.libpaddle.AttrType": _PIR,
    "base.framework.IrGraph base.framework.OpProtoHolder base.framework.Operator framework.OpProtoHolder": _PIR,
    "common_ops_import.OpProtoHolder base.libpaddle.op_proto_and_checker_maker jit.layer": _PIR,
    "base.libpaddle.EagerReducer base.libpaddle.eager_assign_group_by_size": "DataParallel reduces gradients",
    "base.libpaddle.run_cmd": "use subprocess.run",
    "base.libpaddle.pir": _PIR,
    "base.libpaddle.eager._run_custom_op": "a kernel is an XLA FFI handler here: docs/custom_ops.md",
    "base.libpaddle.eager.register_saved_tensors_hooks base.libpaddle.eager.reset_saved_tensors_hooks": (
        "use autograd.saved_tensors_hooks"
    ),
    "base.libpaddle.eager.ops": "call the function of the same name",
    "incubate.jit": "use jit.to_static, or inference.Predictor",
    "hapi.static_flops hapi.dynamic_flops": "use paddle.flops",
    "incubate.layers incubate.distributed.fleet distributed.rpc distributed.ps distributed.io": _PARAMETER_SERVERS,
    "distributed.fleet.MultiSlotDataGenerator distributed.fleet.MultiSlotStringDataGenerator": _PARAMETER_SERVERS,
    "distributed.fleet.data_generator distributed.fleet.dataset distributed.QueueDataset": _PARAMETER_SERVERS,
    "distributed.InMemoryDataset distributed.ShowClickEntry distributed.CountFilterEntry": _PARAMETER_SERVERS,
    "distributed.fleet.load_model distributed.fleet.load_inference_model": _PARAMETER_SERVERS,
    "distributed.fleet.save_cache_table distributed.fleet.make_fl_strategy": _PARAMETER_SERVERS,
    "distributed.fleet.is_coordinator distributed.fleet.init_coordinator": _PARAMETER_SERVERS,
    "distributed.fleet.utils.ps_util base.DatasetFactory distributed.communicator": _PARAMETER_SERVERS,
    "distributed.transpiler": _PARAMETER_SERVERS,
    "distributed.fleet.utils.HDFSClient distributed.fleet.utils.fs.HDFSClient": (
        "mount the file system, or copy files with its own command"
    ),
    "distributed.fleet.base.private_helper_function": _PARAMETER_SERVERS,
    "static.nn.continuous_value_model static.ctr_metric_bundle": _PARAMETER_SERVERS,
    "incubate.nn.functional.fp8 incubate.nn.functional.fused_stack_transpose_quant": _KERNELS,
    "incubate.nn.functional.fp8_quant_blockwise incubate.nn.functional.fp8_gemm_blockwise": _KERNELS,
    "incubate.nn.functional.fused_transpose_split_quant": _KERNELS,
    "incubate.nn.functional.fused_transpose_wlch_split_quant": _KERNELS,
    "incubate.nn.functional.build_src_rank_and_local_expert_id": _KERNELS,
    "incubate.nn.functional.expand_modality_expert_id incubate.nn.functional.moe_combine_no_weight": _KERNELS,
    "incubate.nn.functional.moe_gate_dispatch_partial_nosoftmaxtopk": _KERNELS,
    "incubate.nn.functional.moe_gate_dispatch_permute incubate.nn.functional.fused_partial_rope": _KERNELS,
    "incubate.nn.functional.moe_gate_dispatch_and_quant": _KERNELS,
    "incubate.nn.functional.block_multihead_attention_xpu": "use block_multihead_attention",
    "incubate.nn.attn_bias": "give memory_efficient_attention a Tensor to add to the scores, or LowerTriangularMask()",
    "incubate.tensor.math incubate.operators": "use the functions of paddle.incubate and paddle.geometric",
    "distributed.auto_parallel.moe_utils": _EXPERTS,
    "distributed.auto_parallel.api.moe_global_mesh_tensor": _EXPERTS,
    "distributed.auto_parallel.api.moe_sub_mesh_tensors distributed.auto_parallel.api.split_mesh": _EXPERTS,
    "distributed.auto_parallel._utils distributed.auto_parallel.interface distributed.enable_auto_dp": (
        "place Tensors with shard_tensor, or a model with parallelize"
    ),
    "distributed.auto_parallel.intermediate": "use distributed.parallelize and its plans",
    "distributed.auto_parallel.ring_attention": (
        "use distributed.auto_parallel.RingFlashAttention, of a sequence in its own order, or a Plan with "
        "sep_order='zigzag', which balances the ring by itself"
    ),
    "distributed.flex_checkpoint": "use distributed.save_state_dict and load_state_dict",
    "distributed.fleet.base.strategy_group distributed.fleet.base.orthogonal_strategy": (
        "ask fleet.get_hybrid_communicate_group() for groups"
    ),
    "distributed.fleet.base.topology.EPHybridCommunicateGroup": "HybridCommunicateGroup has the expert axis",
    "distributed.fleet.meta_optimizers": "fleet.distributed_optimizer makes the optimizer that the strategy asks for",
    "distributed.fleet.utils.tensor_fusion_helper optimizer.fusion_utils": "XLA lays out what one program reads",
    "distributed.fleet.meta_parallel.sharding": _SHARDING,
    "distributed.fleet.meta_parallel.zero_bubble_utils distributed.fleet.meta_parallel.LocalSharedLayerDesc": _PIPELINE,
    "distributed.fleet.meta_parallel.LayerSpec distributed.fleet.meta_parallel.build_spec_layer": _PIPELINE,
    "distributed.fleet.meta_parallel.PipelineDatasetPreprocessor": _PIPELINE,
    "distributed.fleet.meta_parallel.ScheduleNode": _PIPELINE,
    "distributed.fleet.meta_parallel.ScheduleChunk": _PIPELINE,
    "distributed.fleet.meta_parallel.parallel_layers.pp_layers.PipelineLayerChunk": _PIPELINE,
    "distributed.fleet.layers.mpu.mp_layers.MPScale distributed.fleet.layers.mpu.mp_layers.InnerOverlapLinear": (
        "use ColumnParallelLinear and RowParallelLinear; XLA overlaps their collectives"
    ),
    "distributed.fleet.utils.sequence_parallel_utils.SPInnerOverlapLinear": (
        "use ColumnSequenceParallelLinear; XLA overlaps its collectives"
    ),
    "tensor.search._restrict_nonzero": "use paddle.nonzero",
    "reader.multiprocess_reader": "use io.DataLoader with num_workers",
    "utils.cpp_extension.extension_utils utils.cpp_extension.load_op_meta_info_and_register_op": (
        "a kernel is an XLA FFI handler here: docs/custom_ops.md"
    ),
    "XPUPinnedPlace": "XLA stages copies itself",
    "dataset.conll05 dataset.imdb dataset.imikolov dataset.movielens dataset.uci_housing dataset.cifar": _DATA,
    "dataset.wmt14 dataset.wmt16 dataset.flowers dataset.voc2012 dataset.common": _DATA,
}
"""Paths that polyreme does not have -> why, or what to use. What is below a module of these is not there either."""

RELEASE: dict[str, str] = {
    path: f"{_INTERNALS}.release.{path.rpartition('.')[2]}"
    for path in ("__version__", "version.full_version", "version.major", "version.minor", "version.patch")
}
"""What scripts are told in the place of polyreme's own value."""
RELEASE["dtype"] = f"{_INTERNALS}.dtypes.DType"
CALLED: dict[str, str] = {
    "load": f"{_INTERNALS}.saving.load",
    "distributed.save_state_dict": f"{_INTERNALS}.checkpoints.save_state_dict",
}
"""Functions that scripts call in the place of polyreme's own."""
CLASSES: dict[str, str] = {
    "eager.tensor.Tensor": f"{_INTERNALS}.tensor_methods.TensorNames",
    "nn.layer.Layer": f"{_INTERNALS}.layers.LayerNames",
    "io.dataloader.DataLoader": f"{_INTERNALS}.loading.DataLoaderNames",
    "io.batch_sampler.BatchSampler": f"{_INTERNALS}.loading.BatchSamplerNames",
    "core.devices.place.Place": f"{_INTERNALS}.devices.PlaceNames",
    "nn.initializer.base.Initializer": f"{_INTERNALS}.initializers.InitializerNames",
    "regularizer.WeightDecayRegularizer": f"{_INTERNALS}.initializers.WeightDecayNames",
    "hapi.model.Model": f"{_INTERNALS}.models.ModelNames",
    "jit.to_static.StaticFunction": f"{_INTERNALS}.capture.StaticFunctionNames",
    "nn.parameter.Parameter": f"{_INTERNALS}.layers.ParameterNames",
    "program.program.Program": f"{_INTERNALS}.programs.ProgramNames",
    "nn.parameter.ParamAttr": f"{_INTERNALS}.layers.ParamAttrNames",
    "optimizer.optimizer.Optimizer": f"{_INTERNALS}.optimizers.OptimizerNames",
    "amp.grad_scaler.GradScaler": f"{_INTERNALS}.optimizers.GradScalerNames",
    "distributed.fleet.wrappers.PipelineParallel": f"{_INTERNALS}.parallel.PipelineNames",
    "distributed.fleet.fleet.Fleet": f"{_INTERNALS}.parallel.FleetNames",
    "distributed.tensor_parallel.random_streams.RNGStatesTracker": f"{_INTERNALS}.parallel.TrackerNames",
}
"""A class of polyreme -> the class whose attributes it has besides its own for scripts."""


def _names() -> dict[str, str]:
    table: dict[str, str] = {}
    module = target = ""
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            module = "" if line == "." else f"{line}."
            continue
        head, colon, rest = line.strip().partition(": ")
        if colon:
            target = "" if head == "." else f"{head.replace('internals', _INTERNALS)}."
        for entry in (rest if colon else head).split():
            name, _, other = entry.partition("=")
            table[module + name] = other if other.startswith("paddle.") else target + (other or name)
    return table


NAMES: dict[str, str] = _names()
"""Path below `paddle` -> path below `polyreme`; one that begins with `paddle.` is a path of PaddlePaddle again."""
REASONS: dict[str, str] = {path: why for paths, why in ABSENT.items() for path in paths.split()}
"""ABSENT, a path at a time."""
