"""Models and layers for hybrid parallelism under their public path."""

from polyreme.distributed.fleet.layers.mpu import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RNGStatesTracker,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_rng_state_tracker,
    model_parallel_random_seed,
)
from polyreme.distributed.fleet.wrappers import (
    MetaParallelBase,
    NoPipelineParallel,
    PipelineParallel,
    SegmentParallel,
    ShardingParallel,
    TensorParallel,
)
from polyreme.distributed.pipeline.layer_desc import LayerDesc, SharedLayerDesc
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer

__all__ = [
    "ColumnParallelLinear",
    "LayerDesc",
    "MetaParallelBase",
    "NoPipelineParallel",
    "ParallelCrossEntropy",
    "PipelineLayer",
    "PipelineParallel",
    "RNGStatesTracker",
    "RowParallelLinear",
    "SegmentParallel",
    "ShardingParallel",
    "SharedLayerDesc",
    "TensorParallel",
    "VocabParallelEmbedding",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
]
