"""Softmax cross-entropy of a linear map, without the logits ever being whole in memory.

Shape legend: t tokens, m hidden size, v vocabulary; a chunk holds c tokens.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels.linear import rows_product

CHUNK_BYTES = 8 << 20  # of one chunk's logits: measured best of 8, 16 and 32 MiB at 2048 x 256 x 8192 on two cores

Reduction = Literal["none", "mean", "sum"]


class CrossEntropySpec(NamedTuple):
    """What is fixed while tracing."""

    ignore_index: int
    label_smoothing: float
    vocab_first: bool
    reduction: Reduction
    ways: int = 1


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    vocab_first: bool = True,
    reduction: Reduction = "none",
    ways: int = 1,
) -> jax.Array:
    """-log softmax(hidden weight^T)[label], in float32 or wider: [t, m], [v, m], [t] -> [t], or [] when reduced.

    vocab_first=False takes the weight as [m, v]. Tokens labelled ignore_index give 0 and no gradient; "mean" divides by
    the number of the others, and is 0 when there is none. label_smoothing e puts (1 - e) on the label and e / v on
    every class. A label outside [0, v) that is not ignore_index gives NaN for its token.

    The tokens are walked in chunks of about CHUNK_BYTES of logits, taken with a stride, so that tokens split over a
    mesh axis stay where they are; ways is the number of equal parts they are split in there. Each part then adds up
    its own gradient of the weight, and the parts are summed once, not in every chunk. "mean" and "sum" compute the
    gradient in the forward pass, chunk by chunk, since their cotangent is one number; "none" keeps the logsumexp and
    makes the logits again in the backward pass, which costs one more product. Reverse mode of any order; for forward
    mode use linear_cross_entropy_plain.

    Raises ShapeError for dims that do not fit, DTypeError for labels that are no integers, ConfigError for a smoothing
    outside [0, 1] or an unknown reduction.

    >>> loss = linear_cross_entropy(jnp.zeros((2, 3)), jnp.zeros((4, 3)), jnp.array([1, -100]))
    >>> [round(float(x), 4) for x in loss]  # log 4 for a uniform guess, 0 for the ignored
    [1.3863, 0.0]
    """
    _check(hidden, weight, labels, label_smoothing, vocab_first, reduction)
    whole = ways if hidden.shape[0] % ways == 0 else 1
    spec = CrossEntropySpec(int(ignore_index), float(label_smoothing), vocab_first, reduction, whole)
    return _loss(spec, hidden, weight, labels)


def linear_cross_entropy_plain(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    vocab_first: bool = True,
    reduction: Reduction = "none",
) -> jax.Array:
    """The plain twin of linear_cross_entropy: all logits at once, derivatives by JAX, forward mode included."""
    _check(hidden, weight, labels, label_smoothing, vocab_first, reduction)
    acc = _wide(hidden)
    w = weight.T if vocab_first else weight
    log_probs = jax.nn.log_softmax(jnp.matmul(hidden, w, preferred_element_type=acc), axis=-1)
    valid, vocab = labels != ignore_index, w.shape[1]
    picked = jnp.take_along_axis(log_probs, jnp.where(valid, labels, 0)[:, None], axis=-1)[:, 0]
    picked = jnp.where((labels >= 0) & (labels < vocab), picked, jnp.nan)
    losses = jnp.where(valid, -(1 - label_smoothing) * picked - label_smoothing * log_probs.mean(-1), 0)
    return losses if reduction == "none" else losses.sum() * _share(reduction, valid, acc)


def _wide(hidden) -> jnp.dtype:
    return jnp.promote_types(hidden.dtype, jnp.float32)


def _share(reduction: Reduction, valid, dtype) -> jax.Array:
    # The weight of one token's loss in the reduced one.
    count = jnp.maximum(valid.sum(dtype=jnp.int32), 1).astype(dtype)
    return 1 / count if reduction == "mean" else jnp.ones((), dtype)


class _Head:
    """The products with the weight, in either layout."""

    def __init__(self, spec: CrossEntropySpec, weight, acc):
        self.vocab_first, self.weight, self.acc, self.ways = spec.vocab_first, weight, acc, spec.ways
        self.vocab, self.size = weight.shape if spec.vocab_first else weight.shape[::-1]

    def logits(self, h) -> jax.Array:
        w = self.weight.T if self.vocab_first else self.weight
        return jnp.matmul(h, w, preferred_element_type=self.acc)

    def hidden_grad(self, dlogits) -> jax.Array:
        w = self.weight if self.vocab_first else self.weight.T
        return jnp.matmul(dlogits.astype(self.weight.dtype), w, preferred_element_type=self.acc)

    def weight_grad(self, h, dlogits) -> jax.Array:
        """[m, v] whatever the layout: this order of the product is 1.5 times as fast as the other on CPU.

        [ways, m, v] with more than one way: one for each part of the tokens, not added up.
        """
        dlogits = dlogits.astype(h.dtype)
        if self.ways > 1:
            h, dlogits = (x.reshape(self.ways, -1, x.shape[-1]) for x in (h, dlogits))
        return rows_product(h, dlogits, self.acc)

    def no_weight_grad(self) -> jax.Array:
        """Zeros to add weight_grad to."""
        return jnp.zeros((self.size, self.vocab) if self.ways == 1 else (self.ways, self.size, self.vocab), self.acc)

    def finish(self, dweight) -> jax.Array:
        """[m, v] or [ways, m, v] -> the weight's own layout and dtype.

        Summed over the parts last: a compiler may then add a tied table's other gradient before it sums over devices.
        """
        dweight = dweight.swapaxes(-1, -2) if self.vocab_first else dweight
        return (dweight if self.ways == 1 else dweight.sum(0)).astype(self.weight.dtype)


def _chunk_count(tokens: int, vocab: int) -> int:
    # The least divisor of one part's tokens that keeps a chunk's float32 logits in CHUNK_BYTES, a chunk at 64 tokens.
    fits = (n for n in range(1, tokens // 64 + 1) if tokens % n == 0 and tokens // n * vocab * 4 <= CHUNK_BYTES)
    return next(fits, max((n for n in range(1, tokens // 64 + 1) if tokens % n == 0), default=1))


def _walk(body, carry, xs: tuple, chunks: int):
    """body(carry, chunk of xs) -> (carry, y); -> (carry, y put together in the tokens' order).

    Chunk i holds tokens i, i + chunks, ...: the major dim stays whole, so a split over a mesh axis survives. A loop
    even for two chunks: unrolled, XLA keeps all chunks alive at once, and took 1.2 times as long.
    """
    if chunks == 1:
        return body(carry, xs)
    moved = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0] // chunks, chunks, *x.shape[1:]), 1, 0), xs)
    carry, ys = lax.scan(body, carry, moved)
    return carry, jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1).reshape(-1, *y.shape[2:]), ys)


def _hits(logits, labels) -> jax.Array:
    return lax.broadcasted_iota(labels.dtype, logits.shape, 1) == labels[:, None]


def _losses(spec: CrossEntropySpec, logits, labels):
    """-> losses [c], logsumexp [c]."""
    top = lax.stop_gradient(logits.max(-1, keepdims=True))
    lse = (top + jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True)))[:, 0]
    # A masked sum, not a gather: with the vocabulary split over a mesh axis it needs one small all-reduce only.
    picked = jnp.where(_hits(logits, labels), logits, 0).sum(-1)
    picked = jnp.where((labels >= 0) & (labels < logits.shape[1]), picked, jnp.nan)
    smooth = spec.label_smoothing
    target = picked if smooth == 0 else (1 - smooth) * picked + smooth * logits.mean(-1)
    return jnp.where(labels != spec.ignore_index, lse - target, 0), lse


def _logits_grad(spec: CrossEntropySpec, logits, lse, labels, cotangent) -> jax.Array:
    smooth = spec.label_smoothing
    target = jnp.where(_hits(logits, labels), 1 - smooth, 0).astype(logits.dtype) + smooth / logits.shape[1]
    weight = jnp.where(labels != spec.ignore_index, cotangent, 0)
    return (jnp.exp(logits - lse[:, None]) - target) * weight[:, None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(spec: CrossEntropySpec, hidden, weight, labels):
    losses = _forward(spec, hidden, weight, labels)[0]
    if spec.reduction == "none":
        return losses
    return losses.sum() * _share(spec.reduction, labels != spec.ignore_index, losses.dtype)


def _forward(spec: CrossEntropySpec, hidden, weight, labels):
    """-> losses [t], logsumexp [t]."""
    head = _Head(spec, weight, _wide(hidden))

    def body(carry, chunk):
        h, y = chunk
        return carry, _losses(spec, head.logits(h), y)

    return _walk(body, (), (hidden, labels), _chunk_count(hidden.shape[0] // spec.ways, head.vocab))[1]


def _loss_fwd(spec: CrossEntropySpec, hidden, weight, labels):
    if spec.reduction == "none":
        losses, lse = _forward(spec, hidden, weight, labels)
        return losses, (hidden, weight, labels, lse)
    head = _Head(spec, weight, _wide(hidden))
    share = _share(spec.reduction, labels != spec.ignore_index, head.acc)
    one = jnp.ones((), head.acc)

    def body(dweight, chunk):
        h, y = chunk
        logits = head.logits(h)
        losses, lse = _losses(spec, logits, y)
        # of the sum: a class's part of the mean's is below what float16 holds, and the loss is scaled up only later
        dlogits = _logits_grad(spec, logits, lse, y, one)
        return dweight + head.weight_grad(h, dlogits), (losses, head.hidden_grad(dlogits).astype(h.dtype))

    chunks = _chunk_count(hidden.shape[0] // spec.ways, head.vocab)
    dweight, (losses, dhidden) = _walk(body, head.no_weight_grad(), (hidden, labels), chunks)
    return losses.sum() * share, (dhidden, dweight, share, jnp.zeros((0, 0), weight.dtype))


def _loss_bwd(spec: CrossEntropySpec, residuals, cotangent):
    if spec.reduction != "none":
        dhidden, dweight, share, like = residuals
        scale = cotangent.astype(dweight.dtype) * share
        dweight = _Head(spec, like, dweight.dtype).finish(dweight * scale)
        return (dhidden * scale).astype(dhidden.dtype), dweight, None
    hidden, weight, labels, lse = residuals
    head = _Head(spec, weight, _wide(hidden))

    def body(dweight, chunk):
        h, y, z, ct = chunk
        dlogits = _logits_grad(spec, head.logits(h), z, y, ct)
        return dweight + head.weight_grad(h, dlogits), head.hidden_grad(dlogits).astype(h.dtype)

    xs = (hidden, labels, lse, cotangent)
    chunks = _chunk_count(hidden.shape[0] // spec.ways, head.vocab)
    dweight, dhidden = _walk(body, head.no_weight_grad(), xs, chunks)
    return dhidden, head.finish(dweight), None


_loss.defvjp(_loss_fwd, _loss_bwd)


def _check(hidden, weight, labels, label_smoothing, vocab_first, reduction) -> None:
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    layout = "[vocab, hidden]" if vocab_first else "[hidden, vocab]"
    fits = hidden.ndim == 2 and weight.ndim == 2 and labels.shape == hidden.shape[:1]
    if not fits or weight.shape[1 if vocab_first else 0] != hidden.shape[1]:
        raise ShapeError(
            f"linear_cross_entropy: {shapes} do not fit; needs [tokens, hidden], {layout} and [tokens] "
            f"(vocab_first={vocab_first})"
        )
    if not jnp.issubdtype(labels.dtype, jnp.signedinteger):
        raise DTypeError(f"linear_cross_entropy: labels have dtype {labels.dtype}; they must be signed integers")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"linear_cross_entropy: label_smoothing is {label_smoothing}; it must lie in [0, 1]")
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"linear_cross_entropy: reduction is {reduction!r}; use 'none', 'mean' or 'sum'")
