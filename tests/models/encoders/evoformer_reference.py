"""AlphaFold 2's Evoformer block in NumPy, line by line as in the supplement of Jumper et al., 2021 (algorithms 6 to 16
and 19), without a batch dim. Weights are those of models.encoders.evoformer by name, below a prefix."""

import numpy as np
from scipy.special import expit, softmax


class Weights:
    """The arrays of one layer of a model."""

    def __init__(self, arrays, prefix=""):
        self.arrays, self.prefix = arrays, prefix

    def __getattr__(self, name):
        path = f"{self.prefix}{name}"
        return self.arrays[path] if path in self.arrays else Weights(self.arrays, f"{path}.")


def norm(w, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * w.weight + w.bias


def linear(w, x):
    return x @ w.weight + (w.arrays.get(f"{w.prefix}bias", 0))


def gate_attention(w, x, bias, mask):
    """Rows [m, r, c]: each attends to itself. bias [h, r, r] or 0."""
    out = np.zeros_like(x)
    for row in range(len(x)):
        for head in range(w.query_weight.shape[1]):
            q, k, v = (x[row] @ u[:, head] for u in (w.query_weight, w.key_weight, w.value_weight))
            # in this order: what is left of a score beside 1e9 decides where all of a row is masked
            scores = q / np.sqrt(q.shape[-1]) @ k.T + (mask[row] - 1) * 1e9
            scores = scores + (bias if np.isscalar(bias) else bias[head])
            gate = expit(x[row] @ w.gate_weight[:, head] + w.gate_bias[head])
            out[row] += gate * (softmax(scores, -1) @ v) @ w.out_weight[head]
    return out + w.out_bias


def pair_bias(w, pair):
    return linear(w.proj, pair).transpose(2, 0, 1)


def turned(x):
    return np.swapaxes(x, 0, 1)


def row_attention(w, msa, pair, mask):
    return gate_attention(w.attention, norm(w.norm, msa), pair_bias(w.bias, norm(w.pair_norm, pair)), mask)


def column_attention(w, msa, mask):
    return turned(gate_attention(w.attention, turned(norm(w.norm, msa)), 0, turned(mask)))


def global_column_attention(w, msa, mask, heads):
    x, out = norm(w.norm, msa), np.zeros_like(msa)
    for r in range(x.shape[1]):
        there = mask[:, r, None]
        q = linear(w.query, (x[:, r] * there).sum(0) / (there.sum() + 1e-10)).reshape(heads, -1)
        k, v = linear(w.key, x[:, r]), linear(w.value, x[:, r])
        scores = q / np.sqrt(q.shape[-1]) @ k.T + (mask[:, r] - 1) * 1e9
        mixed = (softmax(scores, -1) @ v).reshape(-1)
        out[:, r] = linear(w.out, expit(linear(w.gate, x[:, r])) * mixed)
    return out


def transition(w, x):
    return linear(w.down, np.maximum(linear(w.up, norm(w.norm, x)), 0))


def outer_product_mean(w, msa, mask):
    x = norm(w.norm, msa)
    left, right = linear(w.left, x) * mask[..., None], linear(w.right, x) * mask[..., None]
    residues = msa.shape[1]
    out = np.zeros((residues, residues, w.bias.shape[0]))
    for i, j in np.ndindex(residues, residues):
        outer = sum(np.outer(left[s, i], right[s, j]) for s in range(len(msa)))
        out[i, j] = (np.einsum("cd,cdz->z", outer, w.weight) + w.bias) / ((mask[:, i] * mask[:, j]).sum() + 1e-3)
    return out


def triangle_multiplication(w, pair, mask, outgoing):
    x = norm(w.norm, pair)
    left = expit(linear(w.left_gate, x)) * linear(w.left, x) * mask[..., None]
    right = expit(linear(w.right_gate, x)) * linear(w.right, x) * mask[..., None]
    n = len(pair)
    mixed = np.zeros(left.shape)
    for i, j, k in np.ndindex(n, n, n):
        mixed[i, j] += left[i, k] * right[j, k] if outgoing else left[k, i] * right[k, j]
    return expit(linear(w.gate, x)) * linear(w.out, norm(w.out_norm, mixed))


def triangle_attention(w, pair, mask, starting):
    if not starting:
        return turned(triangle_attention(w, turned(pair), turned(mask), True))
    x = norm(w.norm, pair)
    return gate_attention(w.attention, x, pair_bias(w.bias, x), mask)


def block(w, msa, pair, msa_mask, pair_mask, where="origin", global_heads=0):
    """One block, without dropout. where: of the outer product mean. global_heads: of a global column attention."""

    def outer():
        return outer_product_mean(w.outer_product_mean, msa, msa_mask)

    refined = pair
    if where == "first":
        pair = refined = pair + outer()
    msa = msa + row_attention(w.row_attention, msa, pair, msa_mask)
    if global_heads:
        msa = msa + global_column_attention(w.column_attention, msa, msa_mask, global_heads)
    else:
        msa = msa + column_attention(w.column_attention, msa, msa_mask)
    msa = msa + transition(w.msa_transition, msa)
    if where in ("origin", "middle"):
        refined = refined + outer()
    for name, outgoing in (("triangle_outgoing", True), ("triangle_incoming", False)):
        refined = refined + triangle_multiplication(getattr(w, name), refined, pair_mask, outgoing)
    for name, starting in (("triangle_starting", True), ("triangle_ending", False)):
        refined = refined + triangle_attention(getattr(w, name), refined, pair_mask, starting)
    refined = refined + transition(w.pair_transition, refined)
    return msa, refined + outer() if where == "end" else refined
