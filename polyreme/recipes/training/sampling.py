"""Writing text with a model: one captured forward over a window, a token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, NumericsError
from polyreme.generation.generator import TextGenerator
from polyreme.generation.sampling import SamplingParams
from polyreme.jit import to_static
from polyreme.models.tokenizer import END_OF_TEXT
from polyreme.nn.eval_mode import eval_mode
from polyreme.ops.indices.subscripts import getitem
from polyreme.recipes.config import RunConfig

Logits = Callable[[np.ndarray], np.ndarray]


def go_on(data: Any, model: Any, config: RunConfig, logits: Logits | None) -> str:
    """The prompt of a configuration and what the model writes after it."""
    return sample_text(
        model,
        data.tokenizer,
        config.log.prompt,
        max_new_tokens=config.log.sample_tokens,
        temperature=0.8,
        top_k=50,
        seed=config.train.seed,
        logits=logits,
    )


def answer(data: Any, model: Any, config: RunConfig, logits: Logits | None) -> str:
    """The likeliest answer of the model to the prompt of a configuration, by the template that is trained."""
    writer = data.writer
    ids = writer.encode_chat([{"role": "user", "content": config.log.prompt}])
    count = config.log.sample_tokens
    if logits is None and config.plan.num_devices == 1:
        with eval_mode(model):
            generator = TextGenerator(model, writer.end, writer.vocab_size)
            (completion,) = generator.generate([ids], SamplingParams(temperature=0.0, max_tokens=count))
        new = completion.token_ids
    else:
        chooser = Chooser(0.0, num_known=writer.vocab_size)
        window = min(model.config.seq_len, config.dimensions.seq_len)
        new = generate_ids(model, ids, chooser, max_new_tokens=count, end=writer.end, logits=logits, window=window)
    return writer.decode(new)


def sample_text(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    logits: Logits | None = None,
) -> str:
    """prompt and what the model writes after it, up to max_new_tokens or the end of the text.

    temperature 0 takes the likeliest token; top_k 0 chooses among all. The model sees its last seq_len tokens, and only
    tokens that the tokenizer knows are chosen. logits: as in generate_ids.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = tokenizer.encode(prompt).ids or [end or 0]
    chooser = Chooser(temperature, top_k, seed, tokenizer.get_vocab_size())
    ends = () if end is None else (end,)
    new = generate_ids(model, ids, chooser, max_new_tokens=max_new_tokens, end=ends, logits=logits)
    return tokenizer.decode([*ids, *new])


class Chooser:
    """Picks the next token from logits, float `[vocab]`, on the host; the same seed picks the same tokens.

    Only the first num_known ids are picked: a model's vocabulary may be larger than its tokenizer's. Raises ConfigError
    for a temperature that is no finite number of at least 0 or a negative top_k.

    >>> Chooser(temperature=0).choose(np.array([0.1, 0.7, 0.2]))
    1
    """

    temperature: float
    top_k: int
    num_known: int | None

    def __init__(self, temperature: float = 1.0, top_k: int = 0, seed: int = 0, num_known: int | None = None) -> None:
        if not (math.isfinite(temperature) and temperature >= 0) or top_k < 0:
            raise ConfigError(f"temperature={temperature}, top_k={top_k}: need finite numbers of at least 0")
        self.temperature, self.top_k, self.num_known = temperature, top_k, num_known
        self._rng = np.random.default_rng(seed)

    def choose(self, logits: np.ndarray) -> int:
        """One token id. Raises NumericsError for logits that are not finite."""
        logits = logits[: self.num_known].astype(np.float64)
        if not np.isfinite(logits).all():
            raise NumericsError(
                f"{np.count_nonzero(~np.isfinite(logits))} of {logits.size} logits are not finite; the parameters have "
                "overflowed, use an earlier checkpoint"
            )
        if self.temperature == 0:
            return int(logits.argmax())
        if self.top_k and self.top_k < logits.size:
            logits = np.where(logits >= np.partition(logits, -self.top_k)[-self.top_k], logits, -np.inf)
        weights = np.exp((logits - logits.max()) / self.temperature)
        return int(self._rng.choice(logits.size, p=weights / weights.sum()))


def generate_ids(
    model: Any,
    ids: list[int],
    chooser: Chooser,
    *,
    max_new_tokens: int,
    end: Collection[int] = (),
    logits: Logits | None = None,
    window: int = 0,
) -> list[int]:
    """New token ids after ids, the end token (if one of them is met, the last) left out. window: the most tokens that
    the model sees, its own limit if 0.

    logits: tokens `[1, seq]` -> `[1, seq, vocab]` on the host, for a model that is not on one mesh; else the model is
    called in a captured function. The window is padded to seq_len on the right, where a causal model does not look: one
    program serves every length.
    """
    if not ids or max_new_tokens < 0:
        raise ConfigError(f"{len(ids)} prompt tokens, max_new_tokens={max_new_tokens}: need at least 1 and at least 0")
    window = window or model.config.seq_len

    def last_logits(tokens: Tensor, at: Tensor) -> Tensor:
        return getitem(model(tokens), [0, at], (("int",), ("int",)))

    forward = to_static(last_logits)
    known = list(ids)
    with eval_mode(model), no_grad():
        for _ in range(max_new_tokens):
            seen = known[-window:]
            padded = np.zeros((1, window), np.int64)
            padded[0, : len(seen)] = seen
            last = len(seen) - 1
            if logits is None:
                scores = forward(to_tensor(padded), to_tensor(np.int32(last))).numpy()
            else:
                scores = logits(padded)[0, last]
            token = chooser.choose(scores)
            if token in end:
                break
            known.append(token)
    return known[len(ids) :]
