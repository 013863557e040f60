"""Vision transformer.

Source: Dosovitskiy et al., 2020, arXiv:2010.11929, figure 1 and table 1. A weight is [in, out].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import GELU, Conv2D, Dropout, Layer, LayerNorm, Linear, Sequential
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant, TruncatedNormal
from polyreme.nn.parameter import Parameter
from polyreme.ops.manipulation import concat
from polyreme.vision.models.weights import maker

_SPREAD = TruncatedNormal(std=0.02)


class _Attention(Layer):
    """Self-attention over [batch, tokens, width]."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.qkv = Linear(width, 3 * width, weight_attr=_SPREAD)
        self.proj = Linear(width, width, weight_attr=_SPREAD)

    def forward(self, x: Any) -> Any:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape([batch, tokens, 3, self.num_heads, width // self.num_heads]).unbind(2)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, training=self.training)
        return self.proj(found.reshape([batch, tokens, width]))


class _EncoderBlock(Layer):
    """Attention and two linear layers, each normalized first and added to its input."""

    def __init__(
        self, width: int, num_heads: int, inner: int, dropout: float, attn_dropout: float, epsilon: float
    ) -> None:
        super().__init__()
        self.norm1, self.attn = LayerNorm(width, epsilon=epsilon), _Attention(width, num_heads, attn_dropout)
        self.norm2 = LayerNorm(width, epsilon=epsilon)
        self.mlp = Sequential(
            ("fc1", Linear(width, inner, weight_attr=_SPREAD, dims=("embed", "ffn"))),
            ("act", GELU()),
            ("drop1", Dropout(dropout)),
            ("fc2", Linear(inner, width, weight_attr=_SPREAD, dims=("ffn", "embed"))),
            ("drop2", Dropout(dropout)),
        )
        self.drop = Dropout(dropout)

    def forward(self, x: Any) -> Any:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(Layer):
    """Images [batch, in_channels, img_size, img_size] -> scores [batch, num_classes].

    The image is cut into patches of patch_size, each a token of width embed_dim; a learned token in front of them is
    what the head reads. depth blocks with num_heads heads and an inner width of mlp_ratio * embed_dim, or of ffn_size;
    dropout after each part of them, attn_dropout of attention weights; norms with epsilon. num_classes=0 leaves the
    head out: -> [batch, embed_dim].
    """

    img_size: int
    num_classes: int
    patch_embed: Sequential
    cls_token: Parameter
    pos_embed: Parameter
    pos_drop: Dropout
    blocks: Sequential
    norm: LayerNorm
    head: Linear

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
        in_channels: int = 3,
        epsilon: float = 1e-6,
        ffn_size: int | None = None,
    ) -> None:
        super().__init__()
        if img_size % patch_size or embed_dim % num_heads:
            raise ConfigError(
                f"VisionTransformer: img_size={img_size} of patch_size={patch_size}, embed_dim={embed_dim} of "
                f"num_heads={num_heads}; the second must divide the first of both"
            )
        self.img_size, self.num_classes = img_size, num_classes
        tokens = (img_size // patch_size) ** 2 + 1
        inner = int(embed_dim * mlp_ratio) if ffn_size is None else ffn_size
        self.patch_embed = Sequential(("proj", Conv2D(in_channels, embed_dim, patch_size, stride=patch_size)))
        self.cls_token = self.create_parameter([1, 1, embed_dim], default_initializer=Constant(0.0))
        self.pos_embed = self.create_parameter([1, tokens, embed_dim], default_initializer=_SPREAD)
        self.pos_drop = Dropout(dropout)
        self.blocks = Sequential(
            *(_EncoderBlock(embed_dim, num_heads, inner, dropout, attn_dropout, epsilon) for _ in range(depth))
        )
        self.norm = LayerNorm(embed_dim, epsilon=epsilon)
        if num_classes > 0:
            self.head = Linear(embed_dim, num_classes, weight_attr=_SPREAD)

    def hidden(self, x: Any) -> Any:
        """What the head reads the first of, [batch, 1 + patches, embed_dim]. Raises ShapeError for images of another
        size."""
        if tuple(x.shape[2:]) != (self.img_size, self.img_size):
            raise ShapeError(f"VisionTransformer: images {list(x.shape)}; their sides must be img_size={self.img_size}")
        patches = self.patch_embed(x).flatten(2).transpose([0, 2, 1])
        first = self.cls_token.expand([patches.shape[0], 1, patches.shape[2]])
        x = self.blocks(self.pos_drop(concat([first, patches], axis=1) + self.pos_embed))
        return self.norm(x)

    def forward(self, x: Any) -> Any:
        x = self.hidden(x)[:, 0]
        return self.head(x) if self.num_classes > 0 else x


_LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
vit_b_16: Callable[..., VisionTransformer] = maker("vit_b_16", VisionTransformer, "ViT-Base, patches of 16")
vit_b_32: Callable[..., VisionTransformer] = maker(
    "vit_b_32", VisionTransformer, "ViT-Base, patches of 32", patch_size=32
)
vit_l_16: Callable[..., VisionTransformer] = maker("vit_l_16", VisionTransformer, "ViT-Large, patches of 16", **_LARGE)
vit_l_32: Callable[..., VisionTransformer] = maker(
    "vit_l_32", VisionTransformer, "ViT-Large, patches of 32", patch_size=32, **_LARGE
)
