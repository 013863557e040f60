"""The GPT step in PyTorch, eager or compiled, with its own fused attention and AdamW."""

import gpt_workload as g
import torch
from torch.nn import functional as F


def norm(x, p, name):
    """Layer norm over the last dim."""
    return F.layer_norm(x, (g.HIDDEN,), p[f"{name}.w"], p[f"{name}.b"], g.NORM_EPSILON)


def linear(x, p, name):
    """Affine map by name."""
    return F.linear(x, p[f"{name}.w"], p[f"{name}.b"])


def attention(x, p, i):
    """Causal self-attention of layer i."""
    q, k, v = linear(x, p, f"{i}.qkv").chunk(3, -1)
    q, k, v = (y.view(g.BATCH, g.SEQ, g.HEADS, -1).transpose(1, 2) for y in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
    return linear(out, p, f"{i}.proj")


def loss(p, ids, labels):
    """Mean cross-entropy of one batch."""
    x = F.embedding(ids, p["wte"]) + p["wpe"]
    for i in range(g.LAYERS):
        x = x + attention(norm(x, p, f"{i}.ln1"), p, i)
        x = x + linear(F.gelu(linear(norm(x, p, f"{i}.ln2"), p, f"{i}.fc"), approximate="tanh"), p, f"{i}.out")
    logits = F.linear(norm(x, p, "ln"), p["wte"])
    return F.cross_entropy(logits.view(g.TOKENS, -1), labels.view(-1))


def build(compiled: bool = False):
    """-> a function that does one step and returns its loss; weights are kept [out, in], as F.linear takes them."""
    arrays = {k: torch.from_numpy(w) for k, w in g.weights().items()}
    arrays = {k: w.T.contiguous() if w.ndim == 2 and k not in ("wte", "wpe") else w for k, w in arrays.items()}
    params = {k: w.requires_grad_() for k, w in arrays.items()}
    ids, labels = (torch.from_numpy(x).long() for x in g.batch())
    betas = (g.BETA1, g.BETA2)
    options = {"lr": g.LEARNING_RATE, "betas": betas, "eps": g.EPSILON, "weight_decay": g.WEIGHT_DECAY}
    optimizer = torch.optim.AdamW(params.values(), fused=True, **options)
    forward = torch.compile(loss) if compiled else loss

    def run() -> float:
        value = forward(params, ids, labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    return run
