"""Model families as records: what configuration, planner and estimates ask of one without loading its code (or jax).

A new family is a file beside this one and a record in FAMILIES. See docs/adding_a_model.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from polyreme.planner import ModelShape
from polyreme.registry import Registry


class Dimensions(Protocol):
    """What a configuration says of a model, whatever its family."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def tie_embeddings(self) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One family of decoders.

    module: where its classes are, for who builds one. model: name of its class, a Decoder. config: name
    of its config class, a dataclass with fields named as in Dimensions. shape: the planner's view of a configured
    model, which also says how many parameters it has. ffn_size: width of the feed-forward where none is given, of
    hidden_size. grouped_heads: whether it takes num_kv_heads below num_heads. dropout: whether it drops anything.
    aliases: other spellings of the name.
    """

    name: str
    module: str
    model: str
    config: str
    shape: Callable[[Dimensions], ModelShape]
    ffn_size: Callable[[int], int]
    grouped_heads: bool = False
    dropout: bool = False
    aliases: tuple[str, ...] = ()


def decoder_shape(dims: Dimensions, **blocks: Any) -> ModelShape:
    """The planner's view of a decoder. blocks: fields of ModelShape that say what its blocks are made of."""
    return ModelShape(
        hidden=dims.hidden_size,
        layers=dims.num_layers,
        heads=dims.num_heads,
        seq=dims.seq_len,
        vocab=dims.vocab_size,
        ffn=dims.ffn_size,
        kv_heads=dims.num_kv_heads,
        tied=dims.tie_embeddings,
        dropout=dims.dropout > 0,
        **blocks,
    )


GPT = Family(
    name="gpt",
    module="polyreme.models.gpt",
    model="GPT",
    config="GPTConfig",
    shape=decoder_shape,
    ffn_size=lambda hidden: 4 * hidden,
    dropout=True,
)

LLAMA = Family(
    name="llama",
    module="polyreme.models.llama",
    model="Llama",
    config="LlamaConfig",
    shape=partial(decoder_shape, gated=True, biases=False, learned_positions=False, rms_norm=True),
    # three matrices with the parameters of a 4x block's two: 8/3, rounded up to 64
    ffn_size=lambda hidden: -(-hidden * 8 // (3 * 64)) * 64,
    grouped_heads=True,
)

FAMILIES: Registry[Family] = Registry("model family", [GPT, LLAMA])
"""Families by the name that a configuration has, in the order that lists show them."""

DEFAULT_FAMILY = GPT.name
"""The family of a configuration that names none."""


def shape_of(family: str, dims: Dimensions) -> ModelShape:
    """The planner's view of a configured model, under its family's name."""
    return replace(FAMILIES.named(family).shape(dims), name=family)
