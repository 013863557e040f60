"""Beam search: the texts of largest probability among those that a few beams meet.

The rule is that of transformers' generate: a text's score is its log-probability over its length, in tokens with the
end, to the power of length_penalty; each step keeps num_beams open texts and the num_beams best ended ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, NumericsError
from polyreme.generation.generator import TextGenerator
from polyreme.generation.sampling import marked, penalized
from polyreme.jit import to_static
from polyreme.nn import functional as F
from polyreme.ops import creation

_NEVER = np.float32(-1e9)
"""Added to the score of what is not chosen; as low as transformers', so that equal ones stay equal."""


@dataclass(frozen=True)
class BeamSearchParams:
    """Settings of a beam search.

    num_beams: open texts at a time. length_penalty: above 0 longer texts score higher, below shorter ones.
    early_stopping: True ends when num_beams texts have ended; False when the best open one could not score higher at
    its length; "never" also not at the largest length. n: so many best texts, at most num_beams. The others as of
    SamplingParams.

    Raises ConfigError for what is out of range.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: Sequence[int] = field(default=())
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        bounds = {
            "num_beams": (self.num_beams >= 1, "give at least 1"),
            "length_penalty": (-6 <= self.length_penalty <= 6, "give -6 to 6, whose powers of lengths float32 holds"),
            "early_stopping": (self.early_stopping in (True, False, "never"), "give True, False or 'never'"),
            "n": (1 <= self.n <= self.num_beams, "give 1 to num_beams"),
            "max_tokens": (self.max_tokens >= 1, "give at least 1"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, "give 0 to max_tokens"),
            "repetition_penalty": (
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "give a number above 0",
            ),
        }
        for name, (is_right, range_of) in bounds.items():
            if not is_right:
                value = getattr(self, name)
                raise ConfigError(f"BeamSearchParams: {name}={value!r} is out of range; {range_of}")


@dataclass(frozen=True)
class BeamText:
    """A text that was searched: its tokens without the end, its score, how it ended ("stop" or "length"), and the token
    that ended it."""

    token_ids: list[int]
    score: float
    finish_reason: str
    end_token: int | None = None


class BeamSearch:
    """Searches after one prompt at a time with the model of a TextGenerator; its programs are kept."""

    def __init__(self, generator: TextGenerator) -> None:
        self.generator = generator
        self._candidates: dict[int, Any] = {}

    def search(self, prompt: Sequence[int], params: BeamSearchParams) -> list[BeamText]:
        """The n best texts after a prompt, token ids, the best first.

        Raises ConfigError for a prompt that is empty or leaves no room, and for more beams than tokens,
        NumericsError for logits that are not finite.
        """
        if params.num_beams > self.generator.num_known:
            raise ConfigError(
                f"beam search: num_beams={params.num_beams} of {self.generator.num_known} tokens; give fewer beams"
            )
        with self.generator.in_turn, no_grad():
            return self._search(prompt, params)

    def _search(self, prompt: Sequence[int], params: BeamSearchParams) -> list[BeamText]:
        beams, vocab = params.num_beams, self.generator.model.config.vocab_size
        end = [*(() if params.ignore_eos else self.generator.end), *params.stop_token_ids]
        longest, room = self.generator.rooms([prompt], [params.max_tokens])
        limit = min(params.max_tokens, room + 1 - len(prompt))
        one, rows = self.generator.programs(1, room), self.generator.programs(beams, room)
        logits = one.take_in([prompt], longest).expand([beams, vocab])
        rows.take_rows(one, np.zeros(beams, np.int64))
        keep = min(max(2, 1 + len(end)) * beams, beams * vocab)
        texts: list[list[int]] = [[] for _ in range(beams)]
        scores = np.full(beams, _NEVER, np.float32)
        scores[0] = 0
        ended = _EndedTexts(params)
        for length in range(1, limit + 1):
            values, numbers = self._best(logits, scores, prompt, texts, params, length, keep)
            if np.isnan(values).any():
                raise NumericsError(f"beam search: logits are not finite at token {length - 1}")
            parents, tokens = np.divmod(numbers, vocab)
            is_end = np.isin(tokens, end)
            hits = is_end | (length == limit)
            candidates = [[*texts[parent], int(token)] for parent, token in zip(parents, tokens, strict=True)]
            ended.add(values, candidates, hits, is_end, length)
            order = np.argsort(-(values + hits * _NEVER), kind="stable")[:beams]
            texts, scores = [candidates[i] for i in order], (values + hits * _NEVER)[order]
            if ended.is_over(scores, length, limit) or hits.all():
                break
            if (parents[order] != np.arange(beams)).any():
                rows.take_rows(rows, parents[order])
            logits = rows.logits_after(tokens[order])
        return ended.best(params.n)

    def _best(
        self,
        logits: Any,
        scores: np.ndarray,
        prompt: Sequence[int],
        texts: list[list[int]],
        params: BeamSearchParams,
        length: int,
        keep: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        vocab = logits.shape[-1]
        hidden = np.arange(vocab) >= self.generator.num_known
        if length <= params.min_tokens:
            hidden[list(self.generator.end)] = True
            hidden[list(params.stop_token_ids)] = True
        seen = creation.zeros([params.num_beams, vocab], "bool")
        if params.repetition_penalty != 1:
            tokens = np.array([[*prompt, *text] for text in texts], np.int32)
            seen = marked(seen, to_tensor(tokens))
        if keep not in self._candidates:
            self._candidates[keep] = to_static(functools.partial(_best_continuations, count=keep))
        penalty = np.full(params.num_beams, params.repetition_penalty, np.float32)
        values, numbers = self._candidates[keep](logits, *map(to_tensor, (scores, seen, penalty, hidden)))
        return values.numpy(), numbers.numpy()


class _EndedTexts:
    """The best texts that have ended, and whether open ones may still be among them."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.params = params
        self.scores = np.full(params.num_beams, _NEVER, np.float32)
        self.texts: list[BeamText | None] = [None] * params.num_beams
        self._may_improve = True

    @property
    def _are_all(self) -> bool:
        return all(text is not None for text in self.texts)

    def add(
        self, values: np.ndarray, candidates: list[list[int]], hits: np.ndarray, is_end: np.ndarray, length: int
    ) -> None:
        """Put in those of the candidates, best first, that ended among the first num_beams."""
        if not self._may_improve or (self._are_all and self.params.early_stopping is True):
            return
        beams = self.params.num_beams
        texts, scores = list(self.texts), list(self.scores)
        for text, value, hit, ends in zip(candidates[:beams], values, hits, is_end, strict=False):
            if hit:
                score = np.float32(value) / np.float32(length**self.params.length_penalty)
                kept, reason = (text[:-1], "stop") if ends else (text, "length")
                texts.append(BeamText(kept, float(score), reason, text[-1] if ends else None))
                scores.append(score)
        order = np.argsort(-np.array(scores, np.float32), kind="stable")[:beams]
        self.texts, self.scores = [texts[i] for i in order], np.array(scores, np.float32)[order]

    def is_over(self, open_scores: np.ndarray, length: int, limit: int) -> bool:
        """Whether no open text may be among them, given their log-probabilities and lengths."""
        params = self.params
        is_never = params.early_stopping == "never" and params.length_penalty > 0
        best = open_scores[0] / np.float32((limit if is_never else length) ** params.length_penalty)
        worst = self.scores.min() if self._are_all else _NEVER
        self._may_improve = self._may_improve and bool(best > worst)
        return not self._may_improve or (self._are_all and params.early_stopping is True)

    def best(self, count: int) -> list[BeamText]:
        """So many of them."""
        return [text for text in self.texts[:count] if text is not None]


def _best_continuations(logits: Any, scores: Any, seen: Any, penalty: Any, hidden: Any, count: int) -> Any:
    """The `count` best continuations of beams by one token: their log-probabilities, and beam * vocab + token.

    logits [beams, vocab], scores [beams]: log-probabilities of the beams. seen, penalty: as of penalized, here of
    log-probabilities. hidden: bool [vocab], tokens that may not come.
    """
    logs = penalized(F.log_softmax(logits, -1), seen, penalty).masked_fill(hidden, -np.inf)
    return (logs + scores.unsqueeze(1)).flatten().topk(count)
