"""Module paths of PaddlePaddle whose names polyreme has in another module.

A path that is the same in both needs no entry. For a path that polyreme has as well, the entry says where
the names it lacks are. Single names are in names.py.
"""


def _below(package: str, names: str, module: str) -> dict[str, str]:
    return {f"{package}.{name}": module for name in names.split()}


PATHS: dict[str, str] = {
    # calls of PaddlePaddle's kernels, and its C++ core
    "_C_ops": "paddle_scripts.internals.c_ops",
    **dict.fromkeys(["_legacy_C_ops", "fluid.core.ops"], "paddle_scripts.internals.legacy_c_ops"),
    **dict.fromkeys(
        ["core", "base.core", "base.libpaddle", "framework.core", "fluid.core"], "paddle_scripts.internals.core"
    ),
    **dict.fromkeys(
        ["core.eager", "base.core.eager", "base.libpaddle.eager", "framework.core.eager", "fluid.core.eager"],
        "paddle_scripts.internals.eager",
    ),
    # the root: ops are names of the package itself
    "paddle": "",
    "common_ops_import": "",
    "tensor": "",
    **_below(
        "tensor",
        "array attribute creation einsum layer_function_generator linalg logic manipulation math ops random search "
        "stat tensor to_string",
        "",
    ),
    "framework": "",
    **_below("framework", "dtype framework io random", ""),
    "base": "static",
    **_below("base", "backward compiler data_feeder executor framework layer_helper log_helper param_attr", "static"),
    "base.dygraph": "",
    "base.dygraph.base": "",
    "framework.recall_error": "paddle_scripts.internals.logs",
    "pir_utils": "paddle_scripts.internals.framework",
    "base.unique_name": "core.unique_name",
    "utils.unique_name": "core.unique_name",
    "utils.plot": "paddle_scripts.internals.plotting",  # of 1.x
    "fluid.dataloader": "io",  # of 2.0 to 2.4
    **_below("fluid.dataloader", "batch_sampler collate dataset dataloader_iter sampler worker", "io"),
    **dict.fromkeys(["utils.data", "utils.data.dataset", "utils.data.sampler", "utils.data.dataloader"], "io"),
    "base.layers": "static.nn",
    # layers and functions
    "nn.layer": "nn",
    "nn.loss": "nn",
    **_below(
        "nn.layer",
        "activation common container conv distance layers loss norm pooling rnn transformer vision",
        "nn",
    ),
    **_below(
        "nn.functional",
        "activation common conv distance extension flash_attention input loss norm pooling sdpa transformer vision",
        "nn.functional",
    ),
    **_below(
        "nn.initializer",
        "assign bilinear constant dirac initializer kaiming lazy_init normal orthogonal uniform xavier",
        "nn.initializer",
    ),
    "nn.decode": "nn",
    # training
    **_below(
        "optimizer",
        "adadelta adagrad adamax adamw asgd lbfgs momentum nadam optimizer radam rmsprop rprop",
        "optimizer",
    ),
    "amp.amp_lists": "amp",
    **dict.fromkeys(["cuda.amp", "device.amp"], "paddle_scripts.internals.cuda_amp"),
    **_below("autograd", "autograd backward_mode ir_backward", "autograd"),
    "reader.decorator": "reader",
    "hapi.callbacks": "callbacks",
    "hapi.model_summary": "",
    "hapi.progressbar": "hapi.progress_bar",
    # input
    **_below("io.dataloader", "batch_sampler collate dataset dataloader_iter fetcher sampler worker", "io"),
    "io.reader": "io",
    # capture and programs
    **_below("jit", "api dy2static dy2static.program_translator sot translated_layer", "jit"),
    "jit.marker": "paddle_scripts.internals.framework",
    "static.amp.fp16_utils": "static.amp",
    "static.input": "static",
    "static.io": "static",
    **_below("static.nn", "common control_flow loss metric sequence_lod static_pylayer", "static.nn"),
    # Fluid, where polyreme has a module for each package
    **_below(
        "fluid.layers",
        "control_flow device distributions io learning_rate_scheduler loss math_op_patch metric_op nn ops rnn "
        "sequence_lod tensor",
        "fluid.layers",
    ),
    "fluid.core_avx": "fluid.core",
    "fluid.core_noavx": "fluid.core",
    "fluid.dygraph.tracer": "fluid.dygraph",
    **_below("fluid", "compiler parallel_executor unique_name", "fluid"),
    # vision
    **_below("vision.transforms", "transforms", "vision.transforms"),
    # parallel training
    **_below("distributed", "collective entry_attr parallel_with_gloo", "distributed"),
    "distributed.fleet.launch": "distributed.launch",
    "distributed.fsdp.fully_shard": "distributed.fsdp",
    **_below(
        "distributed.communication",
        "all_gather all_reduce all_to_all batch_isend_irecv broadcast gather recv reduce reduce_scatter scatter send "
        "serialization_utils",
        "distributed.communication",
    ),
    "distributed.fleet.meta_parallel.parallel_layers": "distributed.fleet.meta_parallel",
    "distributed.fleet.meta_parallel.parallel_layers.mp_layers": "distributed.fleet.layers.mpu.mp_layers",
    "distributed.fleet.meta_parallel.parallel_layers.pp_layers": "distributed.fleet.meta_parallel.pp_layers",
    "distributed.fleet.meta_parallel.parallel_layers.random": "distributed.fleet.layers.mpu.random",
    **_below(
        "distributed.fleet.meta_parallel",
        "meta_parallel_base tensor_parallel sharding",
        "distributed.fleet.meta_parallel",
    ),
    "distributed.fleet.recompute.recompute": "distributed.fleet.recompute",
    "distributed.fleet.base.fleet_base": "distributed.fleet",
    "distributed.fleet.utils.hybrid_parallel_util": "distributed.fleet.utils",
    "distributed.fleet.utils.log_util": "paddle_scripts.internals.logs",
    "distributed.fleet.utils.mix_precision_utils": "paddle_scripts.internals.mixed_precision",
    "distributed.fleet.utils.timer_helper": "paddle_scripts.internals.timers",
    "distributed.fleet.layers.mpu.mp_ops": "distributed.fleet.layers.mpu",
    "distributed.parallel_helper": "distributed",
    "distributed.utils": "distributed",
    "distributed.utils.log_utils": "paddle_scripts.internals.logs",
    "distributed.auto_parallel.local_layer": "distributed",
    # distributions, experimental parts, helpers
    **_below(
        "distribution",
        "bernoulli beta binomial categorical cauchy chi2 constraint continuous_bernoulli dirichlet distribution "
        "exponential exponential_family gamma geometric gumbel independent kl laplace lkj_cholesky lognormal "
        "multinomial multivariate_normal normal poisson student_t transform transformed_distribution uniform variable",
        "distribution",
    ),
    "geometric.sampling.neighbors": "geometric",
    "hapi.hub": "hub",
    "incubate.multiprocessing": "paddle_scripts.internals.multiprocessing",
    "incubate.nn.attn_bias": "paddle_scripts.internals.attention",
    "incubate.nn.layer": "incubate.nn",
    "incubate.nn.layer.fused_transformer": "incubate.nn",
    "incubate.nn.memory_efficient_attention": "paddle_scripts.internals.attention",
    **_below(
        "incubate.nn.functional",
        "blha_get_max_len block_multihead_attention fused_bias_act fused_dropout_add fused_layer_norm "
        "fused_matmul_bias fused_rms_norm fused_rotary_position_embedding fused_transformer masked_multihead_attention "
        "moe_combine moe_gate_dispatch variable_length_memory_efficient_attention",
        "incubate.nn.functional",
    ),
    **_below("incubate.nn.layer", "fused_dropout_add fused_linear", "incubate.nn"),
    "incubate.nn.loss": "incubate",
    **_below(
        "incubate.optimizer", "gradient_merge lbfgs lookahead modelaverage pipeline recompute", "incubate.optimizer"
    ),
    **_below("incubate.optimizer.functional", "bfgs lbfgs", "incubate.optimizer.functional"),
    "sparse.multiary": "sparse",
    **_below("sparse.nn.functional", "activation conv pooling transformer", "sparse.nn.functional"),
    **_below("sparse.nn.layer", "activation norm pooling", "sparse.nn"),
    "profiler.timer": "profiler",
    "profiler.profiler_statistic": "profiler",
    "utils.layers_utils": "paddle_scripts.internals.structures",
    "fluid.layers.utils": "paddle_scripts.internals.structures",
    "utils.environments": "paddle_scripts.internals.structures",
    "utils.cpp_extension.cpp_extension": "utils.cpp_extension",
}
"""Path below `paddle` -> path below `polyreme`, "" for the package itself."""
SAME = {
    **dict.fromkeys(["core", "base.core", "framework.core", "fluid.core"], "base.libpaddle"),
    **dict.fromkeys(
        ["core.eager", "base.core.eager", "framework.core.eager", "fluid.core.eager"], "base.libpaddle.eager"
    ),
}
"""Paths of one module of PaddlePaddle -> the path under which the tables of names and reasons have it."""
