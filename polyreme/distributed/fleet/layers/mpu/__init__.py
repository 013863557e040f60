"""polyreme.distributed.fleet.layers.mpu: tensor-parallel layers, their random streams, and dropout over them."""

from polyreme.distributed.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from polyreme.distributed.tensor_parallel.random_streams import (
    RNGStatesTracker,
    dropout,
    get_rng_state_tracker,
    model_parallel_random_seed,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "RNGStatesTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "dropout",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
]
