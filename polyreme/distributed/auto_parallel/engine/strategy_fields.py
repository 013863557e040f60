"""Every field of an auto-parallel Strategy as data: its default, and what setting it does here.

Kinds are those of distributed/settings.py: a field is HONOURED, HARMLESS (the result is the same
either way, for the reason noted) or REFUSED (any value but the default is an error, which says what to do instead).
Names, nesting and defaults are those of the public API.
"""

from __future__ import annotations

from polyreme.distributed.settings import Table, autocast, honoured, no, same
from polyreme.mesh import DEFAULT_SCHEDULE, SCHEDULES

_TUNES_COMM = "tunes how collectives are sent; XLA's partitioner chooses them, with the same values"
_XLA_FUSES = "names a fusion; XLA does its own, with the same values"
_OVERLAP = "asks for overlap of communication and compute; XLA schedules that, with the same values"
_MEMORY = "says when a buffer is freed; XLA frees it after its last use"
_NO_QAT = "there is no quantisation-aware training"
_NO_TUNING = "nothing is tuned by running: auto_mode='full' asks the planner, which predicts"
_NO_GUARD = "there is no guarded region: a level covers the whole model"
_SPLIT = ", ".join(name for name, kind in SCHEDULES.items() if kind.split_backward)
_SCALES = "a gradient is that of the loss you compute over the global batch; scale the loss"

_BASE: Table = {
    "auto_mode": honoured("semi", "'semi': placements as annotated, else data parallel; 'full': the planner chooses"),
    "gradient_scale": no(True, _SCALES),
    "gradient_scale_using_allreduce_avg": same(False, _TUNES_COMM),
    "use_cache": same(True, "a compiled program is kept in any case"),
    "return_numpy": honoured(True, "predict and run give ndarrays, else Tensors"),
    "all_ranks": same(False, "results are those of the global batch, the same in every process"),
    "split_data": no(True, "a global batch is always split over the mesh"),
    "seed": honoured(None, "polyreme.seed when the Engine prepares", int),
    "reinit": no(False, "parameters keep the values that the model has; make the model again"),
    "full_graph": no(True, "a step is one program; capturing parts of it is not supported"),
}

_RECOMPUTE: Table = {
    "enable": honoured(False, "blocks are run again in backward"),
    "checkpoints": honoured([], "names of the sublayers to recompute, instead of what the model does by its plan", str),
    "no_recompute_segments": no([], "name the sublayers to recompute in checkpoints", int),
    "sr": no(0, "name the sublayers to recompute in checkpoints"),
    "refined_ops_patterns": no([], "name the sublayers to recompute in checkpoints", dict),
    "enable_tuning": no(False, _NO_TUNING),
}

_AMP: Table = {
    "enable": honoured(False, "layers run under amp.auto_cast"),
    "dtype": honoured("float16", "'float16' or 'bfloat16'"),
    "level": honoured("o1", "auto_cast's level: o0, o1 or o2"),
    **autocast("GradScaler, for float16"),
    "custom_black_varnames": no([], "belongs to static programs, which name variables; use custom_black_list", str),
    "use_fp16_guard": no(False, _NO_GUARD),
    "use_bf16_guard": no(False, _NO_GUARD),
    "use_master_grad": honoured(False, "amp.decorate(master_grad): gradients are added up in float32"),
    "use_promote": honoured(True, "amp.auto_cast(use_promote)"),
}

_SHARDING: Table = {
    "enable": honoured(False, "optimizer state, gradients or parameters are split over the axis sharding"),
    "stage": honoured(1, "1: optimizer state; 2: gradients too; 3: parameters too"),
    "degree": honoured(8, "devices of the axis; all that other axes leave, if it was not set"),
    "enable_overlap": same(False, _OVERLAP),
    "param_comm_stream_num": same(1, _OVERLAP),
    "grad_comm_stream_num": same(1, _OVERLAP),
    "param_bucket_size_numel": same(1, _TUNES_COMM),
    "grad_bucket_size_numel": same(1, _TUNES_COMM),
    "enable_hierarchical_comm": same(False, _TUNES_COMM),
    "partition_algor": same("greedy_even", "state is split inside each parameter, evenly"),
    "enable_tuning": no(False, _NO_TUNING),
    "tuning_range": no([], _NO_TUNING, int),
    "release_gradients": same(False, _MEMORY),
    "comm_buffer_size_MB": same(256, _TUNES_COMM),
    "enable_tensor_fusion": same(False, _XLA_FUSES),
    "save_unbalanced_param": same(True, "a checkpoint holds whole parameters, whatever their shards are"),
}

_PIPELINE: Table = {
    "enable": honoured(False, "a batch is cut into microbatches, and the model into pp_degree stages"),
    "schedule_mode": honoured(DEFAULT_SCHEDULE, f"one of {', '.join(SCHEDULES)}"),
    "pp_degree": honoured(1, "stages"),
    "vpp_degree": honoured(1, "chunks of the model a stage holds"),
    "vpp_seg_method": honoured("", "name of the class of layers that is dealt out evenly"),
    "micro_batch_size": honoured(1, "rows of a microbatch on one part of the batch, where accumulate_steps is not set"),
    "accumulate_steps": honoured(1, "microbatches of a batch"),
    "generation_batch_size": no(1, "a pipeline trains and evaluates; generate without one"),
    "enable_send_recv_overlap": same(False, _OVERLAP),
    "job_schedule_profiler_start": no(-1, "nothing is profiled here; use polyreme.profiler"),
    "job_schedule_profiler_stop": no(-1, "nothing is profiled here; use polyreme.profiler"),
    "program_runtimes": same([61, 72, 71, 34, 3], "weighs tasks for a search of schedules; here they are tables", int),
    "memory_limit_times": no(-1, "every schedule holds what its table says; choose another schedule_mode"),
    "split_backward": no(False, f"choose a schedule_mode that splits the backward: {_SPLIT}"),
    "auto_parallel_sync_shared_params": same(False, "what stages share is one parameter, kept alike in any case"),
}

_QAT: Table = {
    "enable": no(False, _NO_QAT),
    "channel_wise_abs_max": no(True, _NO_QAT),
    "weight_bits": no(8, _NO_QAT),
    "activation_bits": no(8, _NO_QAT),
    "not_quant_pattern": no(["skip_quant"], _NO_QAT, str),
    "algo": no(None, _NO_QAT, str),
    "onnx_format": no(True, _NO_QAT),
}

FIELDS: Table = {
    **_BASE,
    "recompute": _RECOMPUTE,
    "amp": _AMP,
    "sharding": _SHARDING,
    "gradient_merge": {
        "enable": honoured(False, "the optimizer steps every k_steps batches"),
        "k_steps": honoured(1, "batches for one update"),
        "avg": honoured(True, "divide the summed gradients by k_steps"),
    },
    "pipeline": _PIPELINE,
    "qat": _QAT,
    "tuning": {
        "enable": no(False, _NO_TUNING),
        "profile_start_step": no(1, _NO_TUNING),
        "profile_end_step": no(1, _NO_TUNING),
        "run_after_tuning": no(True, _NO_TUNING),
        "debug": no(False, _NO_TUNING),
    },
    "dataset": {
        "enable": no(False, "every process reads the whole data; split it with io.DistributedBatchSampler"),
        "num_shards": no(1, "every process reads the whole data; split it with io.DistributedBatchSampler"),
    },
    "fused_passes": {
        "enable": same(False, _XLA_FUSES),
        "gemm_epilogue": same(False, _XLA_FUSES),
        "dropout_add": same(False, _XLA_FUSES),
        "fused_passes_list": same([], _XLA_FUSES, str),
    },
    "fused_linear_promotion": {"enable": same(False, _XLA_FUSES)},
    "dp_optimization": {
        "enable": same(False, _TUNES_COMM),
        "fuse_all_reduce_ops": same(True, _TUNES_COMM),
        "fuse_grad_size_in_MB": same(32, _TUNES_COMM),
        "overlap_comm_cacl": same(True, _OVERLAP),
        "gradient_sync_after_accumulate": same(False, _TUNES_COMM),
    },
    "mp_optimization": {
        "allreduce_matmul_grad_overlapping": same(False, _OVERLAP),
        "replace_with_c_embedding": same(False, "a lookup in a split table is one op in any case"),
        "replace_with_parallel_cross_entropy": same(False, "a loss of split logits is computed in parts in any case"),
    },
    "sp_optimization": {"enable": same(True, _XLA_FUSES)},
}
"""name -> Field, or -> the same again for a section."""
