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
from polyreme.distributed.fleet.meta_parallel.no_pipeline import NoPipelineParallel
from polyreme.distributed.fleet.meta_parallel.pipeline_parallel import PipelineParallel
from polyreme.distributed.fleet.meta_parallel.wrappers import (
    MetaParallelBase,
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
