"""What blocks have of the tokens that a model has seen, so that the next ones need no others: keys and values of each
token, or states of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn import functional as F
from polyreme.ops import creation
from polyreme.ops.attention.caches import (
    attend_blocks,
    attend_cached,
    blocks_written,
    rows_put,
    sink_share,
    token_codes,
    tokens_cached,
)
from polyreme.ops.indices.gather import where
from polyreme.ops.layout import constrain

CACHE_DTYPES = ("int8", "bfloat16", "float16", "float32")
"""Of keys and values in a cache, as commands name them."""


def check_cache_dtype(name: str | None) -> None:
    """Raises ConfigError for a name that is not among CACHE_DTYPES; None is that of the model."""
    if name is not None and name not in CACHE_DTYPES:
        raise ConfigError(f"--kv-cache-dtype {name}: unknown{did_you_mean(name, CACHE_DTYPES)}")


def bias_mask(place_bias: Any, seq: int) -> Any:
    """attn_mask [1, heads, 1, seq] of attention to whose scores [heads, places] is added by the place of the key."""
    return place_bias[:, :seq].unsqueeze(1).unsqueeze(0)


def attend_beside_sinks(
    q: Any, k: Any, v: Any, sinks: Any, bounds: Any = None, *, window: int = 0, scale: float | None = None, **more: Any
) -> Any:
    """Causal attention [batch, seq, heads, d] where each head has a sink [heads], as of sink_share. bounds and more: as
    of F.flashmask_attention."""
    size = (window - 1, 0) if window else None
    options = {"causal": True, "window_size": size, "softmax_scale": scale, "return_softmax_lse": True, **more}
    out, logsumexp = F.flashmask_attention(q, k, v, bounds, **options)
    return out * sink_share(logsumexp, sinks).transpose([0, 2, 1]).unsqueeze(-1).astype(out.dtype)


class BlockTensors(NamedTuple):
    """The tensors of one block: keys, values, and of codes of 8 bits the scales of both; and states, float32 [rows,
    ...], each of a fixed size whatever the number of tokens. Either may be none."""

    keys_values: tuple[Any, ...]
    states: tuple[Any, ...]


class LayerCache:
    """What one block of a Decoder has of a KVCache."""

    owner: Any
    keys_values: tuple[Any, ...]
    states: tuple[Any, ...]

    def __init__(self, owner: Any, tensors: BlockTensors) -> None:
        self.owner = owner
        self.keys_values, self.states = tensors

    @property
    def tensors(self) -> tuple[Any, ...]:
        """All that is held."""
        return *self.keys_values, *self.states

    @property
    def _scales(self) -> dict[str, Any]:
        return dict(zip(("key_scales", "value_scales"), self.keys_values[2:], strict=False))

    def read_states(self) -> tuple[Any, ...]:
        """The states [batch, ...] of the rows after the tokens that are in; zeros where none is."""
        owner = self.owner
        if owner.is_empty:
            held = self.states if owner.slots is None else [state[: owner.slots.shape[0]] for state in self.states]
            return tuple(creation.zeros_like(state) for state in held)
        rows = self.states
        if owner.slots is not None:
            rows = tuple(state.index_select(owner.slots.clip(min=0), 0) for state in rows)
        has_some = [(owner.lengths > 0).reshape([-1, *[1] * (len(state.shape) - 1)]) for state in rows]
        return tuple(where(some, state, creation.zeros_like(state)) for some, state in zip(has_some, rows, strict=True))

    def write_states(self, *states: Any) -> None:
        """Keep the states [batch, ...] of the rows after the tokens that come."""
        for held, new in zip(self.states, states, strict=True):
            if self.owner.slots is None:
                held.set_value(new.astype(held.dtype))
            else:
                rows_put(held, new, self.owner.slots, out=held)

    def new_tokens(self, count: int) -> Any:
        """Which of `count` places of the rows that come have a token, bool [batch, count]."""
        return creation.arange(count, dtype="int32").unsqueeze(0) < self.owner.counts.unsqueeze(1)

    def _put(self, write: Callable[..., Any], keys: Any, values: Any, *place: Any) -> None:
        """Write new keys and values, in the form that the tensors have."""
        parts = (keys, values)
        if len(self.keys_values) > len(parts):
            codes, scales = zip(*map(token_codes, parts), strict=True)
            parts = (*codes, *scales)
        for held, new in zip(self.keys_values, parts, strict=True):
            write(held, new, *place, out=held)

    def attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        place_bias: Any = None,
        sinks: Any = None,
    ) -> Any:
        """Causal attention of new tokens to those in the cache and to themselves, which are put in.

        q [batch, s, heads, d], k [batch, s, kv_heads, d], v [batch, s, kv_heads, e] -> [batch, s, heads, e]. window,
        scale, softcap, place_bias, sinks: as of attend_cached, no window with a bias.
        """
        start = self.owner.lengths
        self._put(tokens_cached, k, v, start)
        if not self.owner.is_empty:
            options = {**self._scales, "softcap": softcap, "place_bias": place_bias, "sinks": sinks}
            keys, values = self.keys_values[:2]
            return attend_cached(q, keys, values, start, window, scale, **options)
        # nothing before them: as in training, without the places that are still free
        if sinks is not None:
            return attend_beside_sinks(q, k, v, sinks, window=window, scale=scale, softcap=softcap)
        if window and window < q.shape[1]:
            options = {"causal": True, "window_size": (window - 1, 0), "softmax_scale": scale, "softcap": softcap}
            return F.flashmask_attention(q, k, v, training=False, **options)
        mask = None if place_bias is None else bias_mask(place_bias, q.shape[1])
        options = {"is_causal": True, "training": False, "scale": scale, "softcap": softcap}
        return F.scaled_dot_product_attention(q, k, v, mask, **options)


class PagedLayerCache(LayerCache):
    """What one block of a Decoder has of the rows of a PagedCache."""

    def attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        place_bias: Any = None,
        sinks: Any = None,
    ) -> Any:
        """As of LayerCache; tokens past the blocks that a row's table names are left out."""
        start, tables, (batch, seq) = self.owner.lengths, self.owner.block_tables, q.shape[:2]
        keys, values = (x.reshape([batch * seq, *x.shape[2:]]) for x in (k, v))
        self._put(blocks_written, keys, values, tables, *self.owner.places_of(seq))
        options = {**self._scales, "softcap": softcap, "place_bias": place_bias, "sinks": sinks}
        held_keys, held_values = self.keys_values[:2]
        return attend_blocks(q, held_keys, held_values, tables, start, window, scale, **options)


class CacheRows:
    """Rows of a cache that a Decoder extends: lengths, int32 [batch], are the tokens of each that are in; `places`, how
    many can be; `layers`, what each block has of it.

    Where blocks have states, counts, int32 [batch], says how many of a row's tokens that come next are tokens of it,
    the first ones, and is set before they come; slots, int32 [batch], which row of the states each row has, -1 for
    none, its own if None.
    """

    lengths: Any
    counts: Any
    slots: Any
    places: int
    layers: list[LayerCache]
    is_empty: bool

    def positions(self, count: int) -> Any:
        """The places of `count` tokens that come next, int32 [batch, count]; past the last place, the last."""
        places = self.lengths.unsqueeze(1) + creation.arange(count, dtype="int32")
        return places.clip(max=self.places - 1)


class KVCache(CacheRows):
    """Keys and values of `batch` sequences, at most `places` tokens of each, for a Decoder's blocks.

    lengths: int32 [batch], tokens that are in. is_empty: whether none is, for code that is captured with this cache; a
    fact of the call, not of the arrays. dtype: floating, or int8: codes with a scale for each head and token; the
    model's kv_cache_dtype if None, or else that of its weights. Under a plan the heads lie as those of attention.
    Raises ConfigError for more places than the model has positions, and for another dtype.
    """

    batch: int
    places: int
    lengths: Any
    layers: list[LayerCache]

    def __init__(self, model: Any, batch: int, places: int, dtype: Any = None) -> None:
        self.slots = None
        if batch < 1 or not 1 <= places <= model.config.seq_len:
            raise ConfigError(
                f"KVCache of {batch} x {places} tokens: give at least one sequence, and 1 to "
                f"{model.config.seq_len} places, as the model has positions"
            )
        self.batch, self.places = batch, places
        self.lengths = creation.zeros([batch], "int32")
        self.counts = creation.zeros([batch], "int32")
        self.is_empty = True
        self.layers = [LayerCache(self, tensors) for tensors in _empty(model, batch, places, "batch", dtype, batch)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.size * t.element_size() for layer in self.layers for t in layer.tensors)


class PagedCache:
    """Keys and values in `num_blocks` blocks of block_size tokens, which sequences are given as they grow; and states,
    where blocks have some, in num_slots slots, one a sequence.

    rows() are what a Decoder extends: any number of them read and write the same blocks. dtype: as of KVCache.
    """

    num_blocks: int
    block_size: int
    layers: list[BlockTensors]

    def __init__(self, model: Any, num_blocks: int, block_size: int, dtype: Any = None, num_slots: int = 1) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.layers = _empty(model, num_blocks, block_size, None, dtype, num_slots)

    def rows(self, batch: int, places: int) -> PagedRows:
        """Rows for `batch` sequences of at most so many places."""
        return PagedRows(self, batch, places)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.size * t.element_size() for layer in self.layers for part in layer for t in part)


class PagedRows(CacheRows):
    """Sequences whose keys and values are in blocks of a PagedCache.

    block_tables: int32 [batch, count]; a row keeps its places block_size * j on in block block_tables[:, j], -1 where
    it has none. They, lengths and slots are set from outside.
    """

    block_tables: Tensor

    places: int
    is_empty: bool
    lengths: Any
    layers: list[LayerCache]

    def __init__(self, cache: PagedCache, batch: int, places: int) -> None:
        self.places, self.is_empty = places, False
        self.lengths, self.counts = creation.zeros([batch], "int32"), creation.zeros([batch], "int32")
        self.slots = creation.full([batch], -1, "int32")
        self.block_tables = creation.full([batch, -(-places // cache.block_size)], -1, "int32")
        self.layers = [PagedLayerCache(self, tensors) for tensors in cache.layers]

    def places_of(self, count: int) -> tuple[Any, Any]:
        """The row and the place of `count` tokens of each row that come next, int32 [batch * count] both."""
        next_ones = creation.arange(count, dtype="int32")
        places = self.lengths.unsqueeze(1) + next_ones
        rows = creation.arange(places.shape[0], dtype="int32").unsqueeze(1) + next_ones * 0
        return rows.reshape([-1]), places.reshape([-1])


def _empty(model: Any, rows: int, places: int, dim: str | None, dtype: Any, num_slots: int) -> list[BlockTensors]:
    """Of each block of a Decoder, what it has: keys [rows, heads, places, width] and values, and of int8 the scales of
    both; states [num_slots, ...]. dim: what the rows are. Raises ConfigError for a dtype that no block can use."""
    own_dtype = getattr(model, "kv_cache_dtype", None)
    kind = own_dtype if dtype is None else dtype
    kind = model.output_weight.dtype if kind is None else dtypes.as_dtype(kind)
    if kind != np.int8 and not dtypes.is_floating(kind):
        raise ConfigError(f"a cache of keys and values in {kind}; give int8 or a floating dtype")

    def zeros(heads: int, width: int, kind: Any) -> Any:
        return constrain(creation.zeros([rows, heads, places, width], kind), dim, "kv_heads", None, None)

    def tensors_of(block: Any) -> BlockTensors:
        heads, *widths = model.block_cache_dims(block)
        forms = [(width, kind) for width in widths] + [(1, np.float32)] * (2 if kind == np.int8 else 0)
        keys_values = tuple(zeros(heads, *form) for form in forms) if heads else ()
        states = (creation.zeros([num_slots, *shape], "float32") for shape in model.block_state_shapes(block))
        return BlockTensors(keys_values, tuple(states))

    tensors = [tensors_of(block) for block in model.blocks]
    if dtype is not None and not any(layer.keys_values for layer in tensors):
        raise ConfigError(f"a cache in {dtype}: {type(model).__name__} keeps no keys and values; leave the dtype out")
    return tensors
