"""fluid.transpiler: what rewrote Programs for several machines, for inference and for memory."""

from polyreme.fluid.framework import memory_optimize, release_memory
from polyreme.fluid.transpiler.distribute_transpiler import DistributeTranspiler, DistributeTranspilerConfig
from polyreme.fluid.transpiler.inference_transpiler import InferenceTranspiler

__all__ = [
    "DistributeTranspiler", "DistributeTranspilerConfig", "InferenceTranspiler", "memory_optimize", "release_memory",
]  # fmt: skip
