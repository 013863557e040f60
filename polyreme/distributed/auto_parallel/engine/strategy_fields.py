"""Every field of an auto-parallel Strategy as data: its default, and what setting it does here.

Floor: 5.  Kinds are those of fleet/base/strategy_fields.py: a field is HONOURED, HARMLESS (the result is the same
either way, for the reason noted) or REFUSED (any value but the default is an error, which says what to do instead).
Names, nesting and defaults are those of the public API.
"""

from __future__ import annotations

from typing import Any

from polyreme.distributed.fleet.base.strategy_fields import HARMLESS, HONOURED, REFUSED, Field, Table


def _on(default: Any, note: str, item: type | None = None) -> Field:
    return Field(default, HONOURED, note, item)


def _same(default: Any, note: str, item: type | None = None) -> Field:
    return Field(default, HARMLESS, note, item)


def _no(default: Any, note: str, item: type | None = None) -> Field:
    return Field(default, REFUSED, note, item)


_TUNES_COMM = "tunes how collectives are sent; XLA's partitioner chooses them, with the same values"
_XLA_FUSES = "names a fusion; XLA does its own, with the same values"
_OVERLAP = "asks for overlap of communication and compute; XLA schedules that, with the same values"
_MEMORY = "says when a buffer is freed; XLA frees it after its last use"
_TO_SCALER = "GradScaler, for float16"
_NO_QAT = "there is no quantisation-aware training"
_NO_TUNING = "nothing is tuned by running: auto_mode='full' asks the planner, which predicts"
_NO_GUARD = "there is no guarded region: a level covers the whole model"
_SCALES = "a gradient is that of the loss you compute over the global batch; scale the loss"

_BASE: Table = {
    "auto_mode": _on("semi", "'semi': placements as annotated, else data parallel; 'full': the planner chooses"),
    "gradient_scale": _no(True, _SCALES),
    "gradient_scale_using_allreduce_avg": _same(False, _TUNES_COMM),
    "use_cache": _same(True, "a compiled program is kept in any case"),
    "return_numpy": _on(True, "predict and run give ndarrays, else Tensors"),
    "all_ranks": _same(False, "results are those of the global batch, the same in every process"),
    "split_data": _no(True, "a global batch is always split over the mesh"),
    "seed": _on(None, "polyreme.seed when the Engine prepares", int),
    "reinit": _no(False, "parameters keep the values that the model has; make the model again"),
    "full_graph": _no(True, "a step is one program; capturing parts of it is not supported"),
}

_RECOMPUTE: Table = {
    "enable": _on(False, "blocks are run again in backward"),
    "checkpoints": _on([], "names of the sublayers to recompute, instead of what the model does by its plan", str),
    "no_recompute_segments": _no([], "name the sublayers to recompute in checkpoints", int),
    "sr": _no(0, "name the sublayers to recompute in checkpoints"),
    "refined_ops_patterns": _no([], "name the sublayers to recompute in checkpoints", dict),
    "enable_tuning": _no(False, _NO_TUNING),
}

_AMP: Table = {
    "enable": _on(False, "layers run under amp.auto_cast"),
    "dtype": _on("float16", "'float16' or 'bfloat16'"),
    "level": _on("o1", "auto_cast's level: o0, o1 or o2"),
    "init_loss_scaling": _on(32768.0, _TO_SCALER),
    "incr_every_n_steps": _on(1000, _TO_SCALER),
    "decr_every_n_nan_or_inf": _on(2, _TO_SCALER),
    "incr_ratio": _on(2.0, _TO_SCALER),
    "decr_ratio": _on(0.8, _TO_SCALER),
    "use_dynamic_loss_scaling": _on(True, _TO_SCALER),
    "custom_white_list": _on([], "amp.auto_cast(custom_white_list)", str),
    "custom_black_list": _on([], "amp.auto_cast(custom_black_list)", str),
    "custom_black_varnames": _no([], "belongs to static programs, which name variables; use custom_black_list", str),
    "use_fp16_guard": _no(False, _NO_GUARD),
    "use_bf16_guard": _no(False, _NO_GUARD),
    "use_master_grad": _on(False, "amp.decorate(master_grad): gradients are added up in float32"),
    "use_promote": _on(True, "amp.auto_cast(use_promote)"),
}

_SHARDING: Table = {
    "enable": _on(False, "optimizer state, gradients or parameters are split over the axis sharding"),
    "stage": _on(1, "1: optimizer state; 2: gradients too; 3: parameters too"),
    "degree": _on(8, "devices of the axis; all that other axes leave, if it was not set"),
    "enable_overlap": _same(False, _OVERLAP),
    "param_comm_stream_num": _same(1, _OVERLAP),
    "grad_comm_stream_num": _same(1, _OVERLAP),
    "param_bucket_size_numel": _same(1, _TUNES_COMM),
    "grad_bucket_size_numel": _same(1, _TUNES_COMM),
    "enable_hierarchical_comm": _same(False, _TUNES_COMM),
    "partition_algor": _same("greedy_even", "state is split inside each parameter, evenly"),
    "enable_tuning": _no(False, _NO_TUNING),
    "tuning_range": _no([], _NO_TUNING, int),
    "release_gradients": _same(False, _MEMORY),
    "comm_buffer_size_MB": _same(256, _TUNES_COMM),
    "enable_tensor_fusion": _same(False, _XLA_FUSES),
    "save_unbalanced_param": _same(True, "a checkpoint holds whole parameters, whatever their shards are"),
}

_PIPELINE: Table = {
    "enable": _on(False, "the model runs in stages"),
    "schedule_mode": _on("1F1B", "FThenB, 1F1B, VPP, ZBH1 or ZBVPP"),
    "pp_degree": _on(1, "stages"),
    "vpp_degree": _on(1, "chunks of the model a stage holds"),
    "vpp_seg_method": _on("", "name of the class of layers that is dealt out evenly"),
    "micro_batch_size": _on(1, "rows of a microbatch on one part of the batch, where accumulate_steps is not set"),
    "accumulate_steps": _on(1, "microbatches of a batch"),
    "generation_batch_size": _no(1, "a pipeline trains and evaluates; generate without one"),
    "enable_send_recv_overlap": _same(False, _OVERLAP),
    "job_schedule_profiler_start": _no(-1, "nothing is profiled here; use polyreme.profiler"),
    "job_schedule_profiler_stop": _no(-1, "nothing is profiled here; use polyreme.profiler"),
    "program_runtimes": _same([61, 72, 71, 34, 3], "weighs tasks for a search of schedules; here they are tables", int),
    "memory_limit_times": _no(-1, "every schedule holds what its table says; choose another schedule_mode"),
    "split_backward": _no(False, "choose schedule_mode ZBH1 or ZBVPP, which split the backward"),
    "auto_parallel_sync_shared_params": _same(False, "what stages share is one parameter, kept alike in any case"),
}

_QAT: Table = {
    "enable": _no(False, _NO_QAT),
    "channel_wise_abs_max": _no(True, _NO_QAT),
    "weight_bits": _no(8, _NO_QAT),
    "activation_bits": _no(8, _NO_QAT),
    "not_quant_pattern": _no(["skip_quant"], _NO_QAT, str),
    "algo": _no(None, _NO_QAT, str),
    "onnx_format": _no(True, _NO_QAT),
}

FIELDS: Table = {
    **_BASE,
    "recompute": _RECOMPUTE,
    "amp": _AMP,
    "sharding": _SHARDING,
    "gradient_merge": {
        "enable": _on(False, "the optimizer steps every k_steps batches"),
        "k_steps": _on(1, "batches for one update"),
        "avg": _on(True, "divide the summed gradients by k_steps"),
    },
    "pipeline": _PIPELINE,
    "qat": _QAT,
    "tuning": {
        "enable": _no(False, _NO_TUNING),
        "profile_start_step": _no(1, _NO_TUNING),
        "profile_end_step": _no(1, _NO_TUNING),
        "run_after_tuning": _no(True, _NO_TUNING),
        "debug": _no(False, _NO_TUNING),
    },
    "dataset": {
        "enable": _no(False, "every process reads the whole data; split it with io.DistributedBatchSampler"),
        "num_shards": _no(1, "every process reads the whole data; split it with io.DistributedBatchSampler"),
    },
    "fused_passes": {
        "enable": _same(False, _XLA_FUSES),
        "gemm_epilogue": _same(False, _XLA_FUSES),
        "dropout_add": _same(False, _XLA_FUSES),
        "fused_passes_list": _same([], _XLA_FUSES, str),
    },
    "fused_linear_promotion": {"enable": _same(False, _XLA_FUSES)},
    "dp_optimization": {
        "enable": _same(False, _TUNES_COMM),
        "fuse_all_reduce_ops": _same(True, _TUNES_COMM),
        "fuse_grad_size_in_MB": _same(32, _TUNES_COMM),
        "overlap_comm_cacl": _same(True, _OVERLAP),
        "gradient_sync_after_accumulate": _same(False, _TUNES_COMM),
    },
    "mp_optimization": {
        "allreduce_matmul_grad_overlapping": _same(False, _OVERLAP),
        "replace_with_c_embedding": _same(False, "a lookup in a split table is one op in any case"),
        "replace_with_parallel_cross_entropy": _same(False, "a loss of split logits is computed in parts in any case"),
    },
    "sp_optimization": {"enable": _same(True, _XLA_FUSES)},
}
"""name -> Field, or -> the same again for a section."""
