"""Models as users write them for one device, without a word of how they are split."""

import math

import polyreme as paddle
from polyreme import nn
from polyreme.nn import functional as F


class WrittenOut(nn.Layer):
    """Attention by hand: separate q, k, v, or one weight for all; fewer key heads, repeated in one of two ways."""

    def __init__(self, width, heads, kv_heads, kind):
        super().__init__()
        self.heads, self.kv_heads, self.kind, self.each = heads, kv_heads, kind, width // heads
        inner = kv_heads * self.each
        if kind in ("fused", "fused_grouped"):
            self.qkv = nn.Linear(width, width + 2 * inner)
        else:
            self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, inner), nn.Linear(width, inner)
        self.o = nn.Linear(width, width)

    def projected(self, x):
        width, inner = self.heads * self.each, self.kv_heads * self.each
        if self.kind == "fused":
            return self.qkv(x).chunk(3, -1)
        if self.kind == "fused_grouped":
            return self.qkv(x).split([width, inner, inner], -1)
        return self.q(x), self.k(x), self.v(x)

    def repeated(self, x):
        batch, _, seq, head_dim = x.shape
        times = self.heads // self.kv_heads
        if times == 1:
            return x
        if self.kind == "expand":
            x = x.unsqueeze(2).expand([batch, self.kv_heads, times, seq, head_dim])
            return x.reshape([batch, self.heads, seq, head_dim])
        return x.repeat_interleave(times, 1)

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = (
            t.reshape([batch, seq, n, self.each]).transpose([0, 2, 1, 3])
            for t, n in zip(self.projected(x), (self.heads, self.kv_heads, self.kv_heads), strict=True)
        )
        k, v = self.repeated(k), self.repeated(v)
        scores = q @ k.transpose([0, 1, 3, 2]) / math.sqrt(self.each)
        unseen = paddle.triu(paddle.full([seq, seq], -1e9), 1)
        mixed = F.softmax(scores + unseen, -1) @ v
        return self.o(mixed.transpose([0, 2, 1, 3]).reshape([batch, seq, width]))


class Gated(nn.Layer):
    """Feed-forward whose gate and hidden come out of one weight."""

    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        gate, hidden = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * hidden)


class Block(nn.Layer):
    def __init__(self, width, attention, feed_forward):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = attention, feed_forward

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class Language(nn.Layer):
    """Tokens -> logits, the head being the embedding again."""

    def __init__(self, kinds=("separate",), width=16, heads=4, kv_heads=4, hidden=24, vocab=48):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = self.create_parameter([12, width])
        self.blocks = nn.LayerList(
            [
                Block(
                    width,
                    nn.MultiHeadAttention(width, heads)
                    if kind == "layer"
                    else WrittenOut(width, heads, heads if kind == "fused" else kv_heads, kind),
                    nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
                    if kind == "layer"
                    else Gated(width, hidden),
                )
                for kind in kinds
            ]
        )

    def forward(self, ids):
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return paddle.matmul(x, self.tokens.weight, transpose_y=True)


class Experts(nn.Layer):
    """Every token through all experts, weighted by a gate."""

    def __init__(self, width=8, hidden=12, count=4):
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.up = self.create_parameter([count, width, hidden])
        self.down = self.create_parameter([count, hidden, width])

    def forward(self, x):
        batch, seq, width = x.shape
        rows = x.reshape([batch * seq, width])
        routed = paddle.einsum("nx,ne->xne", F.softmax(self.gate(rows), -1), rows)
        found = paddle.matmul(F.gelu(paddle.matmul(routed, self.up)), self.down)
        return x + found.sum(0).reshape([batch, seq, width])


def strip(model):
    """The model without the dims that its layers name."""
    for p in model.parameters():
        p.dims = (None,) * p.ndim
    return model
