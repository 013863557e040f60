"""A small LLaMA and a model of plain layers, and a few steps of training, for tests that compare placements."""

import numpy as np

import polyreme as paddle
from polyreme import nn
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.nn import functional as F

STEPS, RATE = 3, 0.5
# float32 rounds each of a sum's terms by 6e-8 of itself; gradients here are sums of at most 128 terms below 0.1
TOLERANCE = STEPS * RATE * 128 * 6e-8 * 0.1


def llama():
    """One block, on 32 words; every head has keys of its own, so that 4 devices split them all."""
    paddle.seed(3)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_kv_heads": 4, "seq_len": 8, "ffn_size": 32}
    return Llama(LlamaConfig.nano(**sizes))


class Block(nn.Layer):
    """Attention over [batch, seq, 8] and a feed-forward, as one writes them by hand."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).reshape([*x.shape[:2], 4, 6]).split(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Plain(nn.Layer):
    """Blocks of plain layers between an Embedding and a Linear; words [batch, seq] and the next ones -> the loss."""

    def __init__(self, blocks=1, words=16):
        super().__init__()
        paddle.seed(5)
        self.tokens = nn.Embedding(words, 8)
        self.blocks = nn.LayerList([Block() for _ in range(blocks)])
        self.head = nn.Linear(8, words)

    def forward(self, x, y):
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h), y)


def batches(words, seq=8, size=8):
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, words, (size, seq + 1)) for _ in range(STEPS)]
    return [(paddle.to_tensor(i[:, :-1]), paddle.to_tensor(i[:, 1:])) for i in ids]


def train(model, optimizer, data, captured=True):
    """Losses of a few steps, and the weights after them."""

    def step(x, y):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    run = paddle.jit.to_static(step) if captured else step
    losses = [float(run(x, y)) for x, y in data]
    return losses, {name: p.numpy() for name, p in model.named_parameters()}


def assert_same(got, want, tolerance=TOLERANCE):
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=tolerance)
    for name, value in want[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=0, atol=tolerance, err_msg=name)
