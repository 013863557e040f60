"""Softmax cross-entropy of an affine map, without the logits ever being whole in memory.

Shape legend: t tokens, m hidden size, v vocabulary; a chunk holds c tokens.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels import select
from polyreme.kernels.attention_blocked import soft_cap_grad, soft_capped
from polyreme.kernels.custom_vjp import custom_vjp
from polyreme.kernels.linear import rows_product

CHUNK_BYTES = 8 << 20  # of one chunk's logits: measured best of 8, 16 and 32 MiB at 2048 x 256 x 8192 on two cores
GPU_CHUNK_BYTES = 256 << 20
"""The same on a GPU: a chunk's products must fill all its multiprocessors, and every chunk reads and writes the
weight's gradient, in float32, once more. 0.3% of the memory of a GPU of 80 GB."""

Reduction = Literal["none", "mean", "sum"]


class CrossEntropySpec(NamedTuple):
    """Static parameters of a trace."""

    ignore_index: int
    label_smoothing: float
    vocab_first: bool
    is_summed: bool
    chunks: int
    ways: int
    softcap: float


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    token_weight: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    vocab_first: bool = True,
    reduction: Reduction = "none",
    ways: int = 1,
    softcap: float = 0.0,
) -> jax.Array:
    """-log softmax(hidden weight^T + bias)[label], in float32 or wider: [t, m], [v, m], [t], [v] -> [t], reduced [].

    vocab_first=False takes the weight as [m, v]. Tokens labelled ignore_index give 0 and no gradient; "mean" divides by
    the number of the others, and is 0 when there is none; token_weight [t] multiplies each loss, and "mean" divides by
    the sum of it. label_smoothing e puts (1 - e) on the label and e / v on every class. softcap: above 0, a logit x is
    softcap * tanh(x / softcap). A label outside [0, v) that is not ignore_index gives NaN for its token.

    The tokens are walked in chunks of about CHUNK_BYTES of logits, taken with a stride, so that tokens split over a
    mesh axis stay where they are; ignored ones are added to a number that does not divide. ways is the number of equal
    parts they are split in there. Each part then adds up its own gradient of weight and bias, and the parts are summed
    once, not in every chunk. "mean" and "sum" compute the gradient in the forward pass, chunk by chunk, since their
    cotangent is one number; "none" keeps the logsumexp and makes the logits again in the backward pass, which costs one
    more product. Reverse mode of any order; for forward mode use linear_cross_entropy_plain.

    Raises ShapeError for dims that do not fit, DTypeError for labels that are no integers, ConfigError for a smoothing
    outside [0, 1] or an unknown reduction.

    >>> loss = linear_cross_entropy(jnp.zeros((2, 3)), jnp.zeros((4, 3)), jnp.array([1, -100]))
    >>> [round(float(x), 4) for x in loss]  # log 4 for a uniform guess, 0 for the ignored
    [1.3863, 0.0]
    """
    _check(hidden, weight, labels, bias, token_weight, label_smoothing, vocab_first, reduction)
    parts = ways if hidden.shape[0] % ways == 0 else 1
    tokens, vocab = hidden.shape[0] // parts, weight.shape[0 if vocab_first else 1]
    chunks = chunk_count(tokens, vocab)
    spec = CrossEntropySpec(
        int(ignore_index), float(label_smoothing), vocab_first, reduction != "none", chunks, parts, softcap
    )
    more = -tokens % chunks if chunks > 1 else 0
    live = labels != ignore_index
    hidden, labels = _widened(hidden, parts, more), _widened(labels, parts, more, ignore_index)
    by = None if token_weight is None else token_weight.astype(_wide(hidden))
    if reduction == "none":
        losses = _loss(spec, hidden, weight, labels, bias, None)
        losses = losses.reshape(parts, -1)[:, :tokens].reshape(-1) if more else losses
        return losses if by is None else losses * by
    # the kernel takes the gradient of a sum of losses times 1 at most: a class's part of the mean's, or of one times a
    # small weight, is below what float16 holds, and the loss is scaled up only later
    top = 1 if by is None else lax.stop_gradient(jnp.abs(by).max(initial=jnp.finfo(by.dtype).tiny))
    share = None if by is None else _widened(by / top, parts, more)
    loss = _loss(spec, hidden, weight, labels, bias, share) * top
    return loss if reduction == "sum" else _mean(loss, live, by)


def linear_cross_entropy_plain(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    token_weight: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    vocab_first: bool = True,
    reduction: Reduction = "none",
    softcap: float = 0.0,
) -> jax.Array:
    """The plain twin of linear_cross_entropy: all logits at once, derivatives by JAX, forward mode included."""
    _check(hidden, weight, labels, bias, token_weight, label_smoothing, vocab_first, reduction)
    acc = _wide(hidden)
    w = weight.T if vocab_first else weight
    logits = jnp.matmul(hidden, w, preferred_element_type=acc)
    logits = logits if bias is None else logits + bias.astype(acc)
    log_probs = jax.nn.log_softmax(soft_capped(logits, softcap), axis=-1)
    valid, vocab = labels != ignore_index, w.shape[1]
    picked = jnp.take_along_axis(log_probs, jnp.where(valid, labels, 0)[:, None], axis=-1)[:, 0]
    picked = jnp.where((labels >= 0) & (labels < vocab), picked, jnp.nan)
    losses = jnp.where(valid, -(1 - label_smoothing) * picked - label_smoothing * log_probs.mean(-1), 0)
    losses = losses if token_weight is None else losses * token_weight.astype(acc)
    return {"none": lambda: losses, "sum": losses.sum, "mean": lambda: _mean(losses.sum(), valid, token_weight)}[
        reduction
    ]()


def _wide(hidden) -> jnp.dtype:
    return jnp.promote_types(hidden.dtype, jnp.float32)


def _mean(total, live, token_weight) -> jax.Array:
    """The mean over live tokens of which this is the sum."""
    count = live.sum(dtype=jnp.int32) if token_weight is None else jnp.where(live, token_weight, 0).sum()
    return total / jnp.where(count == 0, 1, count).astype(total.dtype)


class _Gradients(NamedTuple):
    """Gradients of weight and bias: [m, v] and [v], with more than one way [ways, m, v] and [ways, v]."""

    weight: jax.Array
    bias: jax.Array | None


class _Head:
    """The map from hidden values to logits, the weight in either layout, and its gradients."""

    def __init__(self, spec: CrossEntropySpec, weight, bias, acc):
        self.vocab_first, self.weight, self.bias, self.acc, self.ways = spec.vocab_first, weight, bias, acc, spec.ways
        self.softcap = spec.softcap
        self.vocab, self.size = weight.shape if spec.vocab_first else weight.shape[::-1]

    def logits(self, h) -> jax.Array:
        w = self.weight.T if self.vocab_first else self.weight
        logits = jnp.matmul(h, w, preferred_element_type=self.acc)
        logits = logits if self.bias is None else logits + self.bias.astype(self.acc)
        logits = soft_capped(logits, self.softcap)
        # made once: without the barrier XLA on CPU makes them again for loops that read them (1.3 to 1.5 times the time
        # of 2048 tokens at hidden sizes of 128 and 256), and keeps the product beside its sum with the bias
        return lax.optimization_barrier(logits) if select.backend() == "cpu" else logits

    def hidden_grad(self, dlogits) -> jax.Array:
        w = self.weight if self.vocab_first else self.weight.T
        return jnp.matmul(dlogits.astype(self.weight.dtype), w, preferred_element_type=self.acc)

    def add_grads(self, grads: _Gradients, h, dlogits) -> _Gradients:
        """grads and those of a chunk: of each part of the tokens by itself, not added up.

        The weight's is [m, v] whatever the layout: this order of the product is 1.5 times as fast as the other on CPU.
        """
        low = dlogits.astype(h.dtype)
        if self.ways > 1:
            h, low, dlogits = (x.reshape(self.ways, -1, x.shape[-1]) for x in (h, low, dlogits))
        dbias = None if grads.bias is None else grads.bias + dlogits.sum(-2)
        return _Gradients(grads.weight + rows_product(h, low, self.acc), dbias)

    def no_grads(self) -> _Gradients:
        """Zeros to add to."""
        parts = () if self.ways == 1 else (self.ways,)
        dbias = None if self.bias is None else jnp.zeros((*parts, self.vocab), self.acc)
        return _Gradients(jnp.zeros((*parts, self.size, self.vocab), self.acc), dbias)

    def finish(self, grads: _Gradients) -> _Gradients:
        """The sums over parts, in the layout and dtype of weight and bias.

        Summed over the parts last: a compiler may then add a tied table's other gradient before it sums over devices.
        """
        if self.vocab_first:
            grads = grads._replace(weight=grads.weight.swapaxes(-1, -2))
        if self.ways > 1:
            grads = jax.tree.map(lambda g: g.sum(0), grads)
        return jax.tree.map(lambda g, x: g.astype(x.dtype), grads, _Gradients(self.weight, self.bias))


def chunk_count(tokens: int, vocab: int) -> int:
    """The chunks that one part's tokens are walked in.

    So many that the float32 logits of one fit in CHUNK_BYTES, on a GPU in GPU_CHUNK_BYTES, but 64 tokens in each; up to
    twice as many where those divide the tokens. One for a number that is open, as in an exported program.
    """
    if not isinstance(tokens, int):
        return 1
    most = max(1, tokens // 64)
    size = GPU_CHUNK_BYTES if select.backend() == "gpu" else CHUNK_BYTES
    least = min(max(1, -(-tokens * vocab * 4 // size)), most)
    return next((n for n in range(least, min(2 * least, most) + 1) if tokens % n == 0), least)


def _widened(x, parts: int, more: int, value=0) -> jax.Array:
    """x [t, ...] with so many more entries at the end of each of its equal parts."""
    if not more:
        return x
    apart = x.reshape(parts, -1, *x.shape[1:])
    edges = [(0, 0, 0), (0, more, 0), *[(0, 0, 0)] * (x.ndim - 1)]
    return lax.pad(apart, jnp.asarray(value, x.dtype), edges).reshape(-1, *x.shape[1:])


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
    """(losses [c], logsumexp [c])."""
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
    one, none = jnp.asarray(1 - smooth, logits.dtype), jnp.zeros((), logits.dtype)
    target = jnp.where(_hits(logits, labels), one, none) + smooth / logits.shape[1]
    weight = jnp.where(labels != spec.ignore_index, cotangent, 0)
    # of a label out of range nothing is picked, and only the smoothed part of the NaN has a gradient
    is_class = (labels >= 0) & (labels < logits.shape[1])
    lse = jnp.where(is_class, lse, lse - math.log(smooth) if smooth else jnp.inf)
    return soft_cap_grad((jnp.exp(logits - lse[:, None]) - target) * weight[:, None], logits, spec.softcap)


@custom_vjp(0)
def _loss(spec: CrossEntropySpec, hidden, weight, labels, bias, by) -> jax.Array:
    """The losses [t], or their sum, each times `by` where that is given."""
    losses = _forward(spec, hidden, weight, labels, bias)[0]
    return _sum(losses, by) if spec.is_summed else losses


def _sum(losses, by) -> jax.Array:
    return (losses if by is None else losses * by).sum()


def _forward(spec: CrossEntropySpec, hidden, weight, labels, bias):
    """(losses [t], logsumexp [t])."""
    head = _Head(spec, weight, bias, _wide(hidden))

    def body(carry, chunk):
        h, y = chunk
        return carry, _losses(spec, head.logits(h), y)

    return _walk(body, (), (hidden, labels), spec.chunks)[1]


def _loss_fwd(spec: CrossEntropySpec, hidden, weight, labels, bias, by):
    if not spec.is_summed:
        losses, lse = _forward(spec, hidden, weight, labels, bias)
        return losses, (hidden, weight, labels, bias, lse)
    head = _Head(spec, weight, bias, _wide(hidden))
    one = jnp.ones((), head.acc)

    def body(grads, chunk):
        h, y, factor = chunk
        logits = head.logits(h)
        losses, lse = _losses(spec, logits, y)
        dlogits = _logits_grad(spec, logits, lse, y, one if factor is None else factor)
        return head.add_grads(grads, h, dlogits), (losses, head.hidden_grad(dlogits).astype(h.dtype))

    grads, (losses, dhidden) = _walk(body, head.no_grads(), (hidden, labels, by), spec.chunks)
    like = jax.tree.map(lambda x: jnp.zeros((0,) * x.ndim, x.dtype), _Gradients(weight, bias))
    return _sum(losses, by), (dhidden, grads, *like, None if by is None else losses)


def _loss_bwd(spec: CrossEntropySpec, residuals, cotangent):
    if spec.is_summed:
        dhidden, grads, weight, bias, losses = residuals
        scale = cotangent.astype(grads.weight.dtype)
        dweight, dbias = _Head(spec, weight, bias, scale.dtype).finish(jax.tree.map(lambda g: g * scale, grads))
        dby = None if losses is None else losses * scale
        return (dhidden * scale).astype(dhidden.dtype), dweight, None, dbias, dby
    hidden, weight, labels, bias, lse = residuals
    head = _Head(spec, weight, bias, _wide(hidden))

    def body(grads, chunk):
        h, y, z, ct = chunk
        dlogits = _logits_grad(spec, head.logits(h), z, y, ct)
        return head.add_grads(grads, h, dlogits), head.hidden_grad(dlogits).astype(h.dtype)

    grads, dhidden = _walk(body, head.no_grads(), (hidden, labels, lse, cotangent), spec.chunks)
    dweight, dbias = head.finish(grads)
    return dhidden, dweight, None, dbias, None


_loss.defvjp(_loss_fwd, _loss_bwd)


def _check(hidden, weight, labels, bias, token_weight, label_smoothing, vocab_first, reduction) -> None:
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    layout = "[vocab, hidden]" if vocab_first else "[hidden, vocab]"
    fits = hidden.ndim == 2 and weight.ndim == 2 and labels.shape == hidden.shape[:1]
    if not fits or weight.shape[1 if vocab_first else 0] != hidden.shape[1]:
        raise ShapeError(
            f"linear_cross_entropy: {shapes} do not fit; needs [tokens, hidden], {layout} and [tokens] "
            f"(vocab_first={vocab_first})"
        )
    vocab = weight.shape[0 if vocab_first else 1]
    if bias is not None and bias.shape != (vocab,):
        raise ShapeError(f"linear_cross_entropy: bias {list(bias.shape)} must be [{vocab}], one a class")
    if token_weight is not None and token_weight.shape != labels.shape:
        raise ShapeError(f"linear_cross_entropy: token_weight {list(token_weight.shape)} does not fit {shapes}")
    if not jnp.issubdtype(labels.dtype, jnp.signedinteger):
        raise DTypeError(f"linear_cross_entropy: labels have dtype {labels.dtype}; they must be signed integers")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"linear_cross_entropy: label_smoothing is {label_smoothing}; it must lie in [0, 1]")
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"linear_cross_entropy: reduction is {reduction!r}; use 'none', 'mean' or 'sum'")
