"""The choice of the next token: settings of a request, and the choice itself, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core.op import op
from polyreme.core.rng import default_generator
from polyreme.errors import ConfigError

Choice = Literal["greedy", "draw", "filter"]
"""What a batch needs: the likeliest token alone, one drawn among all, or one drawn among some."""


UNBOUNDED = 2**31 - 1
"""Tokens of a text that ends where the model's places do."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request, under the names that servers give them.

    temperature: 0 takes the likeliest token. top_k: among so many (0 or -1: all); top_p: among the likeliest that make
    up so much probability; min_p: among those at least so likely as the likeliest one times this. The three hold
    together, after temperature. repetition_penalty: scores of tokens of the prompt and of the text are divided by it
    where above 0, multiplied where below (arXiv:1909.05858). presence_penalty: what is taken from the scores of tokens
    that the text has, frequency_penalty: for each time that it has them, the prompt apart. seed: the same seed, prompt
    and settings draw the same tokens, alone or beside others; drawn by the default generator if None. max_tokens: at
    most so many new ones, as many as the model has places for if None; min_tokens: at least so many before the text may
    end. stop: strings at which it ends, left out; stop_token_ids: tokens likewise. ignore_eos: the tokenizer's end does
    not end it. n: so many texts of a prompt, of seeds seed, seed + 1, ... logprobs: also the log-probabilities of so
    many likeliest tokens at each place, 0 for the chosen one's alone; of the model itself, before the above.
    logit_bias: added to the scores of tokens, by id, before all else. bad_words: texts that are not written, as the
    tokenizer usually writes them; read by what has one.

    Raises ConfigError for what is out of range.

    >>> SamplingParams(temperature=0.8, top_p=0.95).choice
    'filter'
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = field(default=())
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        if isinstance(self.bad_words, str):
            raise ConfigError(f"SamplingParams: bad_words={self.bad_words!r} is one text; give a list of them")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.seed is None:
            object.__setattr__(self, "seed", default_generator.random() % 2**31)
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", UNBOUNDED)
        bounds = {
            "n": self.n >= 1,
            "temperature": math.isfinite(self.temperature) and self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= -1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "presence_penalty": math.isfinite(self.presence_penalty),
            "frequency_penalty": math.isfinite(self.frequency_penalty),
            "seed": 0 <= self.seed < 2**63,
            "max_tokens": self.max_tokens >= 1,
            "min_tokens": 0 <= self.min_tokens <= self.max_tokens,
            "stop": all(isinstance(text, str) and text for text in self.stop),
            "logit_bias": all(
                isinstance(i, Integral) and i >= 0 and math.isfinite(bias) for i, bias in self.logit_bias.items()
            ),
            "bad_words": all(isinstance(text, str) and text for text in self.bad_words),
            "logprobs": self.logprobs is None or self.logprobs >= 0,
        }
        for name, is_right in bounds.items():
            if not is_right:
                raise ConfigError(f"SamplingParams: {name}={getattr(self, name)!r} is out of range; {_RANGES[name]}")

    @property
    def is_counting(self) -> bool:
        """Whether it matters how often the text has a token."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def choice(self) -> Choice:
        """The kind of choice that a request with these settings needs."""
        if self.temperature == 0:
            return "greedy"
        return "draw" if self.top_p == 1 and self.top_k < 1 and self.min_p == 0 else "filter"

    def check_tokens(self, prompt: Sequence[int], vocab_size: int, whose: str) -> None:
        """Raises ConfigError for a token of the prompt or of logit_bias that a vocabulary does not have."""
        for where, tokens in (("the prompt", prompt), ("logit_bias", self.logit_bias)):
            outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if outside is not None:
                raise ConfigError(f"{whose}: {where}: token {outside} is not of the vocabulary, 0 to {vocab_size - 1}")


_RANGES = {
    "n": "give at least 1",
    "temperature": "give a finite number of at least 0",
    "top_p": "give more than 0, at most 1",
    "top_k": "give 0 for all, or at least 1",
    "min_p": "give 0 to 1",
    "repetition_penalty": "give a number above 0",
    "presence_penalty": "give a finite number",
    "frequency_penalty": "give a finite number",
    "seed": "give 0 to 2**63 - 1",
    "max_tokens": "give at least 1",
    "min_tokens": "give 0 to max_tokens",
    "stop": "give strings that are not empty",
    "logprobs": "give at least 0",
    "logit_bias": "give finite numbers by token ids of at least 0",
    "bad_words": "give strings that are not empty",
}


def settings_of(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Fields of SamplingParams that a generation_config.json says, where it does not say that nothing is drawn.

    >>> settings_of({"do_sample": True, "temperature": 0.6, "eos_token_id": 2})
    {'temperature': 0.6}
    """
    if generation_config.get("do_sample") is False:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: generation_config[name] for name in names if generation_config.get(name) is not None}


@op(method=False)
def gumbel_noise(seeds: Array, places: Array, count: int) -> Array:
    """Noise for scores so that the largest sum is a draw by their probabilities, float32 [batch, count].

    seeds, places: int64 [batch], by which alone a row's noise is drawn.
    """

    def noise(seed: Array, place: Array) -> Array:
        return jax.random.gumbel(
            jax.random.fold_in(jax.random.key(seed), place.astype(jnp.uint32)), (count,), jnp.float32
        )

    return jax.vmap(noise)(seeds, places)


@op(method=False)
def next_tokens(
    logits: Array,
    noise: Array | None,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    choice: str = "greedy",
) -> Array:
    """The token chosen in each row of logits [batch, vocab] -> int32 [batch].

    noise: gumbel_noise of each row, None if choice is "greedy". choice: one of Choice, at least what the rows need; a
    row gets the same token by any that is enough. Drawn by the Gumbel-max trick: no sum over the vocabulary decides.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    if choice == "greedy" or noise is None:
        return best
    scaled = logits / jnp.where(temperature > 0, temperature, 1)[:, None].astype(logits.dtype)
    if choice == "filter":
        scaled = _filtered(scaled, top_k, top_p, min_p)
    drawn = jnp.argmax(scaled + noise, -1).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, best)


def _filtered(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """scaled with -inf for what is not among the top_k, then not among the top_p of those, then below min_p; equals of
    the last one that is among them are too. Thresholds are searched for by bits: sorting a vocabulary takes longer."""
    numbers = _ordered(scaled)
    count = jnp.where(top_k < 1, scaled.shape[-1], top_k)
    least = _last(lambda least: (numbers >= least[:, None]).sum(-1) >= count)
    scaled = jnp.where(numbers >= least[:, None], scaled, -jnp.inf)
    weights = jnp.exp(scaled - scaled.max(-1, keepdims=True))
    wanted = top_p.astype(weights.dtype) * weights.sum(-1)
    least = _last(lambda least: jnp.where(numbers >= least[:, None], weights, 0).sum(-1) >= wanted)
    least = jnp.where(top_p < 1, least, 0)  # the sum may be whole without the smallest
    among = (numbers >= least[:, None]) & (weights >= min_p[:, None].astype(weights.dtype))
    return jnp.where(among, scaled, -jnp.inf)


def _ordered(x: Array) -> Array:
    """float32 as uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _last(holds: Callable[[Array], Array]) -> Array:
    """The largest uint32 in each row for which `holds` is true, where it is true up to some number; 0 if for none."""

    def bit(number: int, least: Array) -> Array:
        larger = least | (jnp.uint32(1 << 31) >> jnp.uint32(number))
        return jnp.where(holds(larger), larger, least)

    like = jax.eval_shape(holds, jnp.zeros(1, jnp.uint32))
    return jax.lax.fori_loop(0, 32, lambda n, least: bit(n, least), jnp.zeros(like.shape, jnp.uint32))


@op(method=False)
def penalized(logits: Array, seen: Array, penalty: Array) -> Array:
    """Logits [batch, vocab] with those of tokens that were seen (bool [batch, vocab]) divided by penalty [batch] where
    above 0, multiplied where below."""
    factor = penalty[:, None].astype(logits.dtype)
    return jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)


@op(method=False)
def outweighed(logits: Array, groups: Array) -> Array:
    """Logits [batch, vocab] with -inf for ids below groups, int32 [batch], in rows where the ids from it on together
    are likelier than each of those."""
    in_group = jnp.arange(logits.shape[-1], dtype=jnp.int32) >= groups[:, None]
    others = jnp.where(in_group, -jnp.inf, logits)
    together = jax.nn.logsumexp(jnp.where(in_group, logits, -jnp.inf), -1)
    return jnp.where((together > others.max(-1))[:, None] & ~in_group, -jnp.inf, logits)


@op(method=False)
def marked(seen: Array, tokens: Array) -> Array:
    """seen [batch, vocab] with tokens [batch, s] set; ids outside of the vocabulary are left out."""
    rows = jnp.arange(seen.shape[0], dtype=jnp.int32)[:, None]
    return seen.at[rows, jnp.where(tokens < 0, seen.shape[1], tokens)].set(True, mode="drop")


@op(method=False)
def counted(counts: Array, tokens: Array) -> Array:
    """counts int32 [batch, vocab] with one more for each of tokens [batch, s]; ids outside of the vocabulary are left
    out."""
    rows = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
    return counts.at[rows, jnp.where(tokens < 0, counts.shape[1], tokens)].add(1, mode="drop")


@op(method=False)
def likeliest(logs: Array, tokens: Array, count: int) -> tuple[Array, Array, Array]:
    """From log-probabilities [batch, vocab] those of tokens [batch], and the `count` largest with their ids."""
    chosen = jnp.take_along_axis(logs, tokens[:, None].astype(jnp.int32), 1)[:, 0]
    top, ids = jax.lax.top_k(logs, count)
    return chosen, top, ids.astype(jnp.int32)
