"""Scaled dot-product attention: blocked with its own backward on CPU, cuDNN on GPU, and the plain twin.

Shape legend: b batch, h query heads, n key heads, g = h / n query heads that share a key head, s query length,
t key length, d head dim, e width of a value.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels import attention_blocked, select
from polyreme.kernels.attention_blocked import AttentionSpec

CUDNN_DTYPES = (jnp.float16, jnp.bfloat16)
CUDNN_MAX_HEAD_DIM = 128  # larger heads are supported on some chips only


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    scale: float | None = None,
    mask: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    origin: jax.Array | None = None,
    softcap: float = 0.0,
) -> jax.Array:
    """softmax(scale * q k^T + mask) v: q [b, s, h, d], k [b, t, n, d] and v [b, t, n, e] -> [b, s, h, e].

    n divides h. causal lets query i see the keys up to i + t - s, so the last query sees every key. mask broadcasts to
    [b, h, s, t]: bool keeps where True and has no gradient, a float mask is added to the scores and has one. A query
    with no key left gives 0, and its gradient is 0. scale is d ** -0.5 unless given. Scores are computed in at least
    float32; softcap: above 0, a score x is softcap * tanh(x / softcap) before the mask. Dropout depends on the key and
    on the place (batch entry, head, query, key) alone; origin says where these arrays begin in a whole that is split
    over devices (attention_blocked.Draw).

    CPU: query blocks, each against the keys it needs; the backward pass recomputes the probabilities from the saved
    logsumexp, so memory grows with s * t / blocks (source: arXiv:2205.14135, section 3; arXiv:2307.08691, algorithm 2).
    On one device of two cores, from 128 queries on and up to 256 keys, each batch entry and head comes by itself.
    GPU: cuDNN for float16 and bfloat16 where there is no mask, no dropout and no softcap, s = t if causal, and d = e is
    a multiple of 8 up to 128; elsewhere the plain form. select.attention_only chooses otherwise. Reverse mode of any
    order; for forward mode use attention_plain.

    Raises ShapeError for dims that do not fit, DTypeError for a mask neither bool nor float, ConfigError for a dropout
    rate outside [0, 1) or without a key, and where no kernel that is allowed takes the inputs.

    >>> q = k = v = jnp.ones((1, 3, 2, 4))
    >>> attention(q, k, v, causal=True).shape
    (1, 3, 2, 4)
    """
    check(q, k, v, mask, dropout_key, dropout_rate)
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    options = {"mask": mask, "dropout_key": dropout_key, "dropout_rate": dropout_rate, "origin": origin}
    is_plain = mask is None and dropout_rate == 0 and not softcap
    for kernel in select.attention_order():
        if kernel == "efficient":
            by_head = select.on_few_cores() and attention_blocked.suits_head(q.shape, k.shape)
            spec = AttentionSpec(causal, scale, dropout_rate, softcap, by_head)
            return attention_blocked.attention(spec, q, k, v, mask, attention_blocked.draw_of(dropout_key, origin))
        if kernel == "math":
            return attention_plain(q, k, v, causal=causal, scale=scale, softcap=softcap, **options)
        if select.backend() == "gpu" and is_plain and _cudnn_takes(q, k, v, causal):
            return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal, implementation="cudnn")
    raise ConfigError(
        f"attention: FLASH_ATTENTION alone is allowed, and it takes float16 or bfloat16 on a GPU without mask, "
        f"dropout and softcap; got {q.dtype} {list(q.shape)} on {select.backend()}, mask: {mask is not None}, dropout "
        f"{dropout_rate}, softcap {softcap}; allow MATH or EFFICIENT_ATTENTION too"
    )


def attention_plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    scale: float | None = None,
    mask: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    origin: jax.Array | None = None,
    softcap: float = 0.0,
) -> jax.Array:
    """The plain twin of attention: every score at once, derivatives by JAX, forward mode included."""
    check(q, k, v, mask, dropout_key, dropout_rate)
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    spec = AttentionSpec(causal=causal, scale=scale, dropout_rate=dropout_rate, softcap=softcap)
    return plain_with_logsumexp(spec, q, k, v, mask, attention_blocked.draw_of(dropout_key, origin))[0]


def plain_with_logsumexp(spec: AttentionSpec, q, k, v, mask, draw) -> tuple[jax.Array, jax.Array]:
    """(the result of attention_plain, the logsumexp of the scores, [b, h, s]: -inf for a query that sees no key)."""
    b, s, h, d = q.shape
    t, n = k.shape[1:3]
    acc = jnp.promote_types(q.dtype, jnp.float32)
    q_grouped = q.reshape(b, s, n, h // n, d).astype(acc)
    scores = jnp.einsum("bsngd,btnd->bngst", q_grouped, k.astype(acc)) * spec.scale
    scores = attention_blocked.soft_capped(scores, spec.softcap)
    scores = attention_blocked.masked(spec, scores, attention_blocked.grouped_mask(mask, n), t - s)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0)))
    total = weights.sum(-1, keepdims=True)
    probs = weights / jnp.where(total == 0, 1, total)
    if draw is not None and spec.dropout_rate > 0:
        probs = probs * attention_blocked.dropout_scale(spec, draw, probs.shape).astype(acc)
    out = jnp.einsum("bngst,btne->bsnge", probs, v.astype(acc))
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, lax.stop_gradient(top) + jnp.log(jnp.where(empty, 1, total)))
    return out.reshape(b, s, h, -1).astype(q.dtype), lse.reshape(b, h, s)


def _cudnn_takes(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> bool:
    d, s, t = q.shape[-1], q.shape[1], k.shape[1]
    same = q.dtype == k.dtype == v.dtype and q.dtype in CUDNN_DTYPES and v.shape[-1] == d
    return same and d % 8 == 0 and d <= CUDNN_MAX_HEAD_DIM and s > 1 and t > 1 and (s == t or not causal)


def check(q, k, v, mask, dropout_key, dropout_rate) -> None:
    """Raises what `attention` says it does."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeError(f"attention: {shapes}; each needs 4 dims [batch, seq, heads, head_dim]")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"attention: {shapes}; batch and head_dim must be equal, and k and v of one shape but for the last dim"
        )
    if q.shape[2] % k.shape[2]:
        raise ShapeError(f"attention: {q.shape[2]} query heads over {k.shape[2]} key heads; the latter must divide")
    if not (0 <= dropout_rate < 1) or math.isnan(dropout_rate):
        raise ConfigError(f"attention: dropout_rate is {dropout_rate}; it must lie in [0, 1)")
    if dropout_rate > 0 and dropout_key is None:
        raise ConfigError(f"attention: dropout_rate {dropout_rate} needs a dropout_key; pass one, or a rate of 0")
    if mask is not None:
        _check_mask(mask, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))


def _check_mask(mask: jax.Array, full: tuple[int, ...]) -> None:
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise DTypeError(f"attention: mask has dtype {mask.dtype}; it must be bool (keep) or floating (added)")
    dims = (1,) * (4 - mask.ndim) + mask.shape
    if mask.ndim > 4 or any(m not in (1, f) for m, f in zip(dims, full, strict=False)):
        raise ShapeError(f"attention: mask {list(mask.shape)} does not broadcast to [batch, heads, q, k] {list(full)}")
