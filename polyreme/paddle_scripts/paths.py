"""Module paths of PaddlePaddle whose names polyreme has in another module.

A path that is the same in both needs no entry. For a path that polyreme has as well, the entry says where
the names it lacks are.
"""


def _below(package: str, names: str, module: str) -> dict[str, str]:
    return {f"{package}.{name}": module for name in names.split()}


PATHS: dict[str, str] = {
    # the root: ops are names of the package itself
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
    **_below("base", "backward compiler core data_feeder executor framework param_attr", "static"),
    "base.dygraph": "",
    "base.dygraph.base": "",
    "base.unique_name": "core.unique_name",
    "utils.unique_name": "core.unique_name",
    "base.layers": "static.nn",
    # layers and functions
    "nn.layer": "nn",
    **_below(
        "nn.layer",
        "activation common container conv distance layers loss norm pooling rnn transformer vision",
        "nn",
    ),
    **_below(
        "nn.functional",
        "activation common conv distance extension flash_attention input loss norm pooling vision",
        "nn.functional",
    ),
    **_below(
        "nn.initializer",
        "assign bilinear constant dirac initializer kaiming normal orthogonal uniform xavier",
        "nn.initializer",
    ),
    "nn.decode": "nn",
    # training
    **_below(
        "optimizer", "adadelta adagrad adamax adamw lbfgs momentum nadam optimizer radam rmsprop rprop", "optimizer"
    ),
    "amp.amp_lists": "amp",
    **_below("autograd", "autograd backward_mode ir_backward", "autograd"),
    "hapi.callbacks": "callbacks",
    "hapi.model_summary": "",
    "hapi.progressbar": "hapi.progress_bar",
    # input
    **_below("io.dataloader", "batch_sampler collate dataset sampler worker", "io"),
    "io.reader": "io",
    # capture and programs
    **_below("jit", "api dy2static sot translated_layer", "jit"),
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
    **_below(
        "fluid.dygraph",
        "base checkpoint container jit layers learning_rate_scheduler nn parallel tracer",
        "fluid.dygraph",
    ),
    **_below("fluid", "compiler parallel_executor unique_name", "fluid"),
    # vision
    **_below("vision.transforms", "transforms", "vision.transforms"),
    # parallel training
    **_below("distributed", "collective entry_attr parallel_with_gloo", "distributed"),
    "distributed.fleet.launch": "distributed.launch",
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
}
"""Path below `paddle` -> path below `polyreme`, "" for the package itself."""
