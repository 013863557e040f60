"""Random streams of tensor parallelism under their public path."""

from polyreme.distributed.tensor_parallel.random_streams import (
    MODEL_PARALLEL_RNG,
    RNGStatesTracker,
    dropout,
    get_rng_state_tracker,
    model_parallel_random_seed,
)

__all__ = [
    "MODEL_PARALLEL_RNG",
    "RNGStatesTracker",
    "dropout",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
]
