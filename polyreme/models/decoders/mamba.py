"""Mamba: a decoder without attention, whose blocks keep a state that each token decays and is taken into, by steps that
the token itself chooses.

Source: arXiv:2312.00752. Same function as transformers' MambaForCausalLM. Logical dims of parameters: embed, ffn (the
width inside a block), vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme.models.families import MAMBA, MAMBA_STATE
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.cache import LayerCache
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.state_space import (
    DEFAULTS,
    KEYS,
    READ_KEYS,
    StateSpaceDecoder,
    TokenConvolution,
    first_step_biases,
    linear,
    masked_steps,
    mixer_rules,
    normal,
    outer_rules,
    read_inner_size,
)
from polyreme.nn import Layer
from polyreme.nn import functional as F
from polyreme.nn.initializer import Assign, Constant
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import ParamAttr, Parameter
from polyreme.ops.creation import zeros
from polyreme.ops.layout import constrain
from polyreme.ops.state_space import selective_scan


@dataclass(frozen=True)
class MambaConfig:
    """Dimensions of a Mamba.

    inner_size: width inside a block, twice hidden_size if 0. state_size: numbers of a channel's state, 16 if 0.
    step_rank: width from which the steps of all channels are made, hidden_size / 16 if 0. conv_width: tokens that the
    convolution sees. bias, conv_bias: whether the maps into a block and out of it, and the convolution, add one.
    seq_len: longest sequence, tokens; nothing in the model bounds it. recompute: as of LlamaConfig.
    residual_in_fp32: what goes from block to block is float32, whatever the dtype of the weights.
    """

    vocab_size: int = 50280
    hidden_size: int = 768
    num_layers: int = 32
    seq_len: int = 2048
    inner_size: int = 0
    state_size: int = 0
    step_rank: int = 0
    conv_width: int = 4
    bias: bool = False
    conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    tie_embeddings: bool = True
    recompute: str = ""
    residual_in_fp32: bool = True

    def __post_init__(self) -> None:
        if not self.state_size:
            object.__setattr__(self, "state_size", MAMBA_STATE)
        if not self.inner_size:
            object.__setattr__(self, "inner_size", 2 * self.hidden_size)
        if not self.step_rank:
            object.__setattr__(self, "step_rank", -(-self.hidden_size // 16))
        check_dimensions(self)

    @classmethod
    def nano(cls, **changes: Any) -> MambaConfig:
        """A Mamba that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "seq_len": 16, "state_size": 4}
        return cls(**{**base, **changes})


class MambaMixer(Layer):
    """[batch, seq, embed] -> the same, of each token and those before it."""

    into: Linear
    convolution: TokenConvolution
    select: Linear
    steps: Linear
    log_decay: Parameter
    skip: Parameter
    out: Linear

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        width, inner, size = config.hidden_size, config.inner_size, config.state_size
        self.inner_size, self.sizes = inner, [config.step_rank, size, size]
        self.into = linear(width, 2 * inner, ("embed", "ffn"), config.bias)
        self.convolution = TokenConvolution(inner, config.conv_width, config.conv_bias)
        self.select = linear(inner, sum(self.sizes), ("ffn", None))
        steps = ParamAttr(initializer=first_step_biases(inner))
        self.steps = Linear(config.step_rank, inner, normal(), bias_attr=steps, dims=(None, "ffn"))
        begin = np.log(np.tile(np.arange(1, size + 1, dtype=np.float32), (inner, 1)))
        self.log_decay = self.create_parameter([inner, size], default_initializer=Assign(begin), dims=("ffn", None))
        self.skip = self.create_parameter([inner], default_initializer=Constant(1.0), dims=("ffn",))
        self.out = linear(inner, width, ("ffn", "embed"), config.bias)
        self.state_shapes: Sequence[tuple[int, ...]] = ((config.conv_width - 1, inner), (inner, size))

    def forward(self, x_bse: Any, cache: LayerCache | None = None) -> Any:
        x, gate = constrain(self.into(x_bse), "batch", "block_seq", "ffn").chunk(2, -1)
        before = None
        if cache is None:
            x, state = self.convolution(x), zeros([x.shape[0], *self.state_shapes[1]], "float32")
        else:
            before, state = cache.read_states()
            x, before = self.convolution.extend(x, before, cache.owner.counts)
        low, into, out_of = self.select(x).split(self.sizes, -1)
        steps = masked_steps(F.softplus(self.steps(low)), cache)
        decay = -self.log_decay.astype("float32").exp()
        into, out_of = into.astype("float32"), out_of.astype("float32")
        y, state = selective_scan(x.astype("float32"), steps.astype("float32"), decay, into, out_of, state)
        if cache is not None:
            cache.write_states(before, state)
        return self.out((y.astype(x.dtype) + x * self.skip) * F.silu(gate))


class Mamba(StateSpaceDecoder):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]; with labels, the mean cross-entropy (0-D, nats a token)."""

    family = MAMBA

    def make_mixer(self, config: MambaConfig) -> MambaMixer:
        """A new mixer of a block."""
        return MambaMixer(config)


# as published


def _rules(config: MambaConfig) -> list[WeightRule]:
    maps = {"in_proj": "into", "x_proj": "select", "dt_proj": "steps", "out_proj": "out"}
    return [*outer_rules(), *mixer_rules({"A_log": "log_decay", "D": "skip"}, maps)]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    rank = config.get("time_step_rank", "auto")
    return {"inner_size": read_inner_size(config), "step_rank": 0 if rank == "auto" else rank}


def _write(config: MambaConfig) -> dict[str, Any]:
    sizes = {"intermediate_size": config.inner_size, "time_step_rank": config.step_rank}
    return {"expand": config.inner_size / config.hidden_size, **sizes}


PUBLISHED = PublishedFamily(
    architecture="MambaForCausalLM",
    model_type="mamba",
    keys=KEYS,
    weights=_rules,
    defaults={**DEFAULTS, "tie_word_embeddings": True},
    fixed={"hidden_act": ("silu",)},
    prefix="backbone.",
    read=_read,
    read_keys=READ_KEYS,
    write=_write,
)
