"""The GPT training step that benchmarks/gpt_step.py times: sizes, initial weights and batch, in NumPy alone.

Pre-norm GPT (LayerNorm, learned positions, GELU by tanh, tied embedding and head), mean cross-entropy over all tokens,
AdamW with weight decay on every parameter. Every side starts from these arrays.
"""

import numpy as np

LAYERS, HIDDEN, HEADS, FFN, SEQ, BATCH, VOCAB = 4, 256, 8, 1024, 256, 8, 8192
LEARNING_RATE, BETA1, BETA2, EPSILON, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
NORM_EPSILON = 1e-5
TOKENS = BATCH * SEQ


def weights() -> dict[str, np.ndarray]:
    """Initial weights, float32: normal of deviation 0.02, biases 0, norm gains 1; matrices are [in, out]."""
    rng = np.random.default_rng(0)
    shapes = {"wte": (VOCAB, HIDDEN), "wpe": (SEQ, HIDDEN)}
    for i in range(LAYERS):
        shapes |= {f"{i}.qkv.w": (HIDDEN, 3 * HIDDEN), f"{i}.proj.w": (HIDDEN, HIDDEN)}
        shapes |= {f"{i}.fc.w": (HIDDEN, FFN), f"{i}.out.w": (FFN, HIDDEN)}
    values = {name: (rng.standard_normal(shape) * 0.02).astype(np.float32) for name, shape in shapes.items()}
    for i in range(LAYERS):
        for name, size in (("qkv", 3 * HIDDEN), ("proj", HIDDEN), ("fc", FFN), ("out", HIDDEN)):
            values[f"{i}.{name}.b"] = np.zeros(size, np.float32)
        values |= _norm(f"{i}.ln1") | _norm(f"{i}.ln2")
    return values | _norm("ln")


def _norm(name: str) -> dict[str, np.ndarray]:
    return {f"{name}.w": np.ones(HIDDEN, np.float32), f"{name}.b": np.zeros(HIDDEN, np.float32)}


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels, int32 [BATCH, SEQ]."""
    ids = np.random.default_rng(1).integers(0, VOCAB, (BATCH, SEQ + 1), dtype=np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()
