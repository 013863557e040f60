"""Writing text with a model: one captured forward over a window, a token at a time.

Floor: 7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.ops.indexing import getitem


def sample_text(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> str:
    """prompt and what the model writes after it.

    temperature 0 takes the likeliest token; top_k 0 chooses among all. The model sees its last seq_len tokens.
    """
    ids = tokenizer.encode(prompt).ids or [tokenizer.token_to_id("<|endoftext|>") or 0]
    for token in generate_ids(model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed):
        ids.append(token)
    return tokenizer.decode(ids)


def generate_ids(
    model: Any, ids: list[int], *, max_new_tokens: int, temperature: float, top_k: int, seed: int
) -> list[int]:
    """New token ids after ids, drawn on the host from the model's logits.

    The window is padded to seq_len on the right, where a causal model does not look, so one program serves every length.
    """
    if temperature < 0 or max_new_tokens < 0 or top_k < 0:
        raise ConfigError(
            f"temperature={temperature}, max_new_tokens={max_new_tokens}, top_k={top_k}: none may be negative"
        )
    window = model.config.seq_len
    rng = np.random.default_rng(seed)

    def last_logits(tokens: Tensor, at: Tensor) -> Tensor:
        return getitem(model(tokens), [0, at], (("int",), ("int",)))

    forward = to_static(last_logits)
    was_training = model.training
    model.eval()
    known, new = list(ids), []
    try:
        with no_grad():
            for _ in range(max_new_tokens):
                seen = known[-window:]
                padded = np.zeros((1, window), np.int64)
                padded[0, : len(seen)] = seen
                logits = forward(to_tensor(padded), to_tensor(np.int32(len(seen) - 1))).numpy().astype(np.float64)
                token = _choose(logits, temperature, top_k, rng)
                known.append(token)
                new.append(token)
    finally:
        if was_training:
            model.train()
    return new


def _choose(logits: np.ndarray, temperature: float, top_k: int, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k and top_k < logits.size:
        logits = np.where(logits >= np.partition(logits, -top_k)[-top_k], logits, -np.inf)
    scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled)
    return int(rng.choice(logits.size, p=weights / weights.sum()))
