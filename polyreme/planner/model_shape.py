"""A transformer from its dimensions: what a configuration file, or a row of published runs, says of a model.

Floor: 1.  Never imports: jax.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder.

    ffn: width of the feed-forward; gated: with three matrices (SwiGLU) instead of two. kv_heads: of grouped-query
    attention. experts: of each layer's feed-forward, of which experts_per_token work on a token; 0 for dense. expert_ffn:
    their width. biases, learned_positions, tied: as in GPT-2; rms_norm: as in LLaMA.
    """

    hidden: int
    layers: int
    heads: int
    seq: int
    vocab: int
    ffn: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    biases: bool = True
    learned_positions: bool = True
    tied: bool = True
    rms_norm: bool = False
    name: str = "transformer"
