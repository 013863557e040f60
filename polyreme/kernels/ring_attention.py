"""Attention over a sequence that is split over devices: keys and values go round or are gathered, or heads are split.

ring_attention (source: arXiv:2310.01889): each device keeps its queries; the keys and values travel from device to
device, and what each block of them adds is merged by its logsumexp. The backward pass sends them round once more, with
their gradients. Memory a device: (sequence / ways)^2 scores at most, in blocks.

gather_attention (source: arXiv:2407.21783, section 3.3.2): each device keeps its queries and gets all keys and values
at once; their gradients are scattered. It computes block by block as the ring does, in the same order.

ulysses_attention (source: arXiv:2309.14509): an all-to-all turns a split of the sequence into a split of the heads,
each device attends with its heads over the whole sequence, an all-to-all turns the result back.

The plain twin of all is attention_plain, or under a mask of columns column_attention_plain. Shape legend: b batch,
h query heads, n key heads, s query length, t key length, d head dim; _l marks a device's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from polyreme.errors import ConfigError, ShapeError
from polyreme.kernels import attention_blocked, select
from polyreme.kernels.attention import attention, check
from polyreme.kernels.attention_blocked import AttentionSpec
from polyreme.kernels.column_attention import attend, column_attention, pull, shown_logsumexp
from polyreme.kernels.columns import BLOCK, Columns, part_of
from polyreme.kernels.custom_vjp import custom_vjp
from polyreme.kernels.zigzag import check_zigzag, into_zigzag
from polyreme.mesh.axes import nearest_multiples

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """The layout of attention's arrays over a mesh: the axes that split batch, sequence and heads, outermost first.

    zigzag: the sequence, of queries and of keys, lies in zigzag order (masks in its own). inner: the last axes of seq
    if their devices are to deal heads out among them, and keys go round the others (usp_attention).
    """

    mesh: Mesh
    batch: Axes
    seq: Axes
    heads: Axes
    zigzag: bool = False
    inner: Axes = ()

    def ways(self, axes: Axes) -> int:
        """Number of parts along these axes."""
        return math.prod(self.mesh.shape[a] for a in axes)

    @property
    def spec(self) -> PartitionSpec:
        """Layout of [b, s, h, d]."""
        return PartitionSpec(self.batch + self.idle or None, self.seq or None, self.heads or None, None)

    @property
    def idle(self) -> Axes:
        """Axes of one device. Named in a spec they keep a backward pass from summing over them, which does nothing."""
        return tuple(a for a, n in self.mesh.shape.items() if n == 1 and a not in self.batch + self.seq + self.heads)

    def logsumexp_spec(self, heads: Axes, queries: Axes) -> PartitionSpec:
        """Layout of a logsumexp [b, h, s]."""
        return PartitionSpec(self.batch + self.idle or None, heads or None, queries or None)

    def columns_spec(self, columns: Columns, heads: Axes) -> Columns:
        """Layout of a mask of columns: whole in queries and keys; a dim of size 1 is whole everywhere."""
        return jax.tree.map(lambda x: self.mask_spec(x, heads, ()), columns)

    def mask_spec(self, mask: jax.Array, heads: Axes, queries: Axes) -> PartitionSpec:
        """Layout of a mask [b, h, s, t]; a dim of size 1 is whole everywhere."""
        axes = (self.batch, heads, queries, ())
        return PartitionSpec(*(a or None if size > 1 else None for a, size in zip(axes, mask.shape, strict=True)))

    def shared_axes(self, mask: jax.Array) -> Axes:
        """The axes whose devices hold the same part of a mask and use it each for its own part of the scores."""
        dims = zip((self.batch, self.heads, self.seq), mask.shape, strict=False)
        return tuple(axis for axes, size in dims if size == 1 for axis in axes)


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    split: Split,
    causal: bool,
    scale: float | None = None,
    mask: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    softcap: float = 0.0,
) -> jax.Array:
    """kernels.attention of q [b, s, h, d], k and v [b, t, n, d] split by `split` -> [b, s, h, d], split as q.

    mask: broadcasts to [b, h, s, t]; each device holds its queries' rows of it, whole in t. With causal, a device does
    nothing for keys that come after its queries, so the last device of the ring works longest, unless the sequence lies
    in zigzag order. Dropout's numbers are those of one device. Each step sends b_l * t_l * n_l * d numbers of k and of
    v: ways - 1 steps forward, and as many backward beside as many of float32 dk and dv. Each goes while a block is
    computed, and hides where that takes longer: with c FLOP for a byte on its way, from parts of about c positions on
    (2 c under a causal mask), with fewer heads of keys sooner.

    Raises ShapeError for a length that the ring does not divide, and for causal with s != t; else as attention does.
    """
    options = {"split": split, "causal": causal, "scale": scale, "mask": mask, "softcap": softcap}
    return _attention(_Ring, q, k, v, **options, dropout_key=dropout_key, dropout_rate=dropout_rate)


def gather_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    split: Split,
    causal: bool,
    scale: float | None = None,
    mask: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    softcap: float = 0.0,
) -> jax.Array:
    """ring_attention with all keys and values on each device at once: what it gives, skips and raises is the same.

    Each device holds all of k and v, and in the backward pass their gradients in float32; it sends (ways - 1) b_l * t_l
    * n_l * d numbers of k and of v, once forward and again backward beside as many of float32 dk and dv.
    """
    options = {"split": split, "causal": causal, "scale": scale, "mask": mask, "softcap": softcap}
    return _attention(_GatheredKeys, q, k, v, **options, dropout_key=dropout_key, dropout_rate=dropout_rate)


def _attention(walk: type[_Ring], q, k, v, *, split: Split, causal, scale, mask, softcap, dropout_key, dropout_rate):
    _check_walk(walk, q, k, v, mask, split, dropout_key, dropout_rate)
    if causal and q.shape[1] != k.shape[1]:
        raise ShapeError(
            f"{walk.name}: causal with {q.shape[1]} queries and {k.shape[1]} keys; they must be equally many, or "
            "give a mask"
        )
    spec = AttentionSpec(causal, float(q.shape[-1] ** -0.5) if scale is None else scale, dropout_rate, softcap)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        if split.zigzag and mask.shape[2] > 1:
            mask = into_zigzag(mask, split.ways(split.seq), 2)
    return _walked(walk, spec, split, q, k, v, mask, _raw_key(dropout_key, dropout_rate))[0]


def ring_column_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    columns: Columns,
    *,
    split: Split,
    scale: float | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """kernels.column_attention round the ring -> out split as q, logsumexp [b, h, s] split alike.

    Each device holds the whole of columns, which is O(t), for its batch entries and heads. Raises as ring_attention
    does, and ShapeError for blocks of columns that the parts of the sequence cut through.
    """
    options = {"split": split, "scale": scale, "dropout_key": dropout_key, "dropout_rate": dropout_rate}
    options["softcap"] = softcap
    return _column_attention(_Ring, q, k, v, columns, **options)


def gather_column_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    columns: Columns,
    *,
    split: Split,
    scale: float | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """ring_column_attention with all keys and values on each device at once, as gather_attention has them."""
    options = {"split": split, "scale": scale, "dropout_key": dropout_key, "dropout_rate": dropout_rate}
    options["softcap"] = softcap
    return _column_attention(_GatheredKeys, q, k, v, columns, **options)


def _column_attention(
    walk: type[_Ring], q, k, v, columns: Columns, *, split: Split, scale, softcap, dropout_key, dropout_rate
):
    _check_walk(walk, q, k, v, None, split, dropout_key, dropout_rate)
    ways = split.ways(split.seq)
    parts = 2 * ways if split.zigzag else ways
    if columns.blocks is not None and (q.shape[1] % (BLOCK * parts) or k.shape[1] % (BLOCK * parts)):
        raise ShapeError(
            f"{walk.name}: a block mask for {q.shape[1]} queries and {k.shape[1]} keys over {ways} devices; make "
            f"them multiples of {BLOCK * parts}, or split heads instead (sep_attention 'ulysses')"
        )
    spec = AttentionSpec(False, float(q.shape[-1] ** -0.5) if scale is None else scale, dropout_rate, softcap)
    out, lse = _walked(walk, spec, split, q, k, v, columns, _raw_key(dropout_key, dropout_rate))
    return out, shown_logsumexp(lse)


def _check_walk(walk: type[_Ring], q, k, v, mask, split: Split, dropout_key, dropout_rate) -> None:
    check_split(q, k, split)
    check(q, k, v, mask, dropout_key, dropout_rate)
    if not select.attention_allows("efficient"):
        raise ConfigError(f"{walk.name}: it is of the kind EFFICIENT_ATTENTION, which is not allowed here; allow it")


def _raw_key(dropout_key, dropout_rate: float):
    draw = attention_blocked.draw_of(dropout_key)
    return None if draw is None or dropout_rate == 0 else draw.key


def ulysses_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    split: Split,
    causal: bool,
    scale: float | None = None,
    mask: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    softcap: float = 0.0,
) -> jax.Array:
    """kernels.attention of q [b, s, h, d], k and v [b, t, n, d] split by `split` -> [b, s, h, d], split as q.

    mask: broadcasts to [b, h, s, t]; whole in s and t on each device. Each device sends (1 - 1 / ways) of its parts of
    q, k, v and of the result, and of their gradients backward.

    Raises ShapeError for a length that the split does not divide, ConfigError for heads that it does not.
    """
    check(q, k, v, mask, dropout_key, dropout_rate)
    rest, specs = {}, {}
    if mask is not None:
        rest["mask"] = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        specs["mask"] = split.mask_spec(rest["mask"], split.heads + split.seq, ())
    kernel = partial(attention, causal=causal, scale=scale, softcap=softcap)

    def one(*args: Any, **options: Any) -> tuple[jax.Array]:
        return (kernel(*args, **options),)

    return _by_heads(one, split, (q, k, v), rest, specs, _raw_key(dropout_key, dropout_rate), dropout_rate)[0]


def ulysses_column_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    columns: Columns,
    *,
    split: Split,
    scale: float | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """kernels.column_attention -> out split as q, logsumexp [b, h, s] split by heads.

    split.seq may be empty: each device then attends with its batch entries and heads, and nothing is sent. Raises as
    ulysses_attention does.
    """
    check(q, k, v, None, dropout_key, dropout_rate)
    rest, specs = {"columns": columns}, {"columns": split.columns_spec(columns, split.heads + split.seq)}
    kernel = partial(column_attention, scale=scale, softcap=softcap)
    return _by_heads(kernel, split, (q, k, v), rest, specs, _raw_key(dropout_key, dropout_rate), dropout_rate)


def _by_heads(
    kernel: Callable, split: Split, qkv: tuple, rest: dict, specs: dict, key: Any, dropout_rate: float
) -> tuple:
    """kernel(q, k, v, **rest), with all of the sequence for some of the heads -> out, and what else it gives [b, h, s].

    rest: arrays by the kernel's names for them; specs: how they lie.
    """
    q, k, _ = qkv
    check_split(q, k, split)
    ways = split.ways(split.seq) * split.ways(split.heads)
    if q.shape[2] % ways or k.shape[2] % ways:
        raise ConfigError(
            f"ulysses_attention: {q.shape[2]} query heads and {k.shape[2]} key heads over {ways} devices "
            f"({'+'.join(split.heads + split.seq)}); make them multiples of {ways}, or use the ring"
        )

    def local(q: jax.Array, k: jax.Array, v: jax.Array, rest: dict, key: Any) -> tuple:
        if split.seq:
            gather = partial(lax.all_to_all, axis_name=split.seq, split_axis=2, concat_axis=1, tiled=True)
            q, k, v = gather(q), gather(k), gather(v)
        if key is not None:
            origin = _origin(split, q, split.heads + split.seq)
            rest = rest | {"dropout_key": key, "dropout_rate": dropout_rate, "origin": origin}
        out, *others = kernel(q, k, v, **rest)
        if split.seq:
            out = lax.all_to_all(out, split.seq, split_axis=1, concat_axis=2, tiled=True)
        return out, *others

    ins = [split.spec] * 3 + [specs, None if key is None else PartitionSpec()]
    outs = (split.spec, *[split.logsumexp_spec(split.heads + split.seq, ())] * ("columns" in rest))
    return over_devices(split, local, ins, outs)(*qkv, rest, key)


def check_split(q: jax.Array, k: jax.Array, split: Split) -> None:
    """Raise ShapeError for queries or keys that the split's parts do not divide."""
    ways = split.ways(split.seq)
    for what, size in (("queries", q.shape[1]), ("keys", k.shape[1])):
        if size % ways:
            raise ShapeError(
                f"attention over a split sequence: {size} {what} do not divide into {ways} equal parts over mesh axis "
                f"{'+'.join(split.seq)}; make it {nearest_multiples(size, ways)}"
            )
        if split.zigzag:
            check_zigzag(size, ways)


def over_devices(split: Split, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """fn of each device's parts of arrays that lie as the specs say."""
    # check_vma off: the blocked kernel starts its loops from zeros that do not vary over devices
    return jax.shard_map(fn, mesh=split.mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)


def _device_index(axes: Axes) -> jax.Array:
    return lax.axis_index(axes).astype(jnp.uint32) if axes else jnp.uint32(0)


def _origin(split: Split, q: jax.Array, heads: Axes, row: Any = 0, col: Any = 0) -> jax.Array:
    """attention_blocked.Draw.origin of a device's q [b_l, s_l, h_l, d]."""
    total = q.shape[2] * split.ways(heads)
    places = (_device_index(split.batch) * q.shape[0], _device_index(heads) * q.shape[2], row, col, total)
    return jnp.stack([jnp.asarray(p).astype(jnp.uint32) for p in places])


# ---- the ring ----


@custom_vjp(0, 1, 2)
def _walked(walk: type[_Ring], spec: AttentionSpec, split: Split, q, k, v, mask, key) -> tuple[jax.Array, jax.Array]:
    """(out as q, logsumexp [b, n, g, s, 1], +inf for a query that sees no key). mask: an array, Columns or None."""
    return _walked_forward(walk, spec, split, q, k, v, mask, key)[0]


def _walked_forward(walk: type[_Ring], spec: AttentionSpec, split: Split, q, k, v, mask, key):
    specs = _specs(split, mask, key)

    def local(q, k, v, mask, key):
        return walk(spec, split, q, k, mask, key).forward(q, k, v)

    lse_spec = PartitionSpec(split.batch or None, split.heads or None, None, split.seq or None, None)
    out, lse = over_devices(split, local, specs, (split.spec, lse_spec))(q, k, v, mask, key)
    return (out, lse), (q, k, v, mask, key, out, lse)


def _walked_backward(walk: type[_Ring], spec: AttentionSpec, split: Split, residuals, cotangents):
    q, k, v, mask, key, out, lse = residuals
    dout, dlse = cotangents
    # else the compiler would keep each block of k and v that came by on the way forward: all of them, on each device
    k, v, dout = lax.optimization_barrier((k, v, dout))
    specs = _specs(split, mask, key)
    lse_spec = PartitionSpec(split.batch or None, split.heads or None, None, split.seq or None, None)

    def local(q, k, v, mask, key, out, lse, dout, dlse):
        dq, dk, dv, dmask = walk(spec, split, q, k, mask, key).backward(q, k, v, out, lse, dout, dlse)
        if dmask is not None:
            dmask = (lax.psum(dmask, shared) if shared else dmask).astype(mask.dtype)
        return dq, dk, dv, dmask

    has_grad = attention_blocked.has_gradient(mask)
    shared = split.shared_axes(mask) if has_grad else ()
    outs = (split.spec, split.spec, split.spec, specs[3] if has_grad else None)
    ins = (*specs, split.spec, lse_spec, split.spec, lse_spec)
    dq, dk, dv, dmask = over_devices(split, local, ins, outs)(q, k, v, mask, key, out, lse, dout, dlse)
    return dq, dk, dv, dmask, None


_walked.defvjp(_walked_forward, _walked_backward)


def _specs(split: Split, mask, key) -> tuple:
    if isinstance(mask, Columns):
        mask_spec = split.columns_spec(mask, split.heads)
    else:
        mask_spec = None if mask is None else split.mask_spec(mask, split.heads, split.seq)
    return (split.spec, split.spec, split.spec, mask_spec, None if key is None else PartitionSpec())


class _Pair(NamedTuple):
    """Queries and keys that are computed at once: which of a device's parts of them, the first or the second.

    causal: query i of the part sees its keys up to i.
    """

    row: Any
    key: Any
    causal: bool = False


class _Ring:
    """One device's part: q [b_l, s_l, h_l, d], k [b_l, t_l, n_l, d], mask with all of t.

    In zigzag order a device's queries and keys are two parts that lie apart in the sequence, else one.
    """

    name = "ring_attention"

    def __init__(self, spec: AttentionSpec, split: Split, q, k, mask, key, parts: int = 1):
        self.spec, self.split, self.mask, self.key = spec, split, mask, key
        self.ways = split.ways(split.seq)
        self.rank = lax.axis_index(split.seq)
        self.wide = jnp.promote_types(q.dtype, jnp.float32)
        self.parts = 2 if split.zigzag else parts
        self.q, self.rows, self.keys = q, q.shape[1] // self.parts, k.shape[1] // self.parts

    def forward(self, q, k, v):
        """Forward pass: (out as q, logsumexp [b, n, g, s_l, 1], +inf for a query that sees no key)."""
        q_wide, dtype = q.astype(self.wide), q.dtype
        (b, s, h, _), n = q.shape, k.shape[2]
        k, v = self._arrived((k, v))
        out = jnp.zeros((b, s, h, v.shape[-1]), self.wide)
        sums = out, jnp.full((b, n, h // n, s, 1), -jnp.inf, self.wide)
        settled = None
        for step in range(self.ways):
            if step:
                k, v = self._pass_on((k, v), after=settled)
                settled = sums[0]
            sums = self._over_pairs(step, partial(self._merged, step, (q_wide, k, v)), sums)
        out, lse = sums
        return out.astype(dtype), jnp.where(lse == -jnp.inf, jnp.inf, lse)

    def backward(self, q, k, v, out, lse, dout, dlse):
        """Backward pass: (dq, dk, dv as their inputs, the device's part of dmask, None where the mask has no
        gradient)."""
        q_wide, out, dout = (x.astype(self.wide) for x in (q, out, dout))
        dmask = jnp.zeros(self.mask.shape, self.wide) if attention_blocked.has_gradient(self.mask) else None
        dq, dk, dv, dmask = self._gradients((q_wide, k, v, out, lse, dout, dlse), jnp.zeros_like(q_wide), dmask)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dmask

    def _gradients(self, arrays, dq, dmask):
        """dq, dk, dv and dmask, those of keys and values in self.wide; arrays as _pulled takes them."""
        q_wide, k, v, *others = arrays
        halves, whole = self._halved(q_wide, k), None

        def start(after: Any) -> list:
            # not there before that is: on CPU all steps' would be there at once
            zero, _ = lax.optimization_barrier((jnp.zeros((), self.wide), after))
            return [jnp.broadcast_to(zero, x.shape) for x in (k, v)]

        # half of the device's own block hides the first transfer, the other half the last one
        pull_own = partial(halves._pulled, 0, arrays)
        dq, *own_part, dmask = halves._over_own(0, pull_own, (dq, *start(others[2]), dmask))
        settled = None
        for step in range(1, self.ways):
            k, v = self._pass_on((k, v), after=settled)
            settled = dq, whole
            # a block's gradients so far come while this device's part of them is computed
            before = None if whole is None else self._pass_on(whole)
            pull_other = partial(self._pulled, step, (q_wide, k, v, *others))
            dq, *part, dmask = self._over_pairs(step, pull_other, (dq, *start(dq), dmask))
            whole = tuple(part) if before is None else jax.tree.map(jnp.add, before, tuple(part))
        zero = jnp.int32(0)
        if whole is not None:  # back to the device that owns the block
            zero, whole = lax.optimization_barrier((zero, whole))
            whole = self._pass_on(whole)
        dq, *own_part, dmask = halves._over_own(1, pull_own, (dq, *own_part, dmask), zero)
        dk, dv = own_part if whole is None else jax.tree.map(jnp.add, whole, tuple(own_part))
        return dq, dk, dv, dmask

    def _halved(self, q, k) -> _Ring:
        """The same with queries and keys in two parts, where their lengths allow that."""
        step = 2 * BLOCK if isinstance(self.mask, Columns) and self.mask.blocks is not None else 2
        if self.parts == 2 or q.shape[1] % step or k.shape[1] % step:
            return self
        return _Ring(self.spec, self.split, q, k, self.mask, self.key, parts=2)

    # ---- what is computed at a step ----

    def _over_pairs(self, step: int, compute: Callable[[Any, _Pair], Any], sums: Any) -> Any:
        """compute(sums, pair) -> sums, for the parts of the queries and of the keys here that see each other."""
        if step == 0:
            return self._over_own(1, compute, self._over_own(0, compute, sums))
        if not self.split.zigzag:
            # earlier blocks are seen whole, later ones not at all
            if not self.spec.causal:
                return compute(sums, _Pair(0, 0))
            return lax.cond(self.rank >= step, lambda sums: compute(sums, _Pair(0, 0)), lambda sums: sums, sums)
        if not self.spec.causal:
            return self._in_turn([0, 0, 1, 1], [0, 1, 0, 1], False, compute, sums)
        # of an earlier device's keys all queries see the first part, of a later one's the second queries see both
        other = jnp.where(self.rank >= step, 0, 1)
        return self._in_turn([1, other], [0, other], False, compute, sums)

    def _over_own(self, half: int, compute: Callable[[Any, _Pair], Any], sums: Any, zero: Any = 0) -> Any:
        """_over_pairs of the device's own block, which is causal within itself: the first or the second half of it, the
        whole being the first where it is one part. zero: 0, when there is what the second half is to come after.
        """
        if self.parts == 1:
            return sums if half else compute(sums, _Pair(0, 0, self.spec.causal))
        if not self.spec.causal:
            return self._in_turn([zero + half] * 2, [zero, zero + 1], False, compute, sums)
        return compute(sums, _Pair(zero + 1, zero)) if half else self._in_turn([0, 1], [0, 1], True, compute, sums)

    def _in_turn(self, rows: list, keys: list, causal: bool, compute: Callable[[Any, _Pair], Any], sums: Any) -> Any:
        def turn(sums: Any, pair: tuple) -> tuple:
            return compute(sums, _Pair(*pair, causal)), None

        return lax.scan(turn, sums, tuple(jnp.stack([jnp.int32(x) for x in xs]) for xs in (rows, keys)))[0]

    def _merged(self, step: int, arrays, sums, pair: _Pair):
        """Out and logsumexp so far with what this pair adds."""
        q, k, v = arrays
        q, k, v = self._rows(q, pair), *(self._keys(x, step, pair).astype(self.wide) for x in (k, v))
        mask = self._mask_part(step, pair)
        forward = attend if isinstance(mask, Columns) else attention_blocked.forward
        out, lse = forward(self._spec(pair), q, k, v, mask, self._draw(step, pair))
        part = out, jnp.where(lse == jnp.inf, -jnp.inf, lse)
        out, lse = _merge((self._rows(sums[0], pair), self._rows(sums[1], pair, 3)), part)
        return self._with_rows(sums[0], out, pair), self._with_rows(sums[1], lse, pair, 3)

    def _pulled(self, step: int, arrays, sums, pair: _Pair):
        """dq, dk, dv and dmask so far with what this pair adds."""
        q, k, v, out, lse, dout, dlse = arrays
        q, out, dout = (self._rows(x, pair) for x in (q, out, dout))
        lse, dlse = (self._rows(x, pair, 3) for x in (lse, dlse))
        k, v = (self._keys(x, step, pair).astype(self.wide) for x in (k, v))
        residuals = (q, k, v, self._mask_part(step, pair), self._draw(step, pair), out, lse)
        if isinstance(self.mask, Columns):
            dq, dk, dv = pull(self._spec(pair), *residuals, dout, dlse)
            bias = None
        else:
            dq, dk, dv, bias, _ = attention_blocked.backward(self._spec(pair), residuals, dout, dlse)
        rows, keys = pair.row * self.rows, self._key_start(step, pair)
        starts = [(0, rows, 0, 0), (0, keys, 0, 0), (0, keys, 0, 0), self._mask_start(step, pair)]
        return tuple(_added(x, part, at) for x, part, at in zip(sums, (dq, dk, dv, bias), starts, strict=True))

    def _spec(self, pair: _Pair) -> AttentionSpec:
        return self.spec._replace(causal=pair.causal)

    def _draw(self, step: int, pair: _Pair):
        if self.key is None:
            return None
        return attention_blocked.Draw(self.key, _origin(self.split, self.q, self.split.heads, *self._place(step, pair)))

    # ---- parts ----

    def _rows(self, x, pair: _Pair, dim: int = 1):
        return x if self.parts == 1 else lax.dynamic_slice_in_dim(x, pair.row * self.rows, self.rows, dim)

    def _with_rows(self, x, part, pair: _Pair, dim: int = 1):
        return part if self.parts == 1 else lax.dynamic_update_slice_in_dim(x, part, pair.row * self.rows, dim)

    def _keys(self, x, step: int, pair: _Pair):
        if x.shape[1] == self.keys:
            return x
        return lax.dynamic_slice_in_dim(x, self._key_start(step, pair), self.keys, 1)

    def _key_start(self, step: int, pair: _Pair):
        """The start of the pair's keys among the keys on this device."""
        return pair.key * self.keys

    def _place(self, step: int, pair: _Pair) -> tuple:
        """The starts of the pair's queries and keys in the sequence."""
        device = (self.rank - step) % self.ways  # whose keys are here
        if not self.split.zigzag:
            return (self.rank * self.parts + pair.row) * self.rows, (device * self.parts + pair.key) * self.keys
        last = 2 * self.ways - 1
        row = jnp.where(pair.row == 0, self.rank, last - self.rank)
        key = jnp.where(pair.key == 0, device, last - device)
        return row * self.rows, key * self.keys

    def _mask_part(self, step: int, pair: _Pair):
        mask = self.mask
        if mask is None:
            return None
        if isinstance(mask, Columns):
            return part_of(mask, *self._place(step, pair), self.rows, self.keys)
        sizes = (*mask.shape[:2], min(mask.shape[2], self.rows), min(mask.shape[3], self.keys))
        return lax.dynamic_slice(mask, self._mask_start(step, pair), sizes)

    def _mask_start(self, step: int, pair: _Pair) -> tuple:
        """The start of the pair in the device's rows of a mask [b, h, s_l, t]; 0 in a dim of size 1."""
        if self.mask is None or isinstance(self.mask, Columns):
            return ()
        rows, keys = self.mask.shape[2:]
        zero = jnp.int32(0)
        places = pair.row * self.rows if rows > 1 else zero, self._place(step, pair)[1] if keys > 1 else zero
        return (zero, zero, *(jnp.asarray(place, jnp.int32) for place in places))

    # ---- round the ring ----

    def _arrived(self, arrays):
        """The keys and values on this device before the first step."""
        return arrays

    def _pass_on(self, arrays, after=None):
        """The neighbour's arrays. They leave when `after` is there, two steps back: so one step's computation and the
        next step's transfer go on at a time, and no more than two blocks of keys are here at once.
        """
        if after is not None:
            arrays, _ = lax.optimization_barrier((arrays, after))
        ring = [(p, (p + 1) % self.ways) for p in range(self.ways)]
        return jax.tree.map(lambda a: lax.ppermute(a, self.split.seq, ring), arrays)


class _GatheredKeys(_Ring):
    """_Ring with the keys and values of all devices here, one device's after the other's."""

    name = "gather_attention"

    def _arrived(self, arrays):
        return jax.tree.map(lambda a: lax.all_gather(a, self.split.seq, axis=1, tiled=True), arrays)

    def _gradients(self, arrays, dq, dmask):
        q_wide, k, v, *others = arrays
        k, v = self._arrived((k, v))
        sums = dq, *(jnp.zeros(x.shape, self.wide) for x in (k, v)), dmask
        for step in range(self.ways):
            sums = self._over_pairs(step, partial(self._pulled, step, (q_wide, k, v, *others)), sums)
        dq, *of_all, dmask = sums
        home = partial(lax.psum_scatter, axis_name=self.split.seq, scatter_dimension=1, tiled=True)
        return dq, *(home(x) for x in of_all), dmask

    def _pass_on(self, arrays, after=None):
        return arrays

    def _key_start(self, step: int, pair: _Pair):
        device = (self.rank - step) % self.ways
        return (device * self.parts + pair.key) * self.keys


def _merge(a: tuple, b: tuple) -> tuple:
    """(out, logsumexp) over the keys of both; -inf where there is none."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    weight_a, weight_b, lse = attention_blocked.merge_weights(lse_a, lse_b)
    return out_a * _as_out(weight_a, out_a) + out_b * _as_out(weight_b, out_b), lse


def _added(total, part, start: tuple):
    """total with part added from this place on; None where there is no part."""
    if part is None:
        return total
    part = part.astype(total.dtype)
    if part.shape == total.shape:
        return total + part
    start = tuple(jnp.asarray(place, jnp.int32) for place in start)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, part.shape) + part, start)


def _as_out(x: jax.Array, out: jax.Array) -> jax.Array:
    """[b, n, g, s, 1] -> [b, s, n * g, 1]."""
    b, s, h, _ = out.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, s, h, 1)
