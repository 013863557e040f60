"""Every field of a DistributedStrategy as data: its default, and what setting it does here.

Names, nesting and defaults are those of the public API; the fields in OWN are additions. docs/fleet.md prints this
table.
"""

from __future__ import annotations

from polyreme.distributed.settings import Field, Table, autocast, honoured, no, same
from polyreme.mesh import DEFAULT_SCHEDULE, default_schedule

_TUNES_COMM = "tunes how collectives are sent; XLA's partitioner chooses them, with the same values"
_XLA_FUSES = "names a fusion or a memory reuse; XLA does its own, with the same values"
_IN_STEP = "tensors are global and collectives are part of the compiled step, so there is no copy that could drift"
_OVERLAP = "asks for overlap of communication and compute; XLA schedules that, with the same values"
_MEMORY = "says when a buffer is freed; XLA and the pipeline runtime free it after its last use"
_CUDNN = "chooses among cuDNN algorithms; XLA chooses its own"
_NO_PS = "there is no parameter server; train collectively with hybrid_configs"
_NO_LOCAL = "replicas never drift apart here; use gradient_merge to communicate less often"
_NO_DGC = "gradients are exchanged whole; reduce traffic with amp, gradient_merge or another mesh"
_NO_QAT = "there is no quantisation-aware training"
_AS_LAMB = "give fleet.distributed_optimizer an optimizer.Lamb with these arguments"
_AS_LARS = "there is no Lars; give fleet.distributed_optimizer another optimizer, such as optimizer.Lamb"
_STATIC = "belongs to static programs, which name variables; leave it out"
_TIMING = "prints nothing here; measure with polyreme.profiler or the command line"
_TO_MESH = "Plan.mesh"


def _nccl(*names: str) -> dict[str, Table]:
    """Settings of NCCL itself, a block for each communicator."""
    numbers = ("ll_buffsize", "ll128_buffsize", "simple_buffsize", "buffsize_align", "nchannels")
    block = {
        "commName": same("", _TUNES_COMM),
        **{name: same(0, _TUNES_COMM) for name in numbers},
        "algoStr": same("", _TUNES_COMM),
        "protoStr": same("", _TUNES_COMM),
    }
    return dict.fromkeys(names, block)


_SWITCHES: Table = {
    "mode": no("COLLECTIVE", _NO_PS),
    "amp": honoured(False, "layers run under amp.auto_cast"),
    "recompute": honoured(False, "Plan.recompute = full, or the sublayers that recompute_configs names"),
    "localsgd": no(False, _NO_LOCAL),
    "dgc": no(False, _NO_DGC),
    "gradient_merge": honoured(False, "the optimizer steps every k_steps calls"),
    "lars": no(False, _AS_LARS),
    "lamb": no(False, _AS_LAMB),
    "pipeline": honoured(False, "checked: needs pp_degree above 1"),
    "elastic": no(False, "restart a failed job with the launcher's own options"),
    "auto": no(False, "the mesh is what hybrid_configs says; set its degrees"),
    "a_sync": same(True, "chooses between parameter-server modes; collective training never reads it"),
    "sync_nccl_allreduce": same(True, _TUNES_COMM),
    "nccl_comm_num": same(1, _TUNES_COMM),
    "use_hierarchical_allreduce": same(False, _TUNES_COMM),
    "hierarchical_allreduce_inter_nranks": same(1, _TUNES_COMM),
    "sync_batch_norm": same(False, "statistics are those of the global batch in any case"),
    "fuse_all_reduce_ops": same(True, _TUNES_COMM),
    "fuse_grad_size_in_MB": same(32, _TUNES_COMM),
    "fuse_grad_size_in_TFLOPS": same(50.0, _TUNES_COMM),
    "cudnn_exhaustive_search": same(False, _CUDNN),
    "conv_workspace_size_limit": same(512, _CUDNN),
    "cudnn_batchnorm_spatial_persistent": same(False, _CUDNN),
    "adaptive_localsgd": no(False, _NO_LOCAL),
    "fp16_allreduce": no(False, "gradients are reduced in their own dtype; use amp to make that narrow"),
    "sharding": honoured(False, "Plan.strategy by the degrees and the stage of sharding_configs"),
    "last_comm_group_size_MB": same(1.0, _TUNES_COMM),
    "find_unused_parameters": same(False, "a parameter that the loss does not reach has no gradient, in any case"),
    "tensor_parallel": honoured(False, "checked: needs mp_degree above 1"),
    "without_graph_optimization": same(True, _XLA_FUSES),
    "fuse_grad_size_in_num": same(8, _TUNES_COMM),
    "calc_comm_same_stream": same(False, _OVERLAP),
    "asp": no(False, "there is no automatic sparsity"),
    "fuse_grad_merge": same(False, _XLA_FUSES),
    "semi_auto": no(False, "the mesh is what hybrid_configs says; set its degrees"),
    "adam_d2sum": no(False, "there is no such variant of Adam"),
    "auto_search": no(False, "the mesh is what hybrid_configs says; set its degrees"),
    "heter_ccl_mode": no(False, "all devices of a job are of one kind"),
    "is_fl_ps_mode": no(False, _NO_PS),
    "with_coordinator": no(False, _NO_PS),
    "qat": no(False, _NO_QAT),
    "split_data": no(True, "a global batch is always split over the mesh"),
}

_MODES: dict[str, Table] = {
    "recompute_configs": {
        "checkpoints": honoured(
            [], "names of the sublayers to recompute, instead of what the model does by its plan", str
        ),
        "enable_offload": honoured(False, "Plan.offload = act, or the inputs of the sublayers named"),
        "checkpoint_shape": no([], _STATIC, int),
        "enable_tuning": no(False, _STATIC),
        "refined_ops_patterns": no([], _STATIC, dict),
    },
    "amp_configs": {
        **autocast("GradScaler of train_batch and distributed_scaler()"),
        "custom_black_varnames": no([], _STATIC, str),
        "use_pure_fp16": honoured(False, "level O2 in float16"),
        "use_fp16_guard": same(True, "there is no fp16_guard region: a level covers the whole model"),
        "use_optimizer_fp16": honoured(False, "no float32 master weights at level O2"),
        "use_pure_bf16": honoured(False, "level O2 in bfloat16"),
    },
    "localsgd_configs": {"k_steps": no(1, _NO_LOCAL), "begin_step": no(1, _NO_LOCAL)},
    "gradient_merge_configs": {
        "k_steps": honoured(1, "calls of step() for one update"),
        "avg": honoured(True, "divide the summed gradients by k_steps"),
    },
    "dgc_configs": {
        "rampup_begin_step": no(0, _NO_DGC),
        "rampup_step": no(1, _NO_DGC),
        "sparsity": no([], _NO_DGC, float),
    },
    "pipeline_configs": {
        "micro_batch_size": honoured(1, "rows of a microbatch on each part of the batch; train_batch checks it"),
        "accumulate_steps": honoured(1, "Plan.num_microbatches"),
        "schedule_mode": honoured(DEFAULT_SCHEDULE, "Plan.schedule"),
        "p2p_cache_shape": same(True, "every program knows its shapes; none are sent"),
        "enable_partial_send_recv": same(True, _TUNES_COMM),
    },
    "a_sync_configs": {
        "k_steps": no(-1, _NO_PS),
        "max_merge_var_num": no(1, _NO_PS),
        "send_queue_size": no(16, _NO_PS),
        "independent_recv_thread": no(False, _NO_PS),
        "min_send_grad_num_before_recv": no(1, _NO_PS),
        "thread_pool_size": no(1, _NO_PS),
        "send_wait_times": no(1, _NO_PS),
        "runtime_split_send_recv": no(False, _NO_PS),
        "launch_barrier": no(True, _NO_PS),
        "heter_worker_device_guard": no("cpu", _NO_PS),
        "lr_decay_steps": no(10, _NO_PS),
        "use_ps_gpu": no(0, _NO_PS),
        "use_gpu_graph": no(0, _NO_PS),
    },
    "lars_configs": {
        "lars_coeff": no(0.001, _AS_LARS),
        "lars_weight_decay": no(0.0005, _AS_LARS),
        "epsilon": no(0.0, _AS_LARS),
        "exclude_from_weight_decay": no([], _AS_LARS, str),
    },
    "lamb_configs": {
        "lamb_weight_decay": no(0.01, _AS_LAMB),
        "exclude_from_weight_decay": no([], _AS_LAMB, str),
    },
    "adaptive_localsgd_configs": {"init_k_steps": no(1, _NO_LOCAL), "begin_step": no(1, _NO_LOCAL)},
    "sharding_configs": {
        "sharding_segment_strategy": same("segment_broadcast_MB", _TUNES_COMM),
        "segment_broadcast_MB": same(32.0, _TUNES_COMM),
        "segment_anchors": same([], _TUNES_COMM, str),
        "sharding_degree": honoured(8, _TO_MESH),
        "mp_degree": honoured(1, _TO_MESH),
        "dp_degree": honoured(1, _TO_MESH),
        "hybrid_dp": same(False, "dp takes the devices that the other axes leave in any case"),
        "gradient_merge_acc_step": honoured(1, "calls of step() for one update"),
        "optimize_offload": honoured(False, "Plan.offload = state"),
        "pp_allreduce_in_optimize": same(False, _IN_STEP),
        "pp_degree": honoured(1, _TO_MESH),
        "optimize_cast": same(False, "says where a parameter is cast for its use; the values are the same"),
        "_dp_as_optimizer_sharding": no(False, "set sharding_degree instead of dp_degree"),
        "stage": honoured(1, "Plan.strategy = zero(stage)"),
        "enable_tuning": no(False, "set stage and sharding_degree"),
        "use_calc_stream": same(False, _OVERLAP),
    },
}

_HYBRID: dict[str, Field | Table] = {
    "dp_degree": honoured(-1, f"{_TO_MESH}.dp; -1 takes what the other axes leave"),
    "mp_degree": honoured(1, f"{_TO_MESH}.mp"),
    "pp_degree": honoured(1, f"{_TO_MESH}.pp"),
    "sharding_degree": honoured(1, f"{_TO_MESH}.sharding"),
    "sep_degree": honoured(1, f"{_TO_MESH}.sep"),
    "mp_configs": {
        "sync_param": same(True, _IN_STEP),
        "sync_grad": same(False, _IN_STEP),
        "sync_moment": same(False, _IN_STEP),
        "sync_mode": same("broadcast", _IN_STEP),
        "mp_async_allreduce": same(False, _OVERLAP),
        "mp_skip_c_identity": same(False, _XLA_FUSES),
        "mp_fused_linear_param_grad_add": same(False, _XLA_FUSES),
        "need_broadcast_data": same(True, "a batch is one global Tensor"),
        "recompute_allgather": same(False, "XLA decides what it gathers again in the backward"),
        "sp_async_reduce_scatter": same(False, _OVERLAP),
        "sync_param_name": same(["embedding", "layer_norm", ".b_"], _IN_STEP, str),
        "sequence_parallel": honoured(False, "Plan.strategy: mp splits seq between blocks"),
        **_nccl("nccl_config"),
    },
    "pp_configs": {
        "dp_comm_overlap": same(False, _OVERLAP),
        "delay_scale_loss": same(False, "says when losses are divided by accumulate_steps; the mean is the same"),
        "enable_timer": no(False, _TIMING),
        "sharding_comm_overlap": same(False, _OVERLAP),
        "profiling": no(False, _TIMING),
        "release_gradients": same(False, _MEMORY),
        "overlap_p2p_comm": same(False, _OVERLAP),
        "clear_every_step_cache": same(False, _MEMORY),
        "use_batch_p2p_comm": same(True, _TUNES_COMM),
        "best_unbalanced_scheduler": same(False, "every schedule takes any number of microbatches"),
        "enable_offload_queue": no(False, "offload activations with recompute_configs enable_offload"),
        "enable_dynamic_shape": same(False, "a new shape compiles a new program"),
        "use_dualpipev": honoured(
            False,
            f"Plan.schedule = {default_schedule(is_v=True)}: the same V of two chunks a stage, backward split in two",
        ),
        "forward_backward_overlap_scheduler": same(False, _OVERLAP),
        **_nccl("coll_nccl_config", "p2p_nccl_config", "shared_nccl_config"),
        "sync_param": same(False, _IN_STEP),
        "sync_moment": same(False, _IN_STEP),
        "sync_mode": same("broadcast", _IN_STEP),
    },
    "sharding_configs": {
        "tensor_fusion": same(False, _TUNES_COMM),
        "accumulate_steps": same(1, _OVERLAP),
        "comm_overlap": same(False, _OVERLAP),
        "split_param": same(False, "optimizer state is split inside each parameter in any case"),
        "fuse_optimizer": same(True, _XLA_FUSES),
        "use_reduce_avg": same(True, _TUNES_COMM),
        "comm_buffer_size_MB": same(256, _TUNES_COMM),
        "release_gradients": same(False, _MEMORY),
        "free_grads_in_comm": same(False, _MEMORY),
        "enable_fuse_optimizer_states": same(False, _XLA_FUSES),
        **_nccl("nccl_config", "check_nccl_config"),
        "offload_opt_buffer_size": no(-1, "offload the whole state with offload=True beside it"),
        "stage": honoured(1, "Plan.strategy = zero(stage)"),
        "offload": honoured(False, "Plan.offload = state"),
    },
    "enable_optimizer_timer": no(False, _TIMING),
    "split_norm_comm": same(False, _TUNES_COMM),
    "ep_degree": honoured(1, f"{_TO_MESH}.ep, an axis beside the others"),
    "moe_sharding_degree": honoured(
        1, "checked: experts' state lies over sharding as all state does, so it is sharding_degree"
    ),
    "dp_configs": _nccl("nccl_config", "check_nccl_config"),
    "sep_configs": {
        **_nccl("nccl_config"),
        "attention": honoured("auto", "Plan.sep_attention: auto, ulysses, ring, gather or usp"),
        "order": honoured("auto", "Plan.sep_order: auto, contiguous or zigzag"),
        "ulysses_degree": honoured(0, "Plan.ulysses_degree: of usp, the neighbours that heads are dealt out to"),
    },
    "dp_sep_configs": _nccl("nccl_config"),
    "pp_tp_configs": _nccl("nccl_config"),
    "ep_configs": _nccl("nccl_config", "grad_nccl_config"),
    "moe_sharding_configs": _nccl("nccl_config", "check_nccl_config"),
    "default_comm_group_configs": _nccl("nccl_config"),
    "cp_degree": no(1, "split the sequence with sep_degree; sep_configs attention='ring' is context parallelism"),
    "cp_sharding_degree": no(1, "split the sequence with sep_degree and state with sharding_degree"),
    "cp_configs": _nccl("nccl_config"),
    "cp_sharding_configs": _nccl("nccl_config"),
    "dp_cp_configs": _nccl("nccl_config"),
    "cp_mp_configs": _nccl("nccl_config"),
    "order": honoured(["dp", "pp", "sharding", "sep", "cp", "mp"], "Plan.mesh.order, outermost axis first", str),
}

_REST: dict[str, Field | Table] = {
    "tensor_parallel_configs": {
        "tensor_parallel_degree": honoured(1, f"{_TO_MESH}.mp"),
        "tensor_init_seed": honoured(-1, "model_parallel_random_seed at fleet.init"),
    },
    "trainer_desc_configs": {
        "dump_fields_path": no("", _NO_PS),
        "dump_fields": no([], _NO_PS, str),
        "dump_param": no([], _NO_PS, str),
        "stat_var_names": no([], _NO_PS, str),
        "trainer": no("", _NO_PS),
        "device_worker": no("", _NO_PS),
        "local_sparse": no([], _NO_PS, str),
        "remote_sparse": no([], _NO_PS, str),
    },
    "downpour_table_param": no([], _NO_PS, dict),
    "fs_client_param": {name: no("", _NO_PS) for name in ("uri", "user", "passwd", "hadoop_bin")},
    "qat_configs": {
        "channel_wise_abs_max": no(True, _NO_QAT),
        "weight_bits": no(8, _NO_QAT),
        "activation_bits": no(8, _NO_QAT),
        "not_quant_pattern": no([], _NO_QAT, str),
        "algo": no("", _NO_QAT),
    },
    "build_strategy": {
        "fuse_elewise_add_act_ops": same(False, _XLA_FUSES),
        "fuse_bn_act_ops": same(False, _XLA_FUSES),
        "fuse_relu_depthwise_conv": same(False, _XLA_FUSES),
        "fuse_broadcast_ops": same(False, _XLA_FUSES),
        "fuse_all_optimizer_ops": same(False, _XLA_FUSES),
        "enable_inplace": same(False, _XLA_FUSES),
        "enable_backward_optimizer_op_deps": same(True, _XLA_FUSES),
        "cache_runtime_context": same(False, _XLA_FUSES),
        "fuse_bn_add_act_ops": same(True, _XLA_FUSES),
        "enable_auto_fusion": same(False, _XLA_FUSES),
        "enable_addto": same(False, _XLA_FUSES),
        "allow_cuda_graph_capture": same(False, _XLA_FUSES),
        "reduce_strategy": same(0, _TUNES_COMM),
        "fuse_gemm_epilogue": same(False, _XLA_FUSES),
        "debug_graphviz_path": no("", "no graph is drawn"),
        "fused_attention": same(False, _XLA_FUSES),
        "fused_feedforward": same(False, _XLA_FUSES),
        "fuse_dot_product_attention": same(False, _XLA_FUSES),
        "fuse_resunit": same(False, _XLA_FUSES),
    },
    "gradient_scale_configs": {
        "scale_strategy": no("avg", "a gradient is that of the loss you compute over the global batch; scale the loss"),
        "scale_gradient": no(False, "a gradient is that of the loss you compute over the global batch"),
    },
}

FIELDS: Table = {**_SWITCHES, **_MODES, "hybrid_configs": _HYBRID, **_REST}
"""name -> Field, or -> the same again for a group of settings."""

GATES = {
    "amp_configs": "amp",
    "recompute_configs": "recompute",
    "gradient_merge_configs": "gradient_merge",
    "sharding_configs": "sharding",
}
"""Groups of settings that count only while a switch is on."""

OWN = (
    "hybrid_configs.mp_configs.sequence_parallel",
    "hybrid_configs.sharding_configs.stage",
    "hybrid_configs.sharding_configs.offload",
    "hybrid_configs.sep_configs.attention",
    "hybrid_configs.sep_configs.order",
    "hybrid_configs.sep_configs.ulysses_degree",
)
"""Fields that the public API does not have."""
