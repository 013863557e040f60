"""The GPT step in PaddlePaddle, imperative, with its own attention function and AdamW."""

import gpt_workload as g
import paddle
from paddle.nn import functional as F


def norm(x, p, name):
    """Layer norm over the last dim."""
    return F.layer_norm(x, g.HIDDEN, p[f"{name}.w"], p[f"{name}.b"], g.NORM_EPSILON)


def linear(x, p, name):
    """Affine map by name."""
    return F.linear(x, p[f"{name}.w"], p[f"{name}.b"])


def attention(x, p, i):
    """Causal self-attention of layer i."""
    q, k, v = (y.reshape([g.BATCH, g.SEQ, g.HEADS, -1]) for y in linear(x, p, f"{i}.qkv").chunk(3, -1))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    return linear(out, p, f"{i}.proj")


def loss(p, ids, labels):
    """Mean cross-entropy of one batch."""
    x = F.embedding(ids, p["wte"]) + p["wpe"]
    for i in range(g.LAYERS):
        x = x + attention(norm(x, p, f"{i}.ln1"), p, i)
        x = x + linear(F.gelu(linear(norm(x, p, f"{i}.ln2"), p, f"{i}.fc"), approximate=True), p, f"{i}.out")
    logits = paddle.matmul(norm(x, p, "ln"), p["wte"], transpose_y=True)
    return F.cross_entropy(logits.reshape([g.TOKENS, -1]), labels.reshape([-1]))


def build():
    """-> a function that does one step and returns its loss."""
    paddle.set_device("cpu")
    params = {}
    for name, array in g.weights().items():
        initial = paddle.nn.initializer.Assign(array)
        params[name] = paddle.create_parameter(array.shape, "float32", default_initializer=initial)
    ids, labels = (paddle.to_tensor(x.astype("int64")) for x in g.batch())
    constants = {"beta1": g.BETA1, "beta2": g.BETA2, "epsilon": g.EPSILON, "weight_decay": g.WEIGHT_DECAY}
    optimizer = paddle.optimizer.AdamW(g.LEARNING_RATE, parameters=list(params.values()), **constants)

    def run() -> float:
        value = loss(params, ids, labels)
        value.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(value)

    return run
