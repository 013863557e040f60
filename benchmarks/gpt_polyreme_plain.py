"""The GPT step as a user of Paddle's API writes it: layers and functions alone, captured as one program, with AdamW."""

import gpt_workload as g
import numpy as np

import polyreme as paddle
import polyreme.nn as nn
import polyreme.nn.functional as F


class Block(nn.Layer):
    """Pre-norm attention and feed-forward."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = (nn.LayerNorm(g.HIDDEN, epsilon=g.NORM_EPSILON) for _ in range(2))
        self.qkv, self.proj = nn.Linear(g.HIDDEN, 3 * g.HIDDEN), nn.Linear(g.HIDDEN, g.HIDDEN)
        self.fc, self.out = nn.Linear(g.HIDDEN, g.FFN), nn.Linear(g.FFN, g.HIDDEN)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        """[batch, seq, hidden] -> the same."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).reshape([batch, seq, 3, g.HEADS, width // g.HEADS]).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape([batch, seq, width])
        x = x + self.drop(self.proj(mixed))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln2(x)), approximate=True)))


class GPT(nn.Layer):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(g.VOCAB, g.HIDDEN), nn.Embedding(g.SEQ, g.HIDDEN)
        self.drop = nn.Dropout(0.0)
        self.blocks = nn.LayerList([Block() for _ in range(g.LAYERS)])
        self.ln = nn.LayerNorm(g.HIDDEN, epsilon=g.NORM_EPSILON)

    def forward(self, ids):
        """The logits; the output projection is the token embedding."""
        h = self.drop(self.wte(ids) + self.wpe(paddle.arange(ids.shape[1])))
        for block in self.blocks:
            h = block(h)
        return paddle.matmul(self.ln(h), self.wte.weight, transpose_y=True)


def weights_of(model: GPT) -> dict[str, np.ndarray]:
    """The workload's weights under the model's names."""
    kinds = {"w": "weight", "b": "bias"}
    named = {}
    for name, array in g.weights().items():
        *parts, last = name.split(".")
        path = [*parts, kinds.get(last, f"{last}.weight")]
        named[".".join(["blocks", *path] if path[0].isdigit() else path)] = array
    assert named.keys() == model.state_dict().keys()
    return named


def build():
    """-> a function that does one step and returns its loss."""
    model = GPT()
    model.set_state_dict(weights_of(model))
    constants = {"beta1": g.BETA1, "beta2": g.BETA2, "epsilon": g.EPSILON, "weight_decay": g.WEIGHT_DECAY}
    optimizer = paddle.optimizer.AdamW(g.LEARNING_RATE, parameters=model.parameters(), **constants)

    @paddle.jit.to_static
    def step(ids, labels):
        logits = model(ids)
        loss = F.cross_entropy(logits.reshape([-1, g.VOCAB]), labels.reshape([-1]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    ids, labels = (paddle.to_tensor(x) for x in g.batch())
    return lambda: float(step(ids, labels))
