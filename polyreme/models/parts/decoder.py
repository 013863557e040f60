"""What decoder families share: embed, blocks, norm, output projection, loss; and the same as a sequence of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from polyreme.autograd.recompute import in_block, run_part
from polyreme.core import layout
from polyreme.errors import ConfigError, ShapeError, did_you_mean
from polyreme.mesh import RECOMPUTE
from polyreme.models.families import Family
from polyreme.models.parts.cache import KVCache, LayerCache, attend_beside_sinks, bias_mask
from polyreme.models.pretrained import Pretrained
from polyreme.nn import Layer, Sequential
from polyreme.nn import functional as F
from polyreme.ops.attention.over_devices import zigzag_ways
from polyreme.ops.creation import arange, full_like
from polyreme.ops.indices.gather import where
from polyreme.ops.layout import constrain, into_zigzag, out_of_zigzag
from polyreme.registry import Reference

_GENERATE: Reference[Callable[..., tuple[Any, Any]]] = Reference("polyreme.generation.strategies", "generate")
"""Which stands above models, and is loaded when it is asked for."""


class Documents(NamedTuple):
    """Where the documents lie that share rows, none of which sees another, int32 [batch, seq] each.

    ends: of each token the place in the row where its document ends, the first that is not of it. places: of each token
    its place in its document. data.packing.PackedDataset gives both.
    """

    ends: Any
    places: Any


class PackedStream(NamedTuple):
    """What goes from one part of a decoder to the next where documents share rows: the stream, and where they lie."""

    stream: Any
    documents: Documents


class InsertedVectors(NamedTuple):
    """What stands in rows in place of embeddings of tokens: vectors [batch, seq, embed], where is_inserted [batch, seq]
    says so."""

    vectors: Any
    is_inserted: Any


class Decoder(Pretrained, Layer):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]; with labels, the family's loss, a 0-D mean.

    labels [batch, seq]: the id that follows each token (already shifted by one); -100 leaves a token out of the mean.
    documents: those that share rows, in families whose record says that they take some; one a row if None. Ids and
    documents may also come as one array [batch, 3, seq]: ids, ends, places. attention_mask [batch, seq]: 0 where a
    place holds no token, which no other sees and which does not count as a place; on either side of a row, in families
    without documents behind it alone; windows count it. position_ids [batch, seq]: the place of each token. inserted:
    what stands in place of embeddings, as of pictures.
    A class sets `family` (its record, which says the loss and where a pipeline cuts), `config` (with seq_len and
    tie_embeddings), `tokens`, `blocks`, `norm` and, untied, `head`.

    Under a plan that splits the sequence a model that is `is_order_free` keeps its tokens in zigzag order from `embed`
    to the loss, where `sep_order` says so: `token_order` says which, and who calls the model does not see it.
    """

    family: Family
    documents: Documents | None = None
    """Those of the rows that are being read."""
    logit_scale: float = 1.0
    """What logits are multiplied by."""
    logit_cap: float = 0.0
    """A bound of logits: as softcap of F.scaled_dot_product_attention; none if 0."""
    is_order_free: bool = False
    """Whether only attention and `token_order` of all that this class does tell one place of a sequence from another. A
    subclass, whose code may be other, says so for itself, or with the class keyword keeps_order_free=True that this is
    what it is in its parent."""

    def __init_subclass__(cls, *, keeps_order_free: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_order_free = cls.__dict__.get("is_order_free", keeps_order_free and cls.is_order_free)

    def forward(
        self,
        input_ids: Any,
        labels: Any = None,
        documents: Documents | None = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        inserted: InsertedVectors | None = None,
    ) -> Any:
        if documents is None:
            input_ids, documents = unpacked(input_ids)
        if attention_mask is not None or position_ids is not None:
            documents = self._padded(input_ids, documents, attention_mask, position_ids)
        with self.reading(documents):
            stream = self.stream(input_ids, inserted)
            return self.pipeline_output(stream) if labels is None else self.pipeline_loss(stream, labels)

    def encode(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        """hidden(input_ids), of rows that are read as forward reads them."""
        is_said = attention_mask is not None or position_ids is not None
        documents = self._padded(input_ids, None, attention_mask, position_ids) if is_said else None
        with self.reading(documents):
            return self.hidden(input_ids)

    def _padded(self, ids: Any, documents: Documents | None, mask: Any, position_ids: Any) -> Documents | None:
        """Documents that read rows as attention_mask and position_ids say."""
        owner = type(self).__name__
        if documents is not None:
            raise ConfigError(
                f"{owner}: attention_mask and position_ids beside documents, which say both; leave them out"
            )
        for name, given in (("attention_mask", mask), ("position_ids", position_ids)):
            if given is not None and list(given.shape) != list(ids.shape):
                raise ShapeError(
                    f"{owner}: {name} has shape {list(given.shape)}; give that of the ids, {list(ids.shape)}"
                )
        if not self.family.documents and position_ids is None and _is_padded_behind(mask):
            return None  # which no token of the text sees
        if not self.family.documents:
            raise ConfigError(
                f"{owner}: {self.family.name} reads rows from their first place on; give attention_mask of rows that "
                "are padded behind their tokens, and no position_ids"
            )
        return documents_of(ids, mask, position_ids)

    @contextmanager
    def reading(self, documents: Documents | None) -> Iterator[None]:
        """Inside the block rows are read as those of the documents, None for one a row. ConfigError for documents that
        the family does not take."""
        if documents is not None and not self.family.documents:
            raise ConfigError(
                f"{type(self).__name__}: {self.family.name} takes one document a row; leave documents out"
            )
        before, self.documents = self.documents, documents
        try:
            yield
        finally:
            self.documents = before

    def stream(self, tokens: Any, inserted: InsertedVectors | None = None) -> Any:
        """The last block's normed output, [batch, seq, embed], or what a family's `normed` makes of it, the tokens in
        the order that the model keeps them in."""
        x_bse = self.embed(tokens, inserted=inserted)
        for number, block in enumerate(self.blocks):
            with in_block(number):
                x_bse = self.run_block(block, x_bse)
        return self.normed(x_bse)

    def hidden(self, tokens: Any) -> Any:
        """stream(tokens), the tokens in their own order."""
        return self.in_own_order(self.stream(tokens))

    def logits(self, hidden: Any) -> Any:
        """[batch, seq, vocab] given hidden(tokens)."""
        return self.project(hidden)

    def project(self, x_bse: Any) -> Any:
        """[batch, seq, vocab] given the normed output of the last block."""
        logits = x_bse.matmul(self.output_weight, transpose_y=self.config.tie_embeddings)
        logits = logits if self.logit_scale == 1 else logits * self.logit_scale
        logits = logits if self.output_bias is None else logits + self.output_bias
        return (logits / self.logit_cap).tanh() * self.logit_cap if self.logit_cap else logits

    @property
    def output_weight(self) -> Any:
        """The weight of the output projection: the token embedding's when tied."""
        return self.tokens.weight if self.config.tie_embeddings else self.head.weight

    @property
    def output_bias(self) -> Any:
        """What the output projection adds, [vocab]; None where config has no head_bias."""
        return self.head_bias if getattr(self.config, "head_bias", False) else None

    def embed(self, tokens: Any, cache: KVCache | None = None, inserted: InsertedVectors | None = None) -> Any:
        """What the first block takes, [batch, seq, embed]; cache: what comes before the tokens. Raises ShapeError for
        ids that are not [batch, seq] or rows that are too long."""
        owner = type(self).__name__
        if len(tokens.shape) != 2:
            raise ShapeError(f"{owner}: tokens have shape {list(tokens.shape)}; give ids as [batch, seq]")
        seq = tokens.shape[1]
        if seq > self.config.seq_len:
            raise ShapeError(
                f"{owner}: {seq} tokens a row, but there are positions for {self.config.seq_len}; shorten the rows"
            )
        ways = self.token_order(seq) if cache is None else 1
        tokens = tokens if ways == 1 else _into_zigzag(tokens, ways, 1, "batch", None)
        # whole in seq first, where mp sums it: asked for a part at once, the partitioner gathers the table instead
        x_bse = constrain(self.tokens(tokens), "batch", "block_seq", "embed")
        if inserted is not None:
            vectors, is_inserted = inserted.vectors.astype(x_bse.dtype), inserted.is_inserted.unsqueeze(-1)
            if ways != 1:
                vectors, is_inserted = (_into_zigzag(x, ways, 1, "batch", None, None) for x in (vectors, is_inserted))
            x_bse = where(is_inserted, vectors, x_bse)
        x_bse = self.placed(x_bse) if cache is None else self.placed(x_bse, cache)
        return constrain(x_bse, "batch", "seq", "embed")

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: here token ids [1, length], fewer if there are fewer positions."""
        return (rng.integers(0, self.config.vocab_size, (1, min(length, self.config.seq_len))),)

    # token by token

    @property
    def cache_dims(self) -> tuple[int, int, int]:
        """(heads of keys and values, width of a key, width of a value) that a KVCache keeps of each token and block."""
        config = self.config
        width = getattr(config, "head_dim", 0) or config.hidden_size // config.num_heads
        return getattr(config, "num_kv_heads", config.num_heads), width, width

    def block_cache_dims(self, block: Layer) -> tuple[int, int, int]:
        """cache_dims of one block, all of which have the same if a family does not say; no heads for a block without
        attention."""
        return self.cache_dims

    def block_state_shapes(self, block: Layer) -> Sequence[tuple[int, ...]]:
        """The shapes of the states that one block keeps of a row, of a fixed size whatever the number of tokens."""
        return ()

    @property
    def has_states(self) -> bool:
        """Whether a block keeps states: tokens are then taken in one after another, and what is kept is of all of a
        row's tokens, and of no beginning of it."""
        return any(self.block_state_shapes(block) for block in self.blocks)

    def extend(self, tokens: Any, cache: KVCache, counts: Any = None) -> Any:
        """The last block's normed output, [batch, s, embed], of tokens [batch, s] that come after those in the cache,
        which takes them in.

        counts: int32 [batch], how many of a row's s are tokens of it, the first ones; all if None. The others are there
        for the shape: later tokens take their places.
        """
        cache.counts.set_value(full_like(cache.counts, tokens.shape[1]) if counts is None else counts)
        x_bse = self.embed(tokens, cache)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x_bse = self.run_block(block, x_bse, layer)
        return self.extended(x_bse, cache, tokens.shape[1] if counts is None else counts)

    def generate(self, input_ids: Any, **settings: Any) -> tuple[Any, Any]:
        """Write after prompts [batch, seq] by decode_strategy "greedy_search", "beam_search" or "sampling" -> ids of
        the new tokens, int64 [batch * num_return_sequences, longest], and their scores, [.., 1].

        settings: as of generation.strategies.generate.
        """
        return _GENERATE.load()(self, input_ids, **settings)

    def extended(self, x_bse: Any, cache: KVCache, counts: Any) -> Any:
        """What extend gives, of the last block's output; the cache's rows are then longer by counts."""
        cache.lengths.add_(counts)
        normed = self.normed(x_bse)
        return normed[0] if isinstance(normed, tuple) else normed

    # the order of tokens

    def token_order(self, seq: int) -> int:
        """The ways of the zigzag order (ops.layout.into_zigzag) in which rows of so many tokens lie between embed and
        the loss under the plan in force; 1 for their own order."""
        if not self.is_order_free or self.documents is not None:
            return 1
        return zigzag_ways(seq, self.config.num_heads, getattr(self.config, "num_kv_heads", self.config.num_heads))

    def places(self, table: Any) -> Any:
        """table [seq, ...], a row for each place of a sequence, in the order of the tokens."""
        ways = self.token_order(table.shape[0])
        return table if ways == 1 else _into_zigzag(table, ways, 0, *[None] * len(table.shape))

    @contextmanager
    def keeping_order(self, seq: int) -> Iterator[None]:
        """Inside the block attention knows the order of the tokens of its rows of seq."""
        ways, placed = self.token_order(seq), layout.active.layout
        with layout.using(placed if placed is None or ways == 1 else placed.in_zigzag(ways)):
            yield

    # what a family may do in its own way

    def in_own_order(self, stream: Any) -> Any:
        """What stream(tokens) gives, the tokens in their own order."""
        ways = self.token_order(stream.shape[1]) if self.is_order_free else 1
        return stream if ways == 1 else out_of_zigzag(stream, ways, 1)

    def placed(self, x_bse: Any, cache: KVCache | None = None) -> Any:
        """Token embeddings with what says where each token is, if the family adds that here; after those in a cache."""
        return x_bse

    def embedding_layers(self) -> dict[str, Layer]:
        """The Layers that embed calls."""
        return {"tokens": self.tokens}

    def output_layers(self) -> dict[str, Layer]:
        """The Layers that normed, logits and the loss call, those of embed apart."""
        return {"norm": self.norm} if self.config.tie_embeddings else {"norm": self.norm, "head": self.head}

    def run_block(self, block: Layer, x_bse: Any, cache: LayerCache | None = None) -> Any:
        """A block's output; cache: what the block has of tokens before those of x."""
        return block(x_bse) if cache is None else block(x_bse, cache)

    def normed(self, x_bse: Any) -> Any:
        """What logits and the loss are computed from, given the last block's output."""
        return self.norm(x_bse)

    # as a pipeline takes it

    def pipeline_items(self, *, at_routers: bool = False) -> list[Layer]:
        """The model as a sequence of layers that gives stream(tokens), which pipeline_loss takes beside the labels, and
        pipeline_output. Where documents share rows the first takes [batch, 3, seq], and they hand on a PackedStream.

        Of a family cut at "layers" each block is one, the first with the embedding before it, the last with the norm.
        at_routers: a block of experts is two, its experts the second, of no documents that share rows.
        """
        embedding = Part(self._embed_rows, **self.embedding_layers())
        # a head that a reward model has beside its own
        heads = {name: layer for name, layer in self.named_children() if name == "reward_head"}
        norm = Part(self._norm_rows, **self.output_layers(), **heads)
        if self.output_bias is not None:
            norm.add_parameter("head_bias", self.output_bias)
        blocks: list[Layer] = [
            part
            for place, block in enumerate(self.blocks)
            for part in self.block_parts(block, place, at_routers=at_routers)
        ]
        if self.family.cut == "items":
            return [embedding, *blocks, norm]
        blocks[0] = Sequential(embedding, blocks[0])
        blocks[-1] = Sequential(blocks[-1], norm)
        return blocks

    def block_parts(self, block: Layer, place: int, *, at_routers: bool) -> list[Layer]:
        """A block's items of pipeline_items; place: of the block among the model's."""
        return [BlockPart(self._run_block_on_rows, block, place)]

    def _embed_rows(self, rows: Any) -> Any:
        tokens, documents = unpacked(rows)
        with self.reading(documents):
            x_bse = self.embed(tokens)
        return x_bse if documents is None else PackedStream(x_bse, documents)

    def _run_block_on_rows(self, block: Layer, rows: Any) -> Any:
        return self._on_stream(lambda x_bse: self.run_block(block, x_bse), rows)

    def _norm_rows(self, rows: Any) -> Any:
        return self._on_stream(self.normed, rows)

    def _on_stream(self, call: Callable[[Any], Any], rows: Any) -> Any:
        """What call makes of a stream; of a PackedStream another, which has read its documents."""
        if not isinstance(rows, PackedStream):
            return call(rows)
        with self.reading(rows.documents):
            return rows._replace(stream=call(rows.stream))

    def pipeline_loss(self, stream: Any, labels: Any) -> Any:
        """The family's loss of the labels given stream(tokens), or the last item's PackedStream."""
        if isinstance(stream, PackedStream):
            with self.reading(stream.documents):
                return self.pipeline_loss(stream.stream, labels)
        ways = self.token_order(labels.shape[1]) if self.is_order_free else 1
        labels = labels if ways == 1 else _into_zigzag(labels, ways, 1, "batch", None)
        return self.family.loss.load()(self, stream, labels)

    def pipeline_output(self, stream: Any) -> Any:
        """logits given stream(tokens), or the last item's PackedStream."""
        if isinstance(stream, PackedStream):
            with self.reading(stream.documents):
                return self.pipeline_output(stream.stream)
        return self.logits(self.in_own_order(stream))


def documents_of(ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Documents:
    """Documents by which rows of ids [batch, seq] are one text each, whose tokens are where attention_mask is not 0; at
    the places of position_ids, counted from the first token on if None.

    >>> from polyreme.eager.tensor import to_tensor
    >>> documents_of(to_tensor([[7, 5, 6]]), to_tensor([[0, 1, 1]])).places.numpy().tolist()
    [[0, 0, 1]]
    """
    seq = ids.shape[1]
    numbers = arange(seq, dtype="int32").expand(list(ids.shape))
    if attention_mask is None:
        return Documents(full_like(numbers, seq), position_ids.astype("int32"))
    is_token = attention_mask != 0
    places = position_ids
    if places is None:
        places = (is_token.astype("int32").cumsum(1) - 1).clip(min=0)
    return Documents(where(is_token, full_like(numbers, seq), numbers + 1), places.astype("int32"))


def _is_padded_behind(mask: Any) -> bool:
    """Whether in each row of a mask no token comes after a place without one."""
    is_token = np.asarray(mask.numpy() if hasattr(mask, "numpy") else mask) != 0
    return bool((is_token[:, :-1] >= is_token[:, 1:]).all())


def unpacked(rows: Any) -> tuple[Any, Documents | None]:
    """Ids [batch, seq] and documents of rows: ids alone, or [batch, 3, seq], ids, ends and places."""
    if len(rows.shape) != 3 or rows.shape[1] != 3:
        return rows, None
    tokens, ends, places = rows.unbind(1)
    return tokens, Documents(ends, places)


def _into_zigzag(x: Any, ways: int, dim: int, *dims: str | None) -> Any:
    """x with its dim, a sequence, in zigzag order: whole before and after, so that devices which have all of it send
    nothing, but take what is theirs."""
    return constrain(into_zigzag(constrain(x, *dims), ways, dim), *dims)


def attend_causally(
    recompute: str,
    query: Any,
    key: Any,
    value: Any,
    ends: Any = None,
    *,
    window: int = 0,
    place_bias: Any = None,
    sinks: Any = None,
    **options: Any,
) -> Any:
    """Attention [batch, seq, heads, head_dim] of queries to the keys before them, of the last `window` if not 0.

    ends: as of Documents; a key is then seen within its document alone. place_bias: what is added to the scores of the
    key at each place, [heads, places], without window and documents. sinks: as of attend_beside_sinks. recompute: as of
    run_part. options: training, scale, softcap, and dropout, the probability.
    """
    seq = query.shape[1]
    is_wide = not window or window >= seq
    if place_bias is not None:
        options["attn_mask"] = bias_mask(place_bias, seq)
    bounds = None if ends is None else ends.reshape([ends.shape[0], 1, seq, 1])
    if sinks is not None:
        beside = partial(attend_beside_sinks, window=0 if is_wide else window, **options)
        return run_part("core_attn", recompute, beside, query, key, value, sinks, bounds)
    if ends is None and is_wide:
        options["dropout_p"] = options.pop("dropout", 0.0)
        return run_part(
            "core_attn", recompute, F.scaled_dot_product_attention, query, key, value, is_causal=True, **options
        )
    size = None if is_wide else (window - 1, 0)
    attend = F.flashmask_attention
    options["softmax_scale"] = options.pop("scale", None)
    return run_part("core_attn", recompute, attend, query, key, value, bounds, causal=True, window_size=size, **options)


def next_token_loss(model: Decoder, hidden: Any, labels: Any) -> Any:
    """Mean cross-entropy of the labels given stream(tokens), nats a token, without the logits being stored."""
    tied = model.config.tie_embeddings
    hidden = hidden if model.logit_scale == 1 else hidden * model.logit_scale
    options = {"transpose_weight": tied, "softcap": model.logit_cap, "bias": model.output_bias}
    return F.fused_linear_cross_entropy(hidden, model.output_weight, labels, **options)


def check_dimensions(config: Any) -> None:
    """Raises ConfigError for a config with a whole number below 1, or what the field's metadata say is "least", or with
    a recompute that there is not."""
    name = type(config).__name__
    for field in fields(config):
        value = getattr(config, field.name)
        least = field.metadata.get("least", 1)
        is_whole = "float" not in str(field.type) and isinstance(value, Integral) and not isinstance(value, bool)
        if is_whole and value < least:
            raise ConfigError(f"{name}: {field.name} is {value}; give at least {least}")
    recompute = getattr(config, "recompute", "")
    if recompute and recompute not in RECOMPUTE:
        raise ConfigError(f"{name}: unknown recompute {recompute!r}{did_you_mean(recompute, RECOMPUTE)}")


class Part(Layer):
    """A step of a model as a Layer of its own: calls a method of the model.

    sublayers: the Layers of the model that the method uses, whose parameters are then this Part's too.

    >>> from polyreme.nn import Linear
    >>> Part(abs, unused=Linear(2, 3)).parameters()[0].shape
    paddle.Size([2, 3])
    """

    def __init__(self, call: Callable[[Any], Any], **sublayers: Layer) -> None:
        super().__init__()
        self.call = call
        for name, layer in sublayers.items():
            self.add_sublayer(name, layer)

    def forward(self, x: Any) -> Any:
        return self.call(x)


class BlockPart(Part):
    """A block of a model as a Part: parts of blocks that are alike are alike (nn.alike).

    run: a method of the model that takes a block and what it is run on. place: of the block among the model's.

    >>> from polyreme.nn import Linear
    >>> BlockPart(lambda block, x: block(x), Linear(2, 3)).parameters()[0].shape
    paddle.Size([2, 3])
    """

    def __init__(self, run: Callable[[Layer, Any], Any], block: Layer, place: int = 0) -> None:
        super().__init__(run, block=block)  # type: ignore[arg-type]  # called with the block
        self.place = place

    def forward(self, x: Any) -> Any:
        with in_block(self.place):
            return self.call(self._sub_layers["block"], x)  # type: ignore[call-arg]
