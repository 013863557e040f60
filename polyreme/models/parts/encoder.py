"""What encoders share: activations and labels as published, attention over all places, the feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from polyreme.errors import ConfigError, ShapeError, did_you_mean
from polyreme.models.files.published import SAME, WeightRule
from polyreme.models.parts.decoder import Documents
from polyreme.nn import Layer, Linear
from polyreme.nn import functional as F
from polyreme.nn.initializer import Normal
from polyreme.nn.parameter import ParamAttr
from polyreme.ops.creation import arange
from polyreme.ops.layout import constrain
from polyreme.ops.manipulation import stack

ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(F.gelu, approximate=True),
    "quick_gelu": lambda x: x * F.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swish": F.silu,
}
"""By the names that config.json has for them."""


def check_activation(owner: str, name: str) -> None:
    """Raises ConfigError for one that is not known."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"{owner}: unknown activation {name!r}{did_you_mean(name, ACTIVATIONS)}")


def linear(ins: int, outs: int, dims: tuple[str | None, str | None], bias: bool = True) -> Linear:
    """A linear map that begins as these models do."""
    return Linear(ins, outs, normal(), bias_attr=None if bias else False, dims=dims)


def normal() -> ParamAttr:
    """How matrices begin."""
    return ParamAttr(initializer=Normal(0.0, 0.02))


class SelfAttention(Layer):
    """Attention among all places of [batch, seq, embed]; mask as of scaled_dot_product_attention. documents: those that
    share rows, whose places see each other alone, instead of a mask."""

    num_heads: int
    dropout: float
    q: Linear
    k: Linear
    v: Linear
    out: Linear

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.q, self.k, self.v = (linear(width, width, ("embed", "heads")) for _ in range(3))
        self.out = linear(width, width, ("heads", "embed"))

    def forward(self, x_bse: Any, mask: Any = None, is_causal: bool = False, documents: Documents | None = None) -> Any:
        batch, seq, width = x_bse.shape
        q, k, v = (
            constrain(part(x_bse).reshape([batch, seq, self.num_heads, -1]), "batch", "block_seq", "heads", None)
            for part in (self.q, self.k, self.v)
        )
        if documents is not None:
            begins = arange(seq, dtype="int32") - documents.places
            bounds = stack([documents.ends, begins], -1).reshape([batch, 1, seq, 2])
            mixed = F.flashmask_attention(q, k, v, bounds, dropout=self.dropout, training=self.training)
        else:
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=self.dropout, is_causal=is_causal, training=self.training
            )
        return self.out(mixed.reshape([batch, seq, width]))


class TwoLayers(Layer):
    """down(activation(up(x))) of [batch, seq, embed] or [batch, rows, columns, embed].

    bias: whether both add one. dropout: of what is between, while training.
    """

    activation: Callable[..., Any]

    up: Linear
    down: Linear

    def __init__(self, width: int, ffn_size: int, activation: str, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.up = linear(width, ffn_size, ("embed", "ffn"), bias)
        self.down = linear(ffn_size, width, ("ffn", "embed"), bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Any) -> Any:
        inner = ("block_seq",) if len(x.shape) == 3 else (None,) * (len(x.shape) - 2)
        hidden = self.activation(constrain(self.up(x), "batch", *inner, "ffn"))
        return self.down(F.dropout(hidden, self.dropout, training=self.training) if self.dropout else hidden)


def key_mask(owner: str, attention_mask: Any, shape: Any) -> Any:
    """A mask of keys, bool [batch, 1, 1, seq], of attention_mask [batch, seq], whose places of 0 nobody sees."""
    if attention_mask is None:
        return None
    if list(attention_mask.shape) != list(shape):
        raise ShapeError(
            f"{owner}: attention_mask has shape {list(attention_mask.shape)}; give that of the ids, {list(shape)}"
        )
    return (attention_mask != 0).reshape([shape[0], 1, 1, shape[1]])


def same_rules(theirs: str, ours: str) -> list[WeightRule]:
    """The weight and the bias of a norm."""
    return [WeightRule(f"{theirs}.{kind}", f"{ours}.{kind}", SAME) for kind in ("weight", "bias")]


def linear_rules(theirs: str, ours: str) -> list[WeightRule]:
    """The weight and the bias of a linear map."""
    return [WeightRule(f"{theirs}.weight", f"{ours}.weight"), WeightRule(f"{theirs}.bias", f"{ours}.bias", SAME)]


def check_label_names(config: Any) -> None:
    """Raises ConfigError where label_names are neither none nor num_labels."""
    if config.label_names and len(config.label_names) != config.num_labels:
        raise ConfigError(
            f"{type(config).__name__}: num_labels is {config.num_labels}, and {len(config.label_names)} have a name; "
            "give label_names=() or as many"
        )


LABEL_KEYS = ("id2label", "label2id", "num_labels")
"""What config.json says of labels."""


def read_labels(config: Mapping[str, Any]) -> dict[str, Any]:
    """num_labels and label_names."""
    names = config.get("id2label") or {}
    count = len(names) or config.get("num_labels") or 2
    listed = tuple(str(names.get(str(i), names.get(i, _label(i)))) for i in range(count))
    return {"num_labels": count, "label_names": () if listed == tuple(map(_label, range(count))) else listed}


def write_labels(config: Any) -> dict[str, Any]:
    """The keys that these fields become."""
    names = config.label_names or tuple(map(_label, range(config.num_labels)))
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _label(number: int) -> str:
    return f"LABEL_{number}"
