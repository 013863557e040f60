"""Keys and values of the tokens that a model has seen, so that the next ones need no others."""

from __future__ import annotations

from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.ops import creation
from polyreme.ops.caches import attend_cached, tokens_cached
from polyreme.ops.layout import constrain


class LayerCache:
    """What one block has of a KVCache."""

    def __init__(self, owner: KVCache, keys: Any, values: Any) -> None:
        self.owner, self.keys, self.values = owner, keys, values

    def attend(self, q: Any, k: Any, v: Any, *, window: int = 0, scale: float | None = None) -> Any:
        """Causal attention of new tokens to those in the cache and to themselves, which are put in.

        q [batch, s, heads, d], k [batch, s, kv_heads, d], v [batch, s, kv_heads, e] -> [batch, s, heads, e]. window,
        scale: as of attend_cached.
        """
        start = self.owner.lengths
        keys = tokens_cached(self.keys, k, start, out=self.keys)
        values = tokens_cached(self.values, v, start, out=self.values)
        if not self.owner.is_empty:
            return attend_cached(q, keys, values, start, window, scale)
        # nothing before them: as in training, without the places that are still free
        if window and window < q.shape[1]:
            options = {"causal": True, "window_size": (window - 1, 0), "softmax_scale": scale}
            return F.flashmask_attention(q, k, v, training=False, **options)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, training=False, scale=scale)


class KVCache:
    """Keys and values of `batch` sequences, at most `places` tokens of each, for a Decoder's blocks.

    lengths: int32 [batch], tokens that are in. is_empty: whether none is, for code that is captured with this cache; a
    fact of the call, not of the arrays. Under a plan the heads lie as those of attention. Raises ConfigError for more
    places than the model has positions.
    """

    def __init__(self, model: Any, batch: int, places: int, dtype: Any = None) -> None:
        if batch < 1 or not 1 <= places <= model.config.seq_len:
            raise ConfigError(
                f"KVCache of {batch} x {places} tokens: give at least one sequence, and 1 to "
                f"{model.config.seq_len} places, as the model has positions"
            )
        self.batch, self.places = batch, places
        heads, key_width, value_width = model.cache_dims
        dtype = model.output_weight.dtype if dtype is None else dtypes.as_dtype(dtype)

        def zeros(width: int) -> Any:
            return constrain(creation.zeros([batch, heads, places, width], dtype), "batch", "kv_heads", None, None)

        self.lengths = creation.zeros([batch], "int32")
        self.is_empty = True
        self.layers = [LayerCache(self, zeros(key_width), zeros(value_width)) for _ in model.blocks]

    def positions(self, count: int) -> Any:
        """The places of `count` tokens that come next, int32 [batch, count]; past the last place, the last."""
        places = self.lengths.unsqueeze(1) + creation.arange(count, dtype="int32")
        return places.clip(max=self.places - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.size * t.element_size() for layer in self.layers for t in (layer.keys, layer.values))
