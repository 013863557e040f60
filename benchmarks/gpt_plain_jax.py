"""The GPT step written plainly in JAX: what a person would write first, under one jit with donated state."""

import gpt_workload as g
import jax
import jax.numpy as jnp


def norm(x, w, b):
    """Layer norm over the last dim."""
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + g.NORM_EPSILON) * w + b


def attention(x, p, i):
    """Causal self-attention of layer i."""
    qkv = x @ p[f"{i}.qkv.w"] + p[f"{i}.qkv.b"]
    q, k, v = (y.reshape(g.BATCH, g.SEQ, g.HEADS, -1) for y in jnp.split(qkv, 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones((g.SEQ, g.SEQ), bool))
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    out = jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(x.shape)
    return out @ p[f"{i}.proj.w"] + p[f"{i}.proj.b"]


def mlp(x, p, i):
    """Feed-forward block of layer i."""
    return jax.nn.gelu(x @ p[f"{i}.fc.w"] + p[f"{i}.fc.b"]) @ p[f"{i}.out.w"] + p[f"{i}.out.b"]


def loss(p, ids, labels):
    """Mean cross-entropy of one batch."""
    x = p["wte"][ids] + p["wpe"]
    for i in range(g.LAYERS):
        x = x + attention(norm(x, p[f"{i}.ln1.w"], p[f"{i}.ln1.b"]), p, i)
        x = x + mlp(norm(x, p[f"{i}.ln2.w"], p[f"{i}.ln2.b"]), p, i)
    logits = norm(x, p["ln.w"], p["ln.b"]) @ p["wte"].T
    log_probs = jax.nn.log_softmax(logits, -1)
    return -jnp.take_along_axis(log_probs, labels[..., None], -1).mean()


def adamw(p, grad, m, v, t):
    """One parameter's update."""
    m = g.BETA1 * m + (1 - g.BETA1) * grad
    v = g.BETA2 * v + (1 - g.BETA2) * grad**2
    m_hat, v_hat = m / (1 - g.BETA1**t), v / (1 - g.BETA2**t)
    p = p - g.LEARNING_RATE * (m_hat / (jnp.sqrt(v_hat) + g.EPSILON) + g.WEIGHT_DECAY * p)
    return p, m, v


def step(state, ids, labels):
    """One training step: state, ids, labels -> new state, loss."""
    params, m, v, t = state
    value, grads = jax.value_and_grad(loss)(params, ids, labels)
    new = {k: adamw(params[k], grads[k], m[k], v[k], t + 1.0) for k in params}
    return (*({k: n[j] for k, n in new.items()} for j in range(3)), t + 1), value


def build(step=step):
    """-> a function that does one step and returns its loss."""
    params = {k: jnp.asarray(w) for k, w in g.weights().items()}
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    state = (params, *zeros, jnp.zeros((), jnp.int32))
    ids, labels = map(jnp.asarray, g.batch())
    compiled = jax.jit(step, donate_argnums=0)

    def run() -> float:
        nonlocal state
        state, value = compiled(state, ids, labels)
        jax.block_until_ready(state)
        return float(value)

    return run
