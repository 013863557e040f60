"""The GPT step in JAX with polyreme's kernels: what a captured polyreme step can reach."""

import gpt_plain_jax as plain
import gpt_workload as g
import jax
import jax.numpy as jnp

import polyreme.kernels as kernels


def attention(x, p, i):
    """Causal self-attention of layer i."""
    qkv = kernels.linear(x, p[f"{i}.qkv.w"], p[f"{i}.qkv.b"])
    q, k, v = (y.reshape(g.BATCH, g.SEQ, g.HEADS, -1) for y in jnp.split(qkv, 3, -1))
    out = kernels.attention(q, k, v, causal=True).reshape(x.shape)
    return kernels.linear(out, p[f"{i}.proj.w"], p[f"{i}.proj.b"])


def mlp(x, p, i):
    """Feed-forward block of layer i."""
    up = jax.nn.gelu(kernels.linear(x, p[f"{i}.fc.w"], p[f"{i}.fc.b"]))
    return kernels.linear(up, p[f"{i}.out.w"], p[f"{i}.out.b"])


def loss(p, ids, labels):
    """Mean cross-entropy of one batch."""
    x = p["wte"][ids] + p["wpe"]
    y = kernels.layer_norm(x, p["0.ln1.w"], p["0.ln1.b"], g.NORM_EPSILON)
    for i in range(g.LAYERS):
        y, x = _joint(attention(y, p, i), x, p, f"{i}.ln2")
        y, x = _joint(mlp(y, p, i), x, p, f"{i + 1}.ln1" if i + 1 < g.LAYERS else "ln")
    return kernels.linear_cross_entropy(y.reshape(g.TOKENS, -1), p["wte"], labels.reshape(-1), reduction="mean")


def _joint(x, residual, p, name):
    total = residual + x
    return kernels.layer_norm(total, p[f"{name}.w"], p[f"{name}.b"], g.NORM_EPSILON), total


def step(state, ids, labels):
    """One training step: state, ids, labels -> new state, loss."""
    params, m, v, t = state
    value, grads = jax.value_and_grad(loss)(params, ids, labels)
    names = list(params)
    listed = ([d[k] for k in names] for d in (params, grads, m, v))
    constants = {"beta1": g.BETA1, "beta2": g.BETA2, "epsilon": g.EPSILON, "weight_decay": g.WEIGHT_DECAY}
    new = kernels.adamw(*listed, step=t + 1, learning_rate=g.LEARNING_RATE, **constants)
    return (*(dict(zip(names, arrays, strict=True)) for arrays in new), t + 1), value


def build():
    """-> a function that does one step and returns its loss."""
    return plain.build(step)
