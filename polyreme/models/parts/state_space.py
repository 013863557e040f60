"""What decoders of state spaces share: a convolution over the last few tokens, a block, what is kept of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyreme.autograd.recompute import run_part
from polyreme.models.files.published import SAME, Changed, Conversion, WeightRule, WeightSource
from polyreme.models.parts.cache import LayerCache
from polyreme.models.parts.decoder import Decoder
from polyreme.nn import Embedding, Layer, LayerList, RMSNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Assign, Normal, Uniform
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import ParamAttr, Parameter
from polyreme.ops.creation import arange, zeros
from polyreme.ops.indices.gather import take_along_axis
from polyreme.ops.layout import constrain
from polyreme.ops.manipulation import concat


class TokenConvolution(Layer):
    """silu of a convolution of each channel of [batch, seq, channels] over a token and those before it.

    width: tokens that it sees. weight: [channels, width], the token itself last.
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(self, channels: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.width, bound = width, width**-0.5
        begin = Uniform(-bound, bound)
        self.weight = self.create_parameter([channels, width], default_initializer=begin, dims=("ffn", None))
        self.bias = None
        if bias:
            self.bias = self.create_parameter([channels], is_bias=True, default_initializer=begin, dims=("ffn",))

    def forward(self, x_bsc: Any, before: Any = None) -> Any:
        """before: the tokens before those, [batch, width - 1, channels]; zeros if None."""
        return self._mix(self._with_before(x_bsc, before), x_bsc.shape[1])

    def extend(self, x_bsc: Any, before: Any, counts: Any) -> tuple[Any, Any]:
        """(forward, the last tokens [batch, width - 1, channels] after the first counts [batch] of x)."""
        padded = self._with_before(x_bsc, before)
        places = counts.unsqueeze(1) + arange(self.width - 1, dtype="int32")
        places = places.astype("int64").unsqueeze(-1).expand([*places.shape, x_bsc.shape[-1]])
        return self._mix(padded, x_bsc.shape[1]), take_along_axis(padded, places, 1)

    def _with_before(self, x_bsc: Any, before: Any) -> Any:
        batch, _, channels = x_bsc.shape
        shape = [batch, self.width - 1, channels]
        return concat([zeros(shape, x_bsc.dtype) if before is None else before.astype(x_bsc.dtype), x_bsc], axis=1)

    def _mix(self, padded: Any, seq: int) -> Any:
        mixed = padded[:, :seq] * self.weight[:, 0]
        for place in range(1, self.width):
            mixed = mixed + padded[:, place : place + seq] * self.weight[:, place]
        return F.silu(mixed if self.bias is None else mixed + self.bias)


class GroupedRMSNorm(RMSNorm):
    """An RMSNorm of each of so many groups of channels apart.

    >>> GroupedRMSNorm(8, 2).weight.shape
    paddle.Size([8])
    """

    def __init__(self, width: int, groups: int, epsilon: float = 1e-5) -> None:
        super().__init__(width, epsilon=epsilon)
        self.groups = groups

    def forward(self, input: Any) -> Any:
        parts = input.reshape([*input.shape[:-1], self.groups, input.shape[-1] // self.groups])
        return F.rms_norm(parts, parts.shape[-1:], None, self.epsilon).reshape(input.shape) * self.weight


class StateSpaceBlock(Layer):
    """x + mixer(norm(x)), where x, the residual stream, is float32 if the config says residual_in_fp32."""

    norm: RMSNorm
    mixer: Layer

    def __init__(self, config: Any, mixer: Layer) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)
        self.mixer, self.recompute = mixer, config.recompute
        self.is_stream_float32 = config.residual_in_fp32

    def forward(self, x_bse: Any, cache: LayerCache | None = None) -> Any:
        return run_part("full", self.recompute, self._compute, x_bse, cache)

    def _compute(self, x_bse: Any, cache: LayerCache | None = None) -> Any:
        normed = self.norm(x_bse.astype(self.norm.weight.dtype))
        mixed = run_part("full_attn", self.recompute, self.mixer, normed, cache)
        stream = x_bse.astype("float32") + mixed.astype("float32") if self.is_stream_float32 else x_bse + mixed
        return constrain(stream, "batch", "seq", "embed")


class StateSpaceDecoder(Decoder):
    """A Decoder whose blocks are StateSpaceBlocks: a class sets `family` and writes make_mixer, a Layer with
    state_shapes."""

    tokens: Embedding
    blocks: LayerList
    norm: RMSNorm
    head: Linear

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.tokens = Embedding(config.vocab_size, width, weight_attr=normal(), dims=("vocab", "embed"))
        self.blocks = LayerList([StateSpaceBlock(config, self.make_mixer(config)) for _ in range(config.num_layers)])
        self.norm = RMSNorm(width, epsilon=config.layer_norm_epsilon)
        if not config.tie_embeddings:
            self.head = linear(width, config.vocab_size, ("embed", "vocab"))

    def make_mixer(self, config: Any) -> Layer:
        """A new mixer of a block."""
        raise NotImplementedError

    def normed(self, x_bse: Any) -> Any:
        """What logits and the loss are computed from, in the dtype of the weights."""
        return self.norm(x_bse).astype(self.norm.weight.dtype)

    @property
    def cache_dims(self) -> tuple[int, int, int]:
        """Nothing is kept of a token."""
        return 0, 0, 0

    def block_state_shapes(self, block: Any) -> Sequence[tuple[int, ...]]:
        """The last tokens that the convolution sees, and the state."""
        return block.mixer.state_shapes


def normal() -> ParamAttr:
    """How matrices begin."""
    return ParamAttr(initializer=Normal(0.0, 0.02))


def linear(ins: int, outs: int, dims: tuple[str | None, str | None], bias: bool = False) -> Linear:
    """A linear map."""
    return Linear(ins, outs, normal(), bias_attr=None if bias else False, dims=dims)


def first_step_biases(count: int) -> Assign:
    """Biases whose softplus is the step of each of so many channels or heads at the beginning: from 0.001 to 0.1,
    evenly by their logarithms."""
    steps = np.exp(np.linspace(np.log(1e-3), np.log(0.1), count))
    return Assign((steps + np.log(-np.expm1(-steps))).astype(np.float32))


def masked_steps(steps: Any, cache: LayerCache | None) -> Any:
    """Steps [batch, seq, ...], 0 where the rows of a cache have no token."""
    if cache is None:
        return steps
    is_token = cache.new_tokens(steps.shape[1]).astype(steps.dtype)
    return steps * is_token.reshape([*steps.shape[:2], *[1] * (len(steps.shape) - 2)])


# as published


def _without_middle(sources: list[WeightSource], config: Any) -> WeightSource:
    (source,) = sources
    shape = (source.shape[0], *source.shape[2:])
    return Changed(shape, source.dtype, lambda index: source.read((index[0], slice(None), *index[1:]))[:, 0])


_CONVOLUTION = Conversion(_without_middle, lambda array, config: [array[:, None]])
"""A convolution of each channel, [channels, 1, width] there."""


def outer_rules() -> list[WeightRule]:
    """The weights outside of the mixers."""
    return [
        WeightRule("backbone.embeddings.weight", "tokens.weight", SAME),
        WeightRule("backbone.norm_f.weight", "norm.weight", SAME),
        WeightRule("lm_head.weight", "head.weight"),
        WeightRule("backbone.layers.{n}.norm.weight", "blocks.{n}.norm.weight", SAME),
    ]


def mixer_rules(same: Mapping[str, str], maps: Mapping[str, str]) -> list[WeightRule]:
    """The weights of a mixer: vectors, and linear maps with their biases, by their names there; and the convolution."""
    there, here = "backbone.layers.{n}.mixer", "blocks.{n}.mixer"
    rules = [WeightRule(f"{there}.{name}", f"{here}.{ours}", SAME) for name, ours in same.items()]
    for name, ours in maps.items():
        rules += [
            WeightRule(f"{there}.{name}.weight", f"{here}.{ours}.weight"),
            WeightRule(f"{there}.{name}.bias", f"{here}.{ours}.bias", SAME),
        ]
    return [
        *rules,
        WeightRule(f"{there}.conv1d.weight", f"{here}.convolution.weight", _CONVOLUTION),
        WeightRule(f"{there}.conv1d.bias", f"{here}.convolution.bias", SAME),
    ]


KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "state_size": "state_size",
    "conv_kernel": "conv_width",
    "use_bias": "bias",
    "use_conv_bias": "conv_bias",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
    "residual_in_fp32": "residual_in_fp32",
}
"""What config.json says of both kinds."""
DEFAULTS = {"residual_in_fp32": True}
"""What it means by leaving one of them out."""
READ_KEYS = (
    *("expand", "intermediate_size", "time_step_rank", "time_step_scale", "time_step_min", "time_step_max"),
    *("time_step_floor", "time_step_init_scheme", "rescale_prenorm_residual", "use_mambapy"),
    *("d_model", "d_inner", "n_layer", "ssm_cfg", "fused_add_norm", "pad_vocab_size_multiple", "chunk_size"),
)
"""What training, or a program's choice of kernels, is told there, and what expand says."""


def read_inner_size(config: Mapping[str, Any]) -> int:
    """The width inside a block."""
    return int(config.get("expand", 2) * config["hidden_size"])
